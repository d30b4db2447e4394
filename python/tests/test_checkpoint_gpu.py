"""Checkpoints from and to the memory of GPUs: on the stand-in with tensors that pose, and on a real GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402
from support_gpu import CudaArray, stand_in  # noqa: E402
from support_posing import Poser, Posing, PosingStream  # noqa: E402

import trunkline as tl  # noqa: E402

RunScript = Callable[..., str]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    functions = stand_in()
    functions.fakeCudaReset()
    poser = Poser()
    poser.pose(monkeypatch)
    functions.poser = poser
    yield functions
    complaints = functions.fakeCudaComplaints()
    functions.fakeCudaReset()
    assert complaints == b""


def tensors(seed: int = 0) -> dict[str, Any]:
    """Of the CPU: small and large, of several dtypes, one empty, one without a dimension."""
    random = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(1100, 1000, generator=random),
        "bias": torch.randn(1000, generator=random).to(torch.bfloat16),
        "steps": torch.tensor(7),
        "mask": torch.rand(33, 3, generator=random) > 0.5,
        "nothing": torch.zeros(0, 5),
    }


def on_gpus(state: dict[str, Any]) -> dict[str, Any]:
    """Copies in the memory of the stand-in's two GPUs."""
    return {name: Posing.of(tensor, index % 2) for index, (name, tensor) in enumerate(state.items())}


def assert_same(found: dict[str, Any], expected: dict[str, Any], device: str = "cpu") -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].device == torch.device(device), name
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].cpu(), tensor), name


@pytest.mark.parametrize("background", [False, True])
def test_safetensors_there_and_back(gpu: Any, tmp_path: Path, background: bool) -> None:
    state, path = tensors(), tmp_path / "model.safetensors"
    if background:
        tl.save_async(on_gpus(state), path).wait()
    else:
        tl.save(on_gpus(state), path)
    assert_same(safetensors.torch.load_file(path), state)
    assert_same(tl.load(path, device="cuda:1"), state, "cuda:1")
    assert_same(tl.load(path), state)


def test_tensors_that_are_not_contiguous(gpu: Any, tmp_path: Path) -> None:
    whole = torch.arange(6000.0).reshape(60, 100)
    posing = Posing.of(whole)
    tl.save({"turned": posing.t(), "part": posing[3:7]}, tmp_path / "a.safetensors")
    assert_same(tl.load(tmp_path / "a.safetensors"), {"turned": whole.t().contiguous(), "part": whole[3:7]})
    checkpointer = tl.Checkpointer(tmp_path / "steps")
    checkpointer.save(1, {"turned": posing.t(), "part": posing[3:7]}, block=True)
    assert_same(checkpointer.load(), {"turned": whole.t().contiguous(), "part": whole[3:7]})


def test_a_folder_of_shards(gpu: Any, tmp_path: Path) -> None:
    state = tensors()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    assert_same(tl.load(tmp_path, device="cuda:0"), state, "cuda:0")


def test_checkpoints_there_and_back(gpu: Any, tmp_path: Path) -> None:
    state = tensors()
    checkpointer = tl.Checkpointer(tmp_path, volumes=None)
    checkpointer.save(1, {"model": on_gpus(state), "numbers": state["bias"].float().numpy()}, block=True)
    loaded = checkpointer.load()
    assert_same(loaded["model"], state)
    loaded = checkpointer.load(device="cuda:1")
    assert_same(loaded["model"], state, "cuda:1")
    assert (loaded["numbers"] == state["bias"].float().numpy()).all()
    into = {"model": on_gpus(tensors(1)), "numbers": state["bias"].float().numpy() * 0}
    filled = checkpointer.load(into=into)
    for name, tensor in into["model"].items():
        assert filled["model"][name] is tensor
        assert torch.equal(tensor.cpu(), state[name])
    checkpointer.verify()


