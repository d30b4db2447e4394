"""Loading parts of files: keys, dtype and map_location of load(), and tensors one by one."""

import collections
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import trunkline as tl

MIB = 1 << 20


def make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    model = collections.OrderedDict(
        (f"layers.{number}.weight", torch.randn(512, 1024, generator=generator)) for number in range(12)
    )
    model["bias"] = torch.arange(5.0)
    return {
        "model": model,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2 * MIB)}}, "param_groups": [{"lr": 0.1}]},
        "list": [torch.zeros(3), torch.ones(4)],
        "step": 12,
    }


def save(state: dict[str, Any], path: Path) -> Path:
    """Save in the format of the name; the tensors of the model alone as safetensors."""
    if path.name.endswith(".safetensors"):
        tl.save({f"model.{name}": tensor for name, tensor in state["model"].items()}, path)
        return path
    if path.suffix:
        tl.save(state, path)
        return path
    tl.Checkpointer(path).save(12, state, block=True)
    return path / "step-00000012"


class Read:
    """Bytes that an engine read."""

    nbytes = 0


@contextmanager
def counted() -> Iterator[tuple[tl.Engine, Read]]:
    """An engine, and what it has read when the block ends."""
    read = Read()
    with tl.Engine() as engine:
        yield engine, read
        read.nbytes = sum(engine.stats()["bytes"].values())  # type: ignore[arg-type]


ANY_FILE = pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "run"])


def load_part(path: Path, keys: Any, engine: tl.Engine, **options: Any) -> Any:
    if path.name == "step-00000012":
        return tl.Checkpointer(path.parent, engine=engine).load(12, keys=keys, **options)
    return tl.load(path, keys=keys, engine=engine, **options)


def weight_of(loaded: Any, name: str) -> torch.Tensor:
    model = loaded.get("model", loaded)
    found = model[name] if name in model else model[f"model.{name}"]
    assert isinstance(found, torch.Tensor)
    return found


@ANY_FILE
@pytest.mark.parametrize("verify", [True, False])
def test_keys_read_only_their_bytes(tmp_path: Path, name: str, verify: bool) -> None:
    state = make_state()
    path = save(state, tmp_path / name)
    with counted() as (engine, read):
        loaded = load_part(path, "model.layers.3", engine, verify=verify)
    wanted = state["model"]["layers.3.weight"]
    assert torch.equal(weight_of(loaded, "layers.3.weight"), wanted)
    assert len(loaded) == 1
    # Manifests and headers are read as well; with checksums, the pieces of 1 MiB in which the tensor lies.
    # Of a .pt file the last MiB is read first, which has its directory.
    slack = MIB + 128 * 1024 + (0 if not verify or name == "m.pt" else 2 * MIB)
    assert wanted.nbytes <= read.nbytes <= wanted.nbytes + slack


@ANY_FILE
def test_keys_far_apart_are_read_without_what_is_between(tmp_path: Path, name: str) -> None:
    state = make_state()
    state["model"] = {f"{number:03}": torch.full((64 * 1024,), float(number)) for number in range(60)}
    path = save(state, tmp_path / name)
    keys = [f"model.{number:03}" for number in (3, 20, 40)]
    with counted() as (engine, read):
        loaded = load_part(path, keys, engine, verify=False)
    for number in (3, 20, 40):
        assert float(weight_of(loaded, f"{number:03}")[-1]) == number
    assert read.nbytes < 3 * 256 * 1024 + MIB + 128 * 1024


@ANY_FILE
def test_what_keys_select(tmp_path: Path, name: str) -> None:
    state = make_state()
    path = save(state, tmp_path / name)
    with tl.Engine() as engine:
        loaded = load_part(path, ["model.layers.1", "model.bias"], engine)
        names = list(loaded.get("model", loaded))
        assert sorted(each.removeprefix("model.") for each in names) == [
            "bias",
            "layers.1.weight",
        ]  # not layers.10
        by_function = load_part(path, lambda each: each.endswith("bias"), engine)
        assert torch.equal(weight_of(by_function, "bias"), state["model"]["bias"])
        assert sum(1 for _ in by_function) == 1
        assert load_part(path, lambda _: False, engine) == {}
        with pytest.raises(ValueError, match=r"^keys: .* has nothing named 'modle'; did you mean 'model'"):
            load_part(path, ["model.bias", "modle"], engine)
        with pytest.raises(ValueError, match="^keys: the list is empty"):
            load_part(path, [], engine)
        with pytest.raises(TypeError, match="^keys: must be a name, a list"):
            load_part(path, 3, engine)


