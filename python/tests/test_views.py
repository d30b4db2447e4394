"""Tensors that share memory: written once, and views of each other again after loading."""

import copy
import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402

import trunkline as tl  # noqa: E402
from trunkline._tensor_io.tensors import bytes_of, contiguous  # noqa: E402
from trunkline.checkpoint.state import tree  # noqa: E402
from trunkline.checkpoint.state import views as view_nodes  # noqa: E402


def leaves(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in leaves(value)]
    if isinstance(state, (list, tuple)):
        return [leaf for value in state for leaf in leaves(value)]
    return [torch.from_numpy(state) if isinstance(state, np.ndarray) else state]


def bytes_of_elements(tensor: torch.Tensor) -> np.ndarray:
    """The address of every byte of every element, in the order of the elements."""
    at = np.zeros((), np.int64)
    for extent, step in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + np.arange(extent, dtype=np.int64) * step * tensor.itemsize
    return (at[..., None] + np.arange(tensor.itemsize)).reshape(-1) + tensor.data_ptr()


def aliasing(state: Any) -> list[int]:
    """For each byte of each element, the number of its memory, counted in the order in which it occurs."""
    numbers: dict[int, int] = {}
    return [
        numbers.setdefault(int(at), len(numbers))
        for leaf in leaves(state)
        for at in bytes_of_elements(leaf).tolist()
    ]


def values(state: Any) -> list[Any]:
    return [(leaf.dtype, leaf.shape, bytes_of(contiguous(leaf)).numpy().tobytes()) for leaf in leaves(state)]


def round_trip(state: Any) -> Any:
    skeleton, tensors = tree.flatten(state)
    loaded = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    return tree.restore(json.loads(json.dumps(skeleton)), loaded)


def as_torch_has_it(state: Any) -> Any:
    file = io.BytesIO()
    if len({leaf.dtype for leaf in leaves(state)}) > 1:  # torch.save refuses one memory as several dtypes
        return copy.deepcopy(state)
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@st.composite
def views(draw: st.DrawFn, bases: list[torch.Tensor]) -> torch.Tensor:
    base = draw(st.sampled_from(bases))
    if draw(st.integers(0, 3)) == 0:
        base = base.view(draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64])))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    room = base.numel() - 1
    stride = []
    for extent in shape:
        most = room // max(extent - 1, 1)
        stride.append(draw(st.integers(0, min(most, 9))))
        room -= stride[-1] * max(extent - 1, 0)
    offset = draw(st.integers(0, room))
    return base.as_strided(shape, stride, base.storage_offset() + offset)


@st.composite
def states(draw: st.DrawFn) -> Any:
    bases = [torch.arange(48, dtype=torch.int32), torch.arange(24, dtype=torch.float64)]
    leaf = views(bases) | st.sampled_from(bases)
    return draw(
        st.recursive(
            leaf,
            lambda s: st.lists(s, max_size=4) | st.dictionaries(st.sampled_from("abcd"), s, max_size=4),
            max_leaves=7,
        )
    )


@settings(max_examples=150, deadline=None)
@given(states())
def test_any_views_share_memory_as_those_that_torch_loads(state: Any) -> None:
    loaded = round_trip(state)
    model = as_torch_has_it(state)
    assert values(loaded) == values(model) == values(state)
    assert aliasing(loaded) == aliasing(model) == aliasing(state)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states(), apart=st.booleans())
def test_any_views_come_back_from_a_directory(tmp_path: Path, state: Any, apart: bool) -> None:
    checkpointer = tl.Checkpointer(tempfile.mkdtemp(dir=tmp_path))
    checkpointer.save(1, state, block=True)
    written = {int(at) for leaf in leaves(state) for at in bytes_of_elements(leaf)}
    manifest = checkpointer._context.store.read_manifest(1)
    assert sum(piece[2] for each in manifest["tensors"] for piece in each["pieces"]) == len(written)
    loaded = checkpointer.load()
    assert values(loaded) == values(state)
    assert aliasing(loaded) == aliasing(state)
    # Into a state that shares memory in the same way, or that shares none.
    into = cloned(state) if apart else as_torch_has_it(state)
    for leaf in leaves(into):
        leaf.zero_()
    filled = checkpointer.load(into=into)
    assert values(filled) == values(state)
    assert all(a is b for a, b in zip(leaves(filled), leaves(into), strict=True))