def test_only_what_changed_is_written(gpu: Any, tmp_path: Path) -> None:
    state = tensors()
    checkpointer = tl.Checkpointer(tmp_path / "steps", incremental=True)
    shares = []
    for step in range(3):
        if step == 2:
            state["weight"][700, 3] += 1
        handle = checkpointer.save(step, {"model": on_gpus(state)})
        handle.wait()
        shares.append(handle.written_share())
        assert_same(checkpointer.load()["model"], state)
    assert shares[:2] == [1.0, 0.0]
    assert 0 < shares[2] < 0.1


@pytest.mark.parametrize("way", ["save", "save_async", "checkpointer", "checkpointer in the background"])
def test_what_the_current_stream_holds_comes_first(gpu: Any, tmp_path: Path, way: str) -> None:
    array = CudaArray(bytes(3_000_000))
    tensor = Posing.over(array, torch.uint8, (3_000_000,))
    stream = PosingStream("cuda:0")
    gpu.poser.set_stream(stream)
    gpu.fakeCudaDelay(100_000)
    stream.stream.fill(array, 7)
    gpu.fakeCudaDelay(0)
    if way == "save":
        tl.save({"x": tensor}, tmp_path / "x.safetensors")
    elif way == "save_async":
        tl.save_async({"x": tensor}, tmp_path / "x.safetensors").wait()
    else:
        checkpointer = tl.Checkpointer(tmp_path / "steps")
        checkpointer.save(1, {"x": tensor}, block=way == "checkpointer").wait()
        assert (checkpointer.load()["x"] == 7).all()
        return
    assert (tl.load(tmp_path / "x.safetensors")["x"] == 7).all()


def test_a_snapshot_waits_for_no_later_work(gpu: Any, tmp_path: Path) -> None:
    tensor = Posing.of(torch.arange(1_000_000))
    stream = PosingStream("cuda:0")
    gpu.poser.set_stream(stream)
    checkpointer = tl.Checkpointer(tmp_path)
    handle = checkpointer.save(1, {"x": tensor})
    stream.stream.hold()  # what training does next
    handle.wait(60)
    gpu.fakeCudaRelease()
    assert torch.equal(checkpointer.load()["x"], torch.arange(1_000_000))


def test_what_is_loaded_comes_after_the_current_stream(gpu: Any, tmp_path: Path) -> None:
    tl.save({"x": torch.arange(500_000)}, tmp_path / "x.safetensors")
    checkpointer = tl.Checkpointer(tmp_path / "steps")
    checkpointer.save(1, {"x": torch.arange(500_000)}, block=True)
    array = CudaArray(bytes(4_000_000))
    into = {"x": Posing.over(array, torch.int64, (500_000,))}
    stream = PosingStream("cuda:0")
    gpu.poser.set_stream(stream)
    gpu.fakeCudaDelay(100_000)
    stream.stream.fill(array, 9)  # still reads, or writes, what the memory held before
    gpu.fakeCudaDelay(0)
    checkpointer.load(into=into)
    assert torch.equal(into["x"].cpu(), torch.arange(500_000))


def test_a_captured_graph_is_refused_by_name(gpu: Any, tmp_path: Path) -> None:
    state = {"x": Posing.of(torch.arange(10))}
    checkpointer = tl.Checkpointer(tmp_path)
    gpu.poser.capturing = True
    with pytest.raises(tl.Unsupported, match="CUDA graph is being captured"):
        checkpointer.save(1, state)
    gpu.poser.capturing = False
    checkpointer.save(1, state, block=True)