@pytest.mark.parametrize("name", ["m.pt", "run"])
def test_parts_keep_their_nesting(tmp_path: Path, name: str) -> None:
    state = make_state()
    path = save(state, tmp_path / name)
    with tl.Engine() as engine:
        loaded = load_part(path, ["optimizer", "list.1", "step"], engine)
        assert loaded.keys() == {"optimizer", "list", "step"}
        assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1}]
        assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], torch.ones(2 * MIB))
        assert loaded["list"][0] is None
        assert torch.equal(loaded["list"][1], torch.ones(4))
        assert loaded["step"] == 12
        model = load_part(path, "model", engine)["model"]
        assert type(model) is collections.OrderedDict
        assert load_part(path, "optimizer.state.0", engine)["optimizer"].keys() == {"state"}


def test_keys_of_a_file_that_torch_unpickles(tmp_path: Path) -> None:
    """A set makes the package leave the pickle to torch, which still reads only what is selected."""
    state = {**make_state(), "set": {1, 2}}
    torch.save(state, tmp_path / "m.pt")
    with counted() as (engine, read):
        loaded = tl.load(tmp_path / "m.pt", keys="model.layers.3", engine=engine)
    assert torch.equal(loaded["model"]["layers.3.weight"], state["model"]["layers.3.weight"])
    assert read.nbytes < 4 * MIB
    assert tl.load(tmp_path / "m.pt", keys="set")["set"] == {1, 2}


def test_a_state_filled_in_part(tmp_path: Path) -> None:
    state = make_state()
    save(state, tmp_path / "run")
    model = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
    with counted() as (engine, read):
        checkpoints = tl.Checkpointer(tmp_path / "run", engine=engine)
        loaded = checkpoints.load(into={"model": model})
    assert loaded.keys() == {"model"}
    assert all(loaded["model"][name] is model[name] for name in model)
    assert all(torch.equal(model[name], state["model"][name]) for name in model)
    nbytes = sum(tensor.nbytes for tensor in model.values())
    assert nbytes <= read.nbytes <= nbytes + 2 * MIB
    layer = {"layers.3.weight": torch.zeros(512, 1024)}
    checkpoints = tl.Checkpointer(tmp_path / "run")
    checkpoints.load(into={"model": layer}, keys="model.layers.3")
    assert torch.equal(layer["layers.3.weight"], state["model"]["layers.3.weight"])
    for into, said in (
        ({"model": layer}, r"lacks the keys .*pass keys= as well"),
        (
            {"modle": layer},
            "into: state has the key 'modle', which the checkpoint lacks; did you mean 'model'",
        ),
        ({"model": model, "more": 1}, "which the checkpoint lacks"),
        ({}, "lacks the keys"),
    ):
        with pytest.raises(ValueError, match=said):
            checkpoints.load(into=into)


def test_parts_of_views(tmp_path: Path) -> None:
    """Memory that is shared with what is not loaded is read as a whole, and the values are right."""
    memory = torch.arange(100.0)
    state = {"whole": memory, "part": memory[10:20], "gaps": {"a": torch.arange(50.0)[5:9]}}
    apart = torch.arange(1000.0)
    state["left"], state["right"] = apart[100:300], apart[200:700]
    checkpoints = tl.Checkpointer(tmp_path / "run")
    checkpoints.save(1, state, block=True)
    for name in ("whole", "part", "left", "right"):
        assert torch.equal(checkpoints.load(keys=name)[name], state[name])
        into = {name: torch.zeros_like(state[name])}
        checkpoints.load(into=into)
        assert torch.equal(into[name], state[name])
    with tl.open_tensors(tmp_path / "run" / "step-00000001") as tensors:
        for name in ("whole", "part", "left", "right"):
            assert torch.equal(tensors[name], state[name])
            assert torch.equal(tensors.get_slice(name)[2:5], state[name][2:5])


