"""trunkline.dcp in one process: what is written, read and refused."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support_dcp import assert_same, blank, failure, load, nested, numbers, save, shards  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys  # noqa: E402

from trunkline.dcp import _request, _shard_layout  # noqa: E402
from trunkline.dcp._stored import DTYPES  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")

MIB = 1 << 20


@pytest.mark.parametrize("durable", [True, False])
def test_a_nested_state_comes_back(tmp_path: Path, durable: bool) -> None:
    state = nested(1)
    save(state, tmp_path / "new" / "step", durable=durable)
    assert_same(load(blank(state), tmp_path / "new" / "step"), state)
    assert_same(load(blank(state), tmp_path / "new" / "step", verify=False), state)
    assert len(shards(tmp_path / "new" / "step")) == 1
    assert_same(
        _load_state_dict_from_keys(storage_reader=tl.dcp.StorageReader(tmp_path / "new" / "step")), state
    )
    picked = _load_state_dict_from_keys(
        "model", storage_reader=tl.dcp.StorageReader(tmp_path / "new" / "step")
    )
    assert_same(picked, {"model": state["model"]})


def storable_dtypes() -> Iterator[torch.dtype]:
    for dtype in dict.fromkeys(DTYPES.values()):
        try:
            torch._utils._element_size(dtype)  # what torch's own planner asks for
        except TypeError:
            continue
        if not str(dtype).startswith("torch.q"):
            yield dtype


def test_every_dtype(tmp_path: Path) -> None:
    state = {}
    for dtype in storable_dtypes():
        for count in (1, 5000):
            source = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)  # valid for bool too
            state[f"{dtype}.{count}"] = source.view(dtype)
    assert len(state) >= 40
    save(state, tmp_path, DefaultSavePlanner(flatten_state_dict=False))
    into = {
        name: torch.zeros(value.nbytes, dtype=torch.uint8).view(value.dtype) for name, value in state.items()
    }
    load(into, tmp_path, DefaultLoadPlanner(flatten_state_dict=False))
    for name, value in state.items():
        assert torch.equal(into[name].view(torch.uint8), value.view(torch.uint8)), name


def test_conjugated_and_negated_views(tmp_path: Path) -> None:
    source = torch.view_as_complex(numbers(30, 2))
    state = {"conj": source.conj(), "neg": source.conj().imag}
    save(state, tmp_path)
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    loaded = load({"conj": torch.zeros(30, dtype=source.dtype), "neg": torch.zeros(30)}, tmp_path)
    assert torch.equal(loaded["conj"], state["conj"])
    assert torch.equal(loaded["neg"], state["neg"])


def test_large_tensors_are_aligned_and_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"small": numbers(3), "a": numbers(5000), "b": numbers(1025), "tiny": numbers(1)}
    save(state, tmp_path)
    items = tl.dcp.StorageReader(tmp_path).read_metadata().storage_data
    offsets = {index.fqn: item.offset for index, item in items.items()}
    assert offsets["a"] % 4096 == 0
    assert offsets["b"] % 4096 == 0
    assert offsets["small"] % 64 == 0
    assert max(offsets["small"], offsets["tiny"]) < shards(tmp_path)[0].stat().st_size

    def no_memory(nbytes: int) -> None:
        raise AssertionError(f"{nbytes} bytes were held")

    monkeypatch.setattr(_request, "aligned_empty", no_memory)
    assert_same(load(blank(state), tmp_path), state)


def test_what_differs_is_converted(tmp_path: Path) -> None:
    state = {"a": numbers(600, 70), "b": numbers(600, 70)}
    save(state, tmp_path)
    into = {
        "a": torch.zeros(600, 70, dtype=torch.bfloat16),
        "b": torch.zeros(70, 600, dtype=torch.float64).t(),
    }
    load(into, tmp_path)
    assert torch.equal(into["a"], state["a"].bfloat16())
    assert torch.equal(into["b"], state["b"].double())


def test_one_element_of_any_stride(tmp_path: Path) -> None:
    """Of a tensor of one element the stride says nothing, and may be any number."""
    saved, loaded = torch.tensor([7.0, 0.0])[::2], torch.zeros(2)[::2]
    assert saved.is_contiguous()
    assert saved.stride() == (2,)
    save({"x": saved}, tmp_path)
    load({"x": loaded}, tmp_path)
    assert loaded.item() == 7.0


def test_targets_that_share_memory_get_the_last(tmp_path: Path) -> None:
    save({"b": numbers(9000, seed=2), "a": numbers(9000, seed=1)}, tmp_path)  # loading sorts the keys
    shared = torch.zeros(9000)
    load({"a": shared, "b": shared}, tmp_path)
    assert torch.equal(shared, numbers(9000, seed=2))


def test_few_rows_read_few_bytes(tmp_path: Path) -> None:
    stored = numbers(16 * MIB // 256, 64)  # 16 MiB
    save({"w": stored}, tmp_path)
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex("w", (0, 0)),
        dest_offsets=torch.Size((0, 0)),
        storage_index=MetadataIndex("w", (0, 0)),
        storage_offsets=torch.Size((5000, 0)),
        lengths=torch.Size((16, 64)),
    )
    for verify in (True, False):
        with tl.Engine("threads") as engine:
            into = torch.zeros(16, 64)
            read_boxes(tmp_path, [item], [into], verify=verify, engine=engine)
            assert torch.equal(into, stored[5000:5016])
            assert sum(engine.stats()["bytes"].values()) <= 4 * MIB  # a block of the transfers


class Boxes(LoadPlanner):
    """Gives tensors for items, and counts what is handed back."""

    def __init__(self, items: list[ReadItem], targets: list[torch.Tensor]) -> None:
        self.pairs = list(zip(items, targets, strict=True))
        self.committed: list[torch.Tensor] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return next(target for item, target in self.pairs if item is read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(tensor)

    set_up_planner = create_local_plan = create_global_plan = finish_plan = load_bytes = None


Boxes.__abstractmethods__ = frozenset()


def read_boxes(path: Path, items: list[ReadItem], targets: list[torch.Tensor], **options: Any) -> None:
    reader = tl.dcp.StorageReader(path, **options)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    planner = Boxes(items, targets)
    reader.read_data(LoadPlan(items), planner).wait()
    assert len(planner.committed) == len(items)


@st.composite
def box(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offsets = tuple(draw(st.integers(0, extent)) for extent in shape)
    return offsets, tuple(
        draw(st.integers(0, extent - offset)) for extent, offset in zip(shape, offsets, strict=True)
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_any_shape(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("boxes")
    stored = {}
    for name in "abc":
        shape = data.draw(st.lists(st.integers(0, 12), max_size=4), label="shape")
        shape = [1500 * shape[0], *shape[1:]] if shape and math.prod(shape) < 200 else shape
        stored[name] = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    save(stored, path, durable=False)
    items, targets, expected = [], [], []
    for _ in range(data.draw(st.integers(1, 8), label="parts")):
        name = data.draw(st.sampled_from("abc"))
        offsets, lengths = data.draw(box(tuple(stored[name].shape)))
        zeros = torch.Size([0] * len(lengths))
        index = MetadataIndex(name, zeros)
        item = ReadItem(LoadItemType.TENSOR, index, zeros, index, torch.Size(offsets), torch.Size(lengths))
        items.append(item)
        target = torch.zeros(lengths, dtype=data.draw(st.sampled_from([torch.float32, torch.float64])))
        if data.draw(st.booleans(), label="strided"):
            target = torch.zeros([*lengths, 2], dtype=target.dtype)[..., 0]
        targets.append(target)
        cut = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        expected.append(stored[name][cut])
    read_boxes(path, items, targets, verify=data.draw(st.booleans(), label="verify"))
    for target, value in zip(targets, expected, strict=True):
        assert torch.equal(target.float(), value)


def test_parts_that_overlap(tmp_path: Path) -> None:
    stored = numbers(300, 50)
    save({"w": stored}, tmp_path)
    zero = torch.Size((0, 0))
    index = MetadataIndex("w", zero)
    items, targets, expected = [], [], []
    for offsets, lengths in (
        ((0, 0), (300, 50)),
        ((100, 0), (50, 50)),
        ((120, 0), (180, 50)),
        ((9, 7), (200, 3)),
    ):
        items.append(
            ReadItem(LoadItemType.TENSOR, index, zero, index, torch.Size(offsets), torch.Size(lengths))
        )
        targets.append(torch.zeros(lengths))
        expected.append(stored[offsets[0] : offsets[0] + lengths[0], offsets[1] : offsets[1] + lengths[1]])
    read_boxes(tmp_path, items, targets)
    for target, value in zip(targets, expected, strict=True):
        assert torch.equal(target, value)


def test_memory_between_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shard_layout, "MAX_COPIED_BYTES", 100_000)
    monkeypatch.setattr(_request, "MAX_BUFFERED_BYTES", 100_000)
    state = {f"t{i}": numbers(100, 100, seed=i).t() for i in range(7)}
    save(state, tmp_path)
    assert len(shards(tmp_path)) == 4  # two of 40 000 bytes at once
    assert_same(load(blank(state), tmp_path), state)


def test_partial_and_missing(tmp_path: Path) -> None:
    save({"a": numbers(10), "b": numbers(20)}, tmp_path)
    assert_same(load({"b": torch.zeros(20)}, tmp_path), {"b": numbers(20)})
    more = {"b": torch.zeros(20), "c": torch.ones(3)}
    with pytest.raises(CheckpointException, match="Missing key"):
        load(more, tmp_path)
    load(more, tmp_path, DefaultLoadPlanner(allow_partial_load=True))
    assert_same(more, {"b": numbers(20), "c": torch.ones(3)})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"a": torch.zeros(11)}, tmp_path)


class Halved(DefaultSavePlanner):
    """Stores bfloat16, which its metadata does not say."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        data = super().transform_object(write_item, object)
        return data.bfloat16() if isinstance(data, torch.Tensor) else data