def test_a_failing_gpu_leaves_what_was_there(gpu: Any, tmp_path: Path) -> None:
    state, path = tensors(), tmp_path / "model.safetensors"
    tl.save(state, path)
    checkpointer = tl.Checkpointer(tmp_path / "steps")
    checkpointer.save(1, state, block=True)
    changed = on_gpus(tensors(1))
    gpu.fakeCudaFail(b"cuMemcpyDtoHAsync_v2", 700, 0, 100)
    with pytest.raises(tl.DeviceError):
        tl.save(changed, path)
    with pytest.raises(tl.DeviceError):
        checkpointer.save(2, changed, block=True)
    gpu.fakeCudaReset()
    assert_same(tl.load(path), state)
    assert checkpointer.steps() == [1]
    gpu.fakeCudaFail(b"cuMemcpyHtoDAsync_v2", 700, 0, 100)
    with pytest.raises(tl.DeviceError):
        tl.load(path, device="cuda")
    gpu.fakeCudaReset()
    assert_same(tl.load(path, device="cuda:0"), state, "cuda:0")


def test_damage_is_found_on_the_way_to_a_gpu(gpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tl.save(tensors(), path)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(tl.Corrupt):
        tl.load(path, device="cuda")


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tl.save({"x": torch.ones(3)}, path)
    with pytest.raises(tl.Unsupported, match="device: mps"):
        tl.load(path, device="mps")
    if not torch.cuda.is_available():
        with pytest.raises(tl.Unsupported, match="torch sees no CUDA GPU"):
            tl.load(path, device="cuda")
        with pytest.raises(tl.Unsupported, match="torch sees no CUDA GPU"):
            tl.Checkpointer(tmp_path / "steps").load(device="cuda")


def test_mapped_files_are_in_main_memory(gpu: Any, tmp_path: Path) -> None:
    tl.save({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    tl.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    for name in ("x.safetensors", "x.pt"):
        with pytest.raises(ValueError, match="mmap: mapped files are in main memory"):
            tl.load(tmp_path / name, device="cuda", mmap=True)


REAL = """
import sys, torch, trunkline as tl
from pathlib import Path
folder = Path(sys.argv[1])
torch.manual_seed(0)
weight = torch.randn(1500, 1000, device="cuda")
state = {
    "weight": weight, "tied": weight, "turned": weight.t(), "half": weight[:10].half(),
    "host": torch.arange(9), "sparse": torch.eye(3, device="cuda").to_sparse(), "empty": weight[:0],
}
dense = {name: tensor for name, tensor in state.items() if name != "sparse"}

def same(found, expected, device):
    for name, tensor in expected.items():
        assert found[name].device.type == device, (name, found[name].device)
        assert torch.equal(found[name].to_dense().cpu(), tensor.to_dense().cpu()), name

tl.save(state, folder / "a.pt")
stock = torch.load(folder / "a.pt", weights_only=True)
for name, tensor in state.items():
    assert stock[name].device.type == tensor.device.type and torch.equal(
        stock[name].to_dense(), tensor.to_dense())
same(tl.load(folder / "a.pt", device="cuda"), state, "cuda")
loaded = tl.load(folder / "a.pt", device="cuda")
assert loaded["weight"].data_ptr() == loaded["tied"].data_ptr()
same(tl.load(folder / "a.pt"), state, "cpu")
tl.save(dense, folder / "a.safetensors")
same(tl.load(folder / "a.safetensors", device="cuda"), dense, "cuda")
checkpointer = tl.Checkpointer(folder / "steps")
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    side.wait_stream(torch.cuda.default_stream())
    for step in range(20):
        weight.add_(1)
        expected = weight.clone()
        handle = checkpointer.save(step, dense)
        torch.cuda._sleep(10_000_000)
        handle.wait_staged()
        weight.mul_(1.5)
        handle.wait()
        assert torch.equal(checkpointer.load()["weight"], expected.cpu())
        assert torch.equal(checkpointer.load(device="cuda")["weight"], expected)
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    try:
        tl.save({"x": weight}, folder / "b.safetensors")
    except tl.Unsupported as error:
        assert "CUDA graph is being captured" in str(error), error
    else:
        raise AssertionError("not refused")
print("well")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; a stand-in was tested instead")
def test_a_real_gpu(run_script: RunScript, tmp_path: Path) -> None:
    assert run_script(REAL, str(tmp_path)).split()[-1] == "well"