def cloned(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: cloned(value) for key, value in state.items()}
    if isinstance(state, list):
        return [cloned(value) for value in state]
    return state.clone(memory_format=torch.contiguous_format)


def test_views_are_written_once_and_write_through(tmp_path: Path) -> None:
    base = torch.arange(1_000_000, dtype=torch.float32).view(1000, 1000)
    state = {"b": base[10:20], "a": base, "c": base.T, "tied": base, "d": base[:, ::2]}
    checkpointer = tl.Checkpointer(tmp_path)
    checkpointer.save(1, state, block=True)
    [shard] = tmp_path.rglob("*.safetensors")
    assert shard.stat().st_size < 1.01 * base.nbytes
    # Stock readers find the memory under the name of the tensor that is all of it.
    stock = safetensors.torch.load_file(shard)
    assert list(stock) == ["a"]
    assert torch.equal(stock["a"], base)
    loaded = checkpointer.load()
    assert {key: each.stride() for key, each in loaded.items()} == {
        key: each.stride() for key, each in state.items()
    }
    assert loaded["tied"] is loaded["a"]
    loaded["a"][10, 0] = -1
    assert loaded["b"][0, 0] == loaded["c"][0, 10] == loaded["d"][10, 0] == -1


def test_small_views_of_a_large_memory_are_all_that_is_written(tmp_path: Path) -> None:
    base = torch.arange(1_000_000, dtype=torch.float32).view(1000, 1000)
    state = {
        "row": base[3],
        "part": base[3, 7:9],
        "columns": base[:, :2],
        "column": base[:, 1],
        "alone": base[9, 2:],
    }
    checkpointer = tl.Checkpointer(tmp_path)
    checkpointer.save(1, state, block=True)
    [shard] = tmp_path.rglob("*.safetensors")
    assert shard.stat().st_size < 4 * (1000 + 2000 + 1000) + 10_000
    stock = safetensors.torch.load_file(shard)
    assert {name: tuple(tensor.shape) for name, tensor in stock.items()} == {
        "row~storage": (2998,),  # the row and both columns, which cross it
        "alone": (998,),
    }
    loaded = checkpointer.load()
    assert values(loaded) == values(state)
    assert aliasing(loaded) == aliasing(state)
    assert checkpointer._context.store.read_manifest(1)["features"] == ["views"]