def test_damage_elsewhere_does_not_matter(tmp_path: Path) -> None:
    """A part is verified, and bytes that it does not need are not."""
    state = {"first": torch.zeros(MIB), "second": torch.ones(MIB), "third": torch.zeros(MIB)}
    for name in ("m.pt", "m.safetensors", "run"):
        path = tmp_path / name
        if name == "run":
            tl.Checkpointer(path).save(1, state, block=True)
            [file] = path.rglob("*.safetensors")
        else:
            tl.save(state, path)
            file = path
        data = bytearray(file.read_bytes())
        at = data.find(torch.ones(1000).numpy().tobytes()) + 2 * MIB
        data[at] ^= 4
        file.write_bytes(data)
        load: Callable[..., Any] = tl.Checkpointer(path).load if name == "run" else partial(tl.load, path)
        for intact in ("first", "third"):
            assert torch.equal(load(keys=intact)[intact], state[intact])
        with pytest.raises(tl.Corrupt) as caught:
            load(keys="second")
        assert caught.value.tensor == "second"
        opened = path / "step-00000001" if name == "run" else path
        with tl.open_tensors(opened) as tensors:
            assert torch.equal(tensors["first"], state["first"])
            with pytest.raises(tl.Corrupt):
                tensors["second"]
            assert torch.equal(tensors.get_slice("second")[:10], torch.ones(10))
        with tl.open_tensors(opened, verify=True) as tensors, pytest.raises(tl.Corrupt):
            tensors.get_slice("second")[:10]
        with tl.open_tensors(opened, verify=False) as tensors:
            assert not torch.equal(tensors["second"], state["second"])


@ANY_FILE
def test_tensors_one_by_one(tmp_path: Path, name: str) -> None:
    state = make_state()
    path = save(state, tmp_path / name)
    wanted = state["model"]["layers.3.weight"]
    with counted() as (engine, read), tl.open_tensors(path, engine=engine, verify=False) as tensors:
        assert "model.layers.3.weight" in tensors
        assert "model.bias" in tensors.keys()  # noqa: SIM118 - as users of safetensors write
        assert len(tensors) == len(list(tensors))
        opened = sum(engine.stats()["bytes"].values())  # type: ignore[arg-type]
        assert torch.equal(tensors["model.layers.3.weight"], wanted)
        rows = tensors.get_slice("model.layers.3.weight")
        assert rows.shape == (512, 1024)
        assert rows.get_shape() == [512, 1024]
        assert rows.dtype is torch.float32
        before = sum(engine.stats()["bytes"].values())  # type: ignore[arg-type]
        assert before - opened < wanted.nbytes + 64 * 1024
        assert torch.equal(rows[100:110], wanted[100:110])
        assert torch.equal(rows[7, 8], wanted[7, 8])
        after = sum(engine.stats()["bytes"].values())  # type: ignore[arg-type]
        assert after - before < 10 * 4096 + 4 * 4096  # whole sectors
        with pytest.raises(KeyError, match="no tensor named 'missing'"):
            tensors["missing"]
        with pytest.raises(KeyError, match="no tensor named 'missing'"):
            tensors.get_slice("missing")
    with pytest.raises(tl.Error, match="is closed; call open_tensors"):
        tensors["model.bias"]
    assert read.nbytes < 2 * MIB + wanted.nbytes


INDICES = [
    0,
    -1,
    slice(2, 5),
    slice(None),
    slice(5, 2),
    slice(1, 7, 3),
    slice(-3, None),
    ...,
    (1, 2),
    (slice(None), 3),
    (slice(2, 4), slice(1, 3)),
    (..., slice(1, 4)),
    (slice(1, 6, 2), ..., slice(0, 3, 2)),
    (3, ..., 2),
    (slice(0, 0), 1),
    (4, slice(1, 3), slice(2, 4)),
]