def test_planners_transform(tmp_path: Path) -> None:
    save({"a": numbers(100, 30)}, tmp_path, Halved())
    assert torch.equal(load({"a": torch.zeros(100, 30)}, tmp_path)["a"], numbers(100, 30).bfloat16().float())

    class Renamed(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner(
                {name.removeprefix("my_"): value for name, value in state_dict.items()},
                metadata,
                is_coordinator,
            )

    into = {"my_a": torch.zeros(100, 30)}
    load(into, tmp_path, Renamed())
    assert torch.equal(into["my_a"], numbers(100, 30).bfloat16().float())


def test_cached_plans(tmp_path: Path) -> None:
    writer = tl.dcp.StorageWriter(tmp_path / "0")
    planner_data = None
    for step in range(3):
        state = {"a": numbers(50, seed=step), "n": step}
        dcp.save(
            state,
            checkpoint_id=tmp_path / str(step),
            storage_writer=writer,
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        assert writer.checkpoint_id == str(tmp_path / str(step))
        metadata = tl.dcp.StorageReader(tmp_path / str(step)).read_metadata()
        assert metadata.storage_meta.checkpoint_id == str(tmp_path / str(step))
        planner_data = planner_data or metadata.planner_data
        assert metadata.planner_data == planner_data
    for step in range(3):
        assert_same(
            load({"a": torch.zeros(50), "n": -1}, tmp_path / str(step)),
            {"a": numbers(50, seed=step), "n": step},
        )


def test_async_save_does_not_see_later_changes(tmp_path: Path) -> None:
    state = {"a": numbers(3000, 400), "b": {"c": numbers(5)}}
    expected = {"a": state["a"].clone(), "b": {"c": state["b"]["c"].clone()}}
    future = dcp.async_save(state, storage_writer=tl.dcp.StorageWriter(tmp_path))
    state["a"].fill_(-1)
    state["b"]["c"].fill_(-1)
    future.result(timeout=60)
    assert_same(load(blank(expected), tmp_path), expected)


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    save({"old": numbers(4)}, tmp_path)
    before = sorted(tmp_path.iterdir())
    quantized = torch.empty(4, dtype=torch.int8, device="meta")
    for value, what in (
        (torch.eye(3).to_sparse(), "sparse"),
        (quantized, "meta device"),
        (torch.nested.nested_tensor([numbers(2), numbers(3)], layout=torch.jagged), "Nested"),
    ):
        with pytest.raises(CheckpointException, match=what) as caught:
            save(
                {"fine": numbers(5000), "odd": value}, tmp_path, DefaultSavePlanner(flatten_state_dict=False)
            )
        assert "odd" in str(failure(caught)) or "Nested" in str(failure(caught))
    assert sorted(tmp_path.iterdir()) == before

    class Tagged(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data={"tags": [{1, 2}]})

    with pytest.raises(CheckpointException, match="set") as caught:
        save({"new": numbers(4)}, tmp_path, Tagged())
    assert isinstance(failure(caught), tl.Unsupported)
    assert "planner_data['tags'][0]" in str(failure(caught))
    assert sorted(tmp_path.iterdir()) == before
    assert_same(load({"old": torch.zeros(4)}, tmp_path), {"old": numbers(4)})


def test_arguments(tmp_path: Path, run_script: Callable[..., str]) -> None:
    for made in (tl.dcp.StorageWriter, tl.dcp.StorageReader):
        with pytest.raises(TypeError, match="^path: "):
            made(3)
        with pytest.raises(ValueError, match="^path: "):
            made("")
        assert made.validate_checkpoint_id(tmp_path / "a" / "b")
        assert made.validate_checkpoint_id("relative")
        assert not made.validate_checkpoint_id("s3://bucket/name")
        assert pickle.loads(pickle.dumps(made(tmp_path))).checkpoint_id == str(tmp_path)
        with tl.Engine("threads") as engine, pytest.raises(tl.Unsupported, match="^engine: "):
            pickle.dumps(made(tmp_path, engine=engine))
    with pytest.raises(TypeError, match="^volumes: "):
        tl.dcp.StorageWriter(tmp_path, volumes=str(tmp_path))
    with pytest.raises(TypeError, match=r"^volumes\[1\]: "):
        tl.dcp.StorageWriter(tmp_path, volumes=[tmp_path, 1])
    with pytest.raises(ValueError, match="^volumes: "):
        tl.dcp.StorageWriter(tmp_path, volumes=[])
    assert run_script("import sys, trunkline; print('torch' in sys.modules)").strip() == "False"


def test_checkpoint_id_takes_the_place_of_the_path(tmp_path: Path) -> None:
    writer, reader = tl.dcp.StorageWriter(), tl.dcp.StorageReader()
    assert writer.checkpoint_id is None
    with pytest.raises(CheckpointException, match="StorageWriter has no directory") as caught:
        dcp.save({"a": numbers(4)}, storage_writer=writer)
    assert isinstance(failure(caught), ValueError)
    with pytest.raises(CheckpointException, match="StorageReader has no directory"):
        dcp.load({"a": torch.zeros(4)}, storage_reader=reader)
    dcp.save({"a": numbers(4)}, checkpoint_id=tmp_path / "one", storage_writer=writer)
    dcp.save({"a": numbers(4, seed=1)}, checkpoint_id=tmp_path / "two", storage_writer=writer)
    for name, seed in (("one", 0), ("two", 1)):
        state = {"a": torch.zeros(4)}
        dcp.load(state, checkpoint_id=tmp_path / name, storage_reader=reader)
        assert_same(state, {"a": numbers(4, seed=seed)})
    assert writer.checkpoint_id == str(tmp_path / "two")


@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
def test_an_async_save_of_lazily_conjugated_tensors(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    state = {"a": {"conj": values.conj(), "neg": [values.conj().imag]}}
    dcp.async_save(state, storage_writer=tl.dcp.StorageWriter(tmp_path / "x"), no_dist=True).result()
    found = {"a": {"conj": torch.zeros_like(values), "neg": [torch.zeros(2)]}}
    dcp.load(found, storage_reader=tl.dcp.StorageReader(tmp_path / "x"), no_dist=True)
    assert found["a"]["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert found["a"]["neg"][0].tolist() == [-2, 4]