def test_memory_formats_are_kept(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {
        "channels_last": torch.nn.Parameter(image),
        "transposed": torch.randn(5, 3).T,
        "bits": torch.arange(6).to(torch.float8_e5m2).view(2, 3).T,
        "complex": torch.randn(2, 3, dtype=torch.complex128).T,
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "gaps": torch.arange(10)[::3],  # memory that nothing else has: without the gaps
    }
    checkpointer = tl.Checkpointer(tmp_path)
    checkpointer.save(1, state, block=True)
    [shard] = tmp_path.rglob("*.safetensors")
    # Stock readers find tensors as they are, in C order.
    assert torch.equal(safetensors.torch.load_file(shard)["channels_last"], image)
    loaded = checkpointer.load()
    assert values(loaded) == values(state)
    for key in ("channels_last", "transposed", "bits", "complex"):
        assert loaded[key].stride() == state[key].stride(), key
    assert loaded["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert isinstance(loaded["channels_last"], torch.nn.Parameter)
    assert loaded["fortran"].strides == state["fortran"].strides
    assert loaded["gaps"].is_contiguous()
    into = {
        key: value.clone() if isinstance(value, torch.Tensor) else value * 0 for key, value in state.items()
    }
    into["fortran"] = np.zeros((2, 3))
    into["transposed"] = torch.zeros(3, 5)
    filled = checkpointer.load(into=into)
    assert values(filled) == values(state)
    assert filled["channels_last"] is into["channels_last"]
    assert filled["channels_last"].is_contiguous(memory_format=torch.channels_last)


def test_a_state_without_views_is_of_version_1(tmp_path: Path) -> None:
    shared = torch.ones(3)
    flat = torch.arange(10.0)  # parts of one storage with no byte in common
    state = {"a": shared, "tied": shared, "b": flat[:4], "c": flat[4:], "gaps": flat[::3].clone()[::2]}
    checkpointer = tl.Checkpointer(tmp_path)
    checkpointer.save(1, state, block=True)
    [manifest] = tmp_path.rglob("manifest-*")
    assert manifest.read_bytes().startswith(b"trunkline checkpoint 1 ")
    state["view"] = flat[2:6]
    checkpointer.save(2, state, block=True)
    assert (
        next(tmp_path.rglob("step-00000002/manifest-*")).read_bytes().startswith(b"trunkline checkpoint 2 ")
    )


def test_lazy_conjugates_and_negatives_have_their_values() -> None:
    base = torch.randn(4, dtype=torch.complex64)
    state = {"base": base, "conj": base.conj(), "imag": base.conj().imag, "real": base.real}
    loaded = round_trip(state)
    for key, tensor in state.items():
        assert torch.equal(loaded[key], tensor), key
    loaded["base"][0] = 7
    assert loaded["real"][0] == 7
    assert loaded["conj"][0] == base.conj()[0]


def test_arrays_share_memory_with_each_other_and_with_tensors() -> None:
    base = np.arange(20, dtype=np.float32)
    state = {"x": base[2:12], "y": base[6:], "t": torch.from_numpy(base)[:3], "bytes": base.view("S4")[9:11]}
    state["matrix"] = base.reshape(4, 5).T
    loaded = round_trip(state)
    assert all(np.array_equal(loaded[key], state[key]) for key in ("x", "y", "bytes", "matrix"))
    assert loaded["matrix"].strides == state["matrix"].strides
    loaded["matrix"][0, 2] = -3  # element 10
    assert loaded["x"][8] == loaded["y"][4] == -3
    assert loaded["bytes"][1] == np.float32(-3).tobytes().rstrip(b"\0")
    loaded["t"][2] = -5
    assert loaded["x"][0] == -5
    # Views that reach beyond each other, of no array that is in the state.
    pair = round_trip([base[:12], base[8:]])
    pair[0][8:] = 0
    assert pair[1].tolist() == [0, 0, 0, 0, *range(12, 20)]
    read_only = base[3:5]
    read_only.flags.writeable = False
    assert round_trip([base, read_only])[1].tolist() == [3, 4]


def test_memory_of_very_many_pieces_is_stored_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_nodes, "MAX_RUNS", 100)
    base = torch.arange(1000)
    state = {"many": base[::2], "other": base[4:6], "few": base[::20], "part": base[20:22]}
    loaded = round_trip(state)
    assert values(loaded) == values(state)
    loaded["few"][1] = 0
    assert loaded["part"].tolist() == [0, 21]


def test_into_that_shares_memory_in_another_way_is_refused() -> None:
    base = torch.arange(10.0)
    skeleton, _ = tree.flatten({"a": base, "b": base[2:5], "c": torch.zeros(3)})
    memory = torch.zeros(20)
    for into in (
        {"a": memory[:10], "b": memory[3:6], "c": memory[10:13]},
        {"a": memory[:10], "b": memory[2:5], "c": memory[2:5]},
        {"a": memory[:10], "b": memory[10:13], "c": memory[12:15]},
    ):
        with pytest.raises(ValueError, match=r"into: state\['.'\] and state\['.'\] share memory"):
            tree.restore_into(skeleton, into)
    with pytest.raises(ValueError, match=r"into: state\['b'\] has elements that share memory"):
        tree.restore_into(skeleton, {"a": memory[:10], "b": torch.zeros(1).expand(3), "c": memory[10:13]})
    tree.restore_into(skeleton, {"a": memory[:10], "b": memory[2:5], "c": memory[10:13]})
    tree.restore_into(skeleton, {"a": memory[:10], "b": memory[10:16:2], "c": memory[11:17:2]})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"offset": 40}, 'within the bytes of its "storage"'),
        ({"offset": 2}, 'within the bytes of its "storage"'),
        ({"offset": -4}, "not a non-negative integer"),
        ({"stride": [10]}, 'within the bytes of its "storage"'),
        ({"stride": [2**62]}, 'within the bytes of its "storage"'),
        ({"stride": [1, 1]}, "one number for each dimension"),
        ({"stride": ["1"]}, "not a non-negative integer"),
        ({"stride": 1}, "one number for each dimension"),
        ({"storage": 44}, "does not have the bytes of its views"),
        ({"storage": 2**62}, "does not have the bytes of its views"),
        ({"storage": True}, 'within the bytes of its "storage"'),
        ({"shape": [4]}, 'within the bytes of its "storage"'),
        ({"tensor": "b"}, "the tensor 'b' is missing"),
        ({"dtype": "F64"}, 'within the bytes of its "storage"'),
        ({"stride": ...}, "has the keys"),
        ({"offset": ...}, "has the keys"),
    ],
)
def test_bad_views_say_what_is_wrong(change: dict[str, Any], says: str) -> None:
    base = torch.arange(10.0)
    skeleton, tensors = tree.flatten([base, base[7:]])
    skeleton[1].update(change)
    skeleton[1] = {key: value for key, value in skeleton[1].items() if value is not ...}
    with pytest.raises(tl.Format, match="invalid skeleton of a state") as caught:
        tree.restore(skeleton, tensors)
    assert says in str(caught.value)