@ANY_FILE
def test_slices_are_those_of_torch(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(8 * 5 * 6, dtype=torch.int16).reshape(8, 5, 6)
    state = {"model": {"a": tensor, "scalar": torch.tensor(3), "turned": tensor[:, :, 0].t()}, "step": 1}
    path = save(state, tmp_path / name)
    with tl.open_tensors(path) as tensors:
        stored = tensors.get_slice("model.a")
        for index in INDICES:
            assert torch.equal(stored[index], tensor[index]), index
        assert torch.equal(tensors.get_slice("model.scalar")[()], torch.tensor(3))
        assert torch.equal(tensors.get_slice("model.turned")[1:3], tensor[:, :, 0].t()[1:3])
        for wrong, error in (
            (9, IndexError),
            ((0, 0, 0, 0), IndexError),
            ((..., ...), IndexError),
            ([1, 2], TypeError),
            (None, TypeError),
            (True, TypeError),
            (slice(None, None, -1), ValueError),
            (torch.tensor([1]), TypeError),
        ):
            with pytest.raises(error):
                stored[wrong]


def test_columns_read_only_their_bytes(tmp_path: Path) -> None:
    """As for tensor parallelism: half of each row."""
    matrix = torch.randn(64, 128 * 1024)
    path = tmp_path / "m.safetensors"
    tl.save({"matrix": matrix}, path)
    with counted() as (engine, read), tl.open_tensors(path, engine=engine) as tensors:
        assert torch.equal(tensors.get_slice("matrix")[:, 64 * 1024 :], matrix[:, 64 * 1024 :])
    assert read.nbytes < matrix.nbytes // 2 + MIB


def test_a_tensor_of_several_shards_is_sliced(tmp_path: Path) -> None:
    volumes = [tmp_path / "v0", tmp_path / "v1", tmp_path / "v2"]
    checkpoints = tl.Checkpointer(tmp_path / "run", volumes=volumes)
    big = torch.arange(3 * MIB).reshape(3 * 1024, 1024)
    checkpoints.save(5, {"big": big, "array": big[:7].numpy()}, block=True)
    with tl.open_tensors(tmp_path / "run") as tensors:  # the latest step
        assert torch.equal(tensors["big"], big)
        assert torch.equal(tensors.get_slice("big")[500:2500, 10:20], big[500:2500, 10:20])
        assert torch.equal(tensors["array"], big[:7])
        assert torch.equal(tensors.get_slice("array")[1:3], big[1:3])
        metadata = tensors.metadata()
    assert metadata["step"] == "5"
    assert metadata["commit"] == "1"
    with pytest.raises(FileNotFoundError):
        tl.open_tensors(tmp_path / "nothing")


def test_metadata_and_folders(tmp_path: Path) -> None:
    first, second = {"a": torch.ones(3)}, {"b": torch.zeros(4)}
    for number, tensors in enumerate((first, second)):
        safetensors.torch.save_file(tensors, tmp_path / f"part-{number}.safetensors", {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "part-0.safetensors", "b": "part-1.safetensors"}}'
    )
    with tl.open_tensors(tmp_path) as opened:
        assert opened.keys() == ["a", "b"]
        assert torch.equal(opened["b"], second["b"])
        assert opened.metadata() == {"format": "pt"}
    assert tl.load(tmp_path, keys="b").keys() == {"b"}
    tl.save(first, tmp_path / "ours.safetensors")
    with tl.open_tensors(tmp_path / "ours.safetensors") as opened:
        assert opened.metadata() == {}


def test_an_open_file_is_read_though_it_is_replaced(tmp_path: Path) -> None:
    for name in ("m.pt", "m.safetensors"):
        path = tmp_path / name
        tl.save({"a": torch.ones(MIB)}, path)
        with tl.open_tensors(path) as tensors:
            tl.save({"a": torch.zeros(MIB)}, path)
            assert bool((tensors["a"] == 1).all())
            assert bool((tensors.get_slice("a")[5:9] == 1).all())


def test_dtype_converts_floating_point_tensors(tmp_path: Path) -> None:
    shared = torch.nn.Parameter(torch.randn(30))
    state = {
        "weight": shared,
        "tied": shared,
        "double": torch.ones(4, dtype=torch.float64),
        "count": torch.arange(3),
        "flag": torch.tensor([True]),
        "list": [torch.ones(2), (torch.zeros(1), "x")],
        "small": torch.ones(4).to(torch.float8_e4m3fn),
    }
    torch.save(state, tmp_path / "m.pt")
    for dtype in (torch.bfloat16, "bfloat16", "torch.bfloat16"):
        loaded = tl.load(tmp_path / "m.pt", dtype=dtype)
        assert torch.equal(loaded["weight"], shared.to(torch.bfloat16))
        assert isinstance(loaded["weight"], torch.nn.Parameter)
        assert loaded["tied"].data_ptr() == loaded["weight"].data_ptr()
        assert loaded["double"].dtype is torch.bfloat16
        assert loaded["count"].dtype is torch.int64
        assert loaded["flag"].dtype is torch.bool
        assert loaded["list"][1][0].dtype is torch.bfloat16
        assert loaded["list"][1][1] == "x"
        assert loaded["small"].dtype is torch.float8_e4m3fn
    for wrong, error in (
        ("int8", ValueError),
        ("nothing", ValueError),
        (torch.int32, ValueError),
        (3, TypeError),
    ):
        with pytest.raises(error, match="^dtype: "):
            tl.load(tmp_path / "m.pt", dtype=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [("plain", "parameter", "frozen"), ("frozen", "parameter", "plain")])