def test_views_of_less_memory_than_others_need_are_rejected() -> None:
    base = torch.arange(15.0)
    skeleton, tensors = tree.flatten([base[:8], base[4:15:2]])
    small = skeleton[0] | {"shape": [3], "offset": 12, "storage": 24}
    with pytest.raises(tl.Format, match="differs between views of it"):
        tree.restore([small, *skeleton], tensors)


def test_strides_of_a_whole_tensor_are_checked() -> None:
    skeleton, tensors = tree.flatten(torch.zeros(2, 3).T)
    assert skeleton["stride"] == [1, 3]
    for stride in ([1, 2], [3, 3], [6, 2]):
        with pytest.raises(tl.Format, match="leaves gaps, or repeats"):
            tree.restore({**skeleton, "stride": stride}, {k: v.contiguous() for k, v in tensors.items()})


def test_millions_of_rows_are_looked_at_together() -> None:
    view = view_nodes.Strided((1 << 20, 1 << 20, 1 << 10), (1, 1, 0), 4, 8)
    assert view.runs().tolist() == [[8, 8 + 4 * (2 * (1 << 20) - 1)]]
    assert view.end() == 8 + 4 * (2 * (1 << 20) - 1)
    assert math.prod(view.shape) > 1 << 49


def test_arrays_of_every_kind_beside_shared_memory_with_gaps(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    record = np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")])
    state = {
        "x": base[:, :3],
        "y": base[:, 1:4],
        "text": np.array(["xx", "y"]),
        "record": record,
        "numbers": np.arange(6).reshape(2, 3),
        "fortran": np.asfortranarray(np.ones((2, 3))),
        "empty": np.empty((0, 2)),
    }
    checkpointer = tl.Checkpointer(tmp_path / "run", process_group=False)
    checkpointer.save(1, state, block=True)
    loaded = checkpointer.load()
    for name, expected in state.items():
        same = torch.equal if isinstance(expected, torch.Tensor) else np.array_equal
        assert same(loaded[name], expected), name
    assert loaded["record"].dtype == record.dtype
    loaded["x"].zero_()
    assert not loaded["y"][:, :2].any()