def test_dtype_keeps_parameters_that_share_memory_with_tensors(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    memory = torch.randn(30)
    state = {
        "plain": memory,
        "parameter": torch.nn.Parameter(memory),
        "frozen": torch.nn.Parameter(memory, requires_grad=False),
    }
    torch.save({name: state[name] for name in order}, tmp_path / "m.pt")
    loaded = tl.load(tmp_path / "m.pt", dtype="float64")
    for name, tensor in state.items():
        assert type(loaded[name]) is type(tensor)
        assert loaded[name].requires_grad == tensor.requires_grad
        assert loaded[name].dtype is torch.float64
        assert loaded[name].data_ptr() == loaded["plain"].data_ptr()


def test_map_location_as_torch_has_it(tmp_path: Path) -> None:
    state = make_state()
    tl.save(state, tmp_path / "m.pt")
    save(state, tmp_path / "m.safetensors")
    seen: list[str] = []

    def keep(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append(location)
        return storage

    for location in ("cpu", torch.device("cpu"), {"cuda:0": "cpu"}, {"cpu": "cpu"}, keep, lambda *_: None):
        for name in ("m.pt", "m.safetensors"):
            loaded = tl.load(tmp_path / name, map_location=location)  # type: ignore[arg-type]
            assert torch.equal(weight_of(loaded, "bias"), state["model"]["bias"])
    assert set(seen) == {"cpu"}
    for name in ("m.pt", "m.safetensors"):
        with pytest.raises(TypeError, match="^map_location: the function must return the storage"):
            tl.load(tmp_path / name, map_location=lambda *_: 3)  # type: ignore[arg-type, return-value]
        with pytest.raises(ValueError, match="^map_location: must be .cpu. or .cuda. .*, not 'nothing'"):
            tl.load(tmp_path / name, map_location={"cpu": "nothing"})
        with pytest.raises(tl.Unsupported, match="^map_location: meta is not supported"):
            tl.load(tmp_path / name, map_location=lambda *_: torch.UntypedStorage(0, device="meta"))


def test_locations_of_tensors_that_a_gpu_saved(tmp_path: Path) -> None:
    """The location in the file chooses the device: of two storages, each by its own."""
    from trunkline._formats import pt

    torch.save({"a": torch.ones(3), "b": torch.ones(MIB), "set": {1}}, tmp_path / "m.pt")
    torch.save({"a": torch.ones(3), "b": torch.ones(MIB)}, tmp_path / "plain.pt")
    for name in ("m.pt", "plain.pt"):
        locations: list[str] = []

        def locate(location: str, locations: list[str] = locations) -> torch.device:
            locations.append(location)
            return torch.device("cpu")

        pt.load(tmp_path / name, locate=locate)
        assert len(locations) >= 2
        assert set(locations) == {"cpu"}
    data = (tmp_path / "plain.pt").read_bytes()
    assert data.count(b"X\x03\x00\x00\x00cpu") == 1  # memoized after the first use
    changed = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x03\x00\x00\x00xpu")
    (tmp_path / "xpu.pt").write_bytes(changed)
    assert torch.equal(tl.load(tmp_path / "xpu.pt", verify=False)["a"], torch.ones(3))
    with pytest.raises(tl.Unsupported, match="^map_location: xpu is not supported"):
        tl.load(tmp_path / "xpu.pt", verify=False, map_location={})
    loaded = tl.load(tmp_path / "xpu.pt", verify=False, map_location={"xpu": "cpu"})
    assert torch.equal(loaded["b"], torch.ones(MIB))


def test_what_load_refuses_says_what_to_do_instead(tmp_path: Path) -> None:
    tl.save({"a": torch.ones(3)}, tmp_path / "m.pt")
    with pytest.raises(
        ValueError, match=r"^weights_only: must be True.*torch\.load\(path, weights_only=False\)"
    ):
        tl.load(tmp_path / "m.pt", weights_only=False)  # type: ignore[arg-type]
    with (tmp_path / "m.pt").open("rb") as opened:
        for file in (io.BytesIO(b""), opened):
            with pytest.raises(TypeError, match=r"not an open file.*torch\.load"):
                tl.load(file)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="not an open file"):
                tl.open_tensors(file)  # type: ignore[arg-type]
    torch.save({"a": {1}}, tmp_path / "set.pt")
    with pytest.raises(tl.Unsupported, match=r"load it with trunkline\.load"):
        tl.open_tensors(tmp_path / "set.pt")


def test_mmap_and_keys(tmp_path: Path) -> None:
    state = make_state()
    for name in ("m.pt", "m.safetensors"):
        path = save(state, tmp_path / name)
        loaded = tl.load(path, mmap=True, keys="model.bias")
        assert torch.equal(weight_of(loaded, "bias"), state["model"]["bias"])
        assert len(loaded) == 1
