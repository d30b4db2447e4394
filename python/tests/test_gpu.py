"""Files and the memory of GPUs, on the stand-in for the CUDA driver."""

import asyncio
import ctypes
import errno
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_gpu import CudaArray, DlpackArray, Stream, library, stand_in

import trunkline as tl

RunScript = Callable[..., str]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    functions = stand_in()
    functions.fakeCudaReset()
    yield functions
    complaints = functions.fakeCudaComplaints()
    functions.fakeCudaReset()
    assert complaints == b""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def random_bytes(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


@pytest.mark.parametrize("nbytes", [1, 511, 4096, 100_000, 3_000_001])
@pytest.mark.parametrize("make", [CudaArray, DlpackArray])
def test_every_size_there_and_back(make: Any, nbytes: int, path: Path) -> None:
    data = random_bytes(nbytes)
    source, target = make(data), make(bytes(nbytes))
    with tl.open(path, "w") as file:
        assert file.pwrite(source) == nbytes
        file.sync()
        assert path.read_bytes() == data
        assert file.pread(target) == nbytes
    assert getattr(target, "array", target).contents() == data


def test_futures_batches_and_await(path: Path) -> None:
    data = random_bytes(1_000_000)
    with tl.open(path, "w") as file:
        written = tl.default_engine().submit(
            [tl.Write(file, CudaArray(data[:500_000])), tl.Write(file, CudaArray(data[500_000:]), 500_000)]
        )
        assert [future.result() for future in written] == [500_000, 500_000]
        target = CudaArray(bytes(1_000_000))
        assert file.async_pread(target).result() == 1_000_000
        assert target.contents() == data

        async def again() -> int:
            return await file.async_pwrite(target)

        assert asyncio.run(again()) == 1_000_000


def test_a_stream_comes_first(path: Path, gpu: Any) -> None:
    nbytes = 2_000_000
    stream = Stream()
    array = CudaArray(bytes(nbytes))
    named = CudaArray(bytes(nbytes), stream=stream.ptr)
    submit = tl.default_engine().submit
    ways = {
        "object": lambda file: file.async_pwrite(array, stream=stream),
        "address": lambda file: file.async_pwrite(array, stream=stream.ptr),
        "of the array": lambda file: file.async_pwrite(named),
        "batch": lambda file: submit([tl.Write(file, array, stream=stream)])[0],
        "batch, of the array": lambda file: submit([tl.Write(file, named)])[0],
    }
    with tl.open(path, "w") as file:
        for value, (name, way) in enumerate(ways.items(), 1):
            stream.hold()
            for each in (array, named):
                stream.fill(each, value)
            future = way(file)
            assert not future.wait(0.02), name
            gpu.fakeCudaRelease()
            assert future.result() == nbytes
            assert path.read_bytes() == bytes([value]) * nbytes, name


class TorchStream:
    """How torch shows a stream; cuda.core and Numba have other names for the same."""

    def __init__(self, stream: Stream) -> None:
        self.cuda_stream = stream.ptr


class CoreStream:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int | None]:
        return 0, self.stream.ptr


class NumbaStream:
    def __init__(self, stream: Stream) -> None:
        self.handle = ctypes.c_void_p(stream.ptr)


@pytest.mark.parametrize("shown", [TorchStream, CoreStream, NumbaStream])
def test_streams_of_every_library(shown: Any, path: Path, gpu: Any) -> None:
    stream = Stream()
    array = CudaArray(bytes(1000))
    with tl.open(path, "w") as file:
        stream.hold()
        stream.fill(array, 5)
        future = file.async_pwrite(array, stream=shown(stream))
        assert not future.wait(0.02)
        gpu.fakeCudaRelease()
        assert future.result() == 1000
        assert path.read_bytes() == b"\x05" * 1000
    request = tl.Read(file, array, stream=stream)
    assert request.stream is stream


def test_dlpack_producers_are_told_which_stream_waits_for_theirs(path: Path) -> None:
    array = DlpackArray(b"1234")
    stream = Stream()
    with tl.open(path, "w") as file:
        file.pwrite(array)
        file.pwrite(array, stream=stream)
        file.pwrite(array, stream=0)  # the default stream, which DLPack calls 1
        file.pwrite(array, stream=2)
    assert array.streams == [1, stream.ptr, 1, 2]


def test_two_gpus_in_one_batch(path: Path) -> None:
    data = random_bytes(1_000_001)
    arrays = [make(data) for make in (lambda b: CudaArray(b, ordinal=1), CudaArray)]
    arrays.append(DlpackArray(data, device=(2, 1)))
    with tl.open(path, "w") as file:
        writes = [tl.Write(file, array, number * 1_000_001) for number, array in enumerate(arrays)]
        assert tl.wait_all(tl.default_engine().submit(writes)) == 3_000_003
        assert path.read_bytes() == data * 3
        with pytest.raises(tl.DeviceError, match="cuda:0"):
            file.pread(arrays[1], stream=Stream(1))


def test_a_graph_that_is_captured_is_refused(path: Path, gpu: Any) -> None:
    stream, other = Stream(), Stream()
    array = CudaArray(bytes(10))
    with tl.open(path, "w") as file:
        gpu.fakeCudaCapture(ctypes.c_void_p(stream.ptr))
        with pytest.raises(tl.Unsupported, match="CUDA graph"):
            file.pwrite(array, stream=stream)
        assert file.pwrite(array, stream=other) == 10


class TorchOnGpu(torch.Tensor):
    """What torch says of a CUDA tensor, where this build of it has none."""

    array: CudaArray
    is_cpu = False  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> Any:
        return "cuda:1"

    def get_device(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return self.array.address


def test_torch_tensors_follow_the_current_stream(
    path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(1)
    asked: list[Any] = []

    def current_stream(device: Any) -> Any:
        asked.append(device)
        return TorchStream(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    tensor = torch.zeros(500, dtype=torch.int16).as_subclass(TorchOnGpu)
    tensor.array = CudaArray(bytes(1000), ordinal=1)
    with tl.open(path, "w") as file:
        stream.hold()
        stream.fill(tensor.array, 6)
        future = file.async_pwrite(tensor)
        assert not future.wait(0.02)
        gpu.fakeCudaRelease()
        assert future.result() == 1000
        assert path.read_bytes() == b"\x06" * 1000
        assert asked == ["cuda:1"]
        assert file.pwrite(tensor, stream=Stream(1)) == 1000
        assert file.pread(tensor, stream=Stream(1)) == 1000
        assert asked == ["cuda:1"]


def test_pinned_memory_is_known_to_the_driver(gpu: Any) -> None:
    gc.collect()
    before = gpu.fakeCudaLive(b"registrations")
    buffer: tl.Buffer | None = tl.pinned_empty("1MiB")
    tensor: torch.Tensor | None = tl.torch.empty_pinned(1000)
    assert buffer is not None
    assert buffer.registered
    assert gpu.fakeCudaLive(b"registrations") == before + 2
    assert not tl.pinned_empty(10, "cpu").registered
    assert tl.pinned_empty(10, "cuda:1").registered
    buffer = tensor = None
    gc.collect()
    assert gpu.fakeCudaLive(b"registrations") <= before  # fewer where a model of another test went meanwhile
    del buffer, tensor


def test_pinned_memory_that_the_driver_refuses(gpu: Any) -> None:
    gpu.fakeCudaFail(b"cuMemHostRegister_v2", 2, 0, 3)
    assert not tl.pinned_empty(10).registered
    assert torch.equal(tl.torch.empty_pinned(10), torch.zeros(10))
    with pytest.raises(tl.DeviceError, match="^device: .*CUDA_ERROR_OUT_OF_MEMORY"):
        tl.pinned_empty(10, "cuda")


def test_pin(gpu: Any) -> None:
    before = gpu.fakeCudaLive(b"registrations")
    with tl.Engine(pinned_budget_bytes="1MiB") as engine:
        array = np.zeros(100_000, np.uint8)
        held = engine.stats()["pinned_bytes"]
        pin = tl.pin(array, engine=engine)
        assert (pin.nbytes, pin.device, pin.closed) == (100_000, "cpu", False)
        assert engine.stats()["pinned_bytes"] == held + 100_000
        assert gpu.fakeCudaLive(b"registrations") == before + 1
        with tl.pin(array[1000:2000], engine=engine):  # lies within
            assert gpu.fakeCudaLive(b"registrations") == before + 1
        pin.close()
        pin.close()
        assert pin.closed
        assert engine.stats()["pinned_bytes"] == held
        assert gpu.fakeCudaLive(b"registrations") == before
        with pytest.raises(tl.OutOfBudget, match="pinned_budget_bytes"):
            tl.pin(np.zeros(2_000_000, np.uint8), engine=engine)
        gpu.fakeCudaFail(b"cuMemHostRegister_v2", 2, 0, 1)
        with pytest.raises(tl.DeviceError, match="cannot pin 100000 bytes"):
            tl.pin(array, engine=engine)
        assert engine.stats()["pinned_bytes"] == held
    with tl.pin(CudaArray(bytes(10), ordinal=1)) as on_gpu:
        assert on_gpu.device == "cuda:1"
        assert "cuda:1" in repr(on_gpu)
    with pytest.raises(ValueError, match="not contiguous"):
        tl.pin(np.zeros((4, 4))[:, :2])


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_pins_of_the_same_memory_count_it_once(gpu: Any, order: list[int]) -> None:
    before = gpu.fakeCudaLive(b"registrations")
    with tl.Engine(pinned_budget_bytes="1MiB") as engine, tl.Engine(pinned_budget_bytes="1MiB") as other:
        array = np.zeros(800_000, np.uint8)
        held, others = engine.stats()["pinned_bytes"], other.stats()["pinned_bytes"]
        pins = [
            tl.pin(array, engine=engine),
            tl.pin(array[:600_000], engine=engine),  # both would not fit
            tl.pin(array[400_000:], engine=other),
        ]
        for left, index in enumerate(order):
            # As long as any part is held all of it is locked.
            assert engine.stats()["pinned_bytes"] == held + 800_000, left
            assert gpu.fakeCudaLive(b"registrations") == before + 1
            assert other.stats()["pinned_bytes"] == others
            pins[index].close()
        assert engine.stats()["pinned_bytes"] == held
        assert gpu.fakeCudaLive(b"registrations") == before
        part = tl.pin(array[:1000], engine=engine)
        with pytest.raises(tl.DeviceError, match="1000 of them are pinned already"):
            tl.pin(array, engine=engine)
        assert engine.stats()["pinned_bytes"] == held + 1000
        part.close()
        tl.pin(array, engine=engine).close()


def test_a_pin_keeps_its_memory(gpu: Any) -> None:
    tensor = torch.zeros(100_000)
    pin = tl.pin(tensor)
    watched = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert watched() is not None
    pin.close()
    gc.collect()
    assert watched() is None


def test_explain_names_the_way_of_gpus(tmp_path: Path) -> None:
    gpu = tl.default_engine().explain(tmp_path)["gpu"]
    assert gpu["path"] == "bounce"
    assert "nvidia-fs is not loaded; GPU memory is copied through pinned buffers" in gpu["why"]


def test_gpudirect_storage(path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_CUFILE", library())
    data = random_bytes(3_000_000 // 4096 * 4096)
    path.write_bytes(data)
    if not tl.default_engine().explain(path)["direct"]:
        pytest.skip("no direct I/O here")
    with tl.Engine(gpu="gds") as engine, tl.open(path, engine=engine) as file:
        assert engine.gpu == "gds"
        assert engine.explain(path)["gpu"] == {
            "path": "gds",
            "why": "it was requested, and a probe read the right bytes",
        }
        target = CudaArray(bytes(len(data)))
        with tl.pin(target):
            assert gpu.fakeCudaLive(b"direct memory") == 1
            before = gpu.fakeCufileUnregistered()
            file.pread(target)
            assert gpu.fakeCufileUnregistered() == before
        assert gpu.fakeCudaLive(b"direct memory") == 0
        assert target.contents() == data
        assert engine.stats()["bytes"]["gds"] == len(data)
    with tl.Engine(gpu="bounce") as engine, tl.open(path, engine=engine) as file:
        file.pread(CudaArray(bytes(len(data))))
        assert engine.stats()["bytes"]["bounced"] == len(data)
    with pytest.raises(ValueError, match='gpu: "cufile" is not one of "auto", "gds", "bounce"'):
        tl.Engine(gpu="cufile")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gpu: must be a str, not int"):
        tl.Engine(gpu=1)  # type: ignore[arg-type]
    monkeypatch.setenv("TRUNKLINE_CUFILE", "/no/such/libcufile.so")
    with tl.Engine() as engine:
        assert "/no/such/libcufile.so" in engine.explain(path)["gpu"]["why"]


def test_doctor(tmp_path: Path) -> None:
    def run(driver: str, *options: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "trunkline", "doctor", tmp_path, *options],
            env=os.environ | {"TRUNKLINE_CUDA_DRIVER": driver},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    cuda = json.loads(run(library(), "--json"))["cuda"]
    assert cuda["works"]
    assert cuda["version"] == 12040
    assert [device["device"] for device in cuda["devices"]] == ["cuda:0", "cuda:1"]
    assert cuda["devices"][1]["pci"] == "0000:18:00.0"
    assert cuda["why_not_gds"] == "the kernel module nvidia-fs is not loaded"
    text = run(library())
    assert "Stand-in GPU" in text
    assert "memory of GPUs    pinned buffers: the kernel module nvidia-fs is not loaded" in text
    none = json.loads(run("/no/such/driver", "--json"))["cuda"]
    assert not none["works"]
    assert "/no/such/driver" in none["why"]
    assert none["devices"] == []


def test_bench(tmp_path: Path) -> None:
    def run(*options: str, driver: str = library()) -> subprocess.CompletedProcess[str]:
        small = ["--size", "8MiB", "--block", "64KiB", "--repeat", "1"]
        return subprocess.run(
            [sys.executable, "-m", "trunkline", "bench", tmp_path, *small, *options],
            env=os.environ | {"TRUNKLINE_CUDA_DRIVER": driver},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    for options in (["--verify"], ["--random"], ["--memory", "ordinary", "--verify", "--read"]):
        done = run("--device", "cuda:1", "--json", *options)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["options"]["device"] == "cuda:1"
        for row in document["results"]:
            assert row["bytes_by_path"]["direct"] == 0
            assert sum(row["bytes_by_path"].values()) == 8 << 20
            assert row["verified"] == ("--verify" in options)
    assert "aligned memory of cuda:0" in run("--device", "cuda", "--read").stdout
    none = run("--device", "cuda:2", "--read")
    assert none.returncode == 1
    assert "cannot open cuda:2: this process sees 2 CUDA devices, numbered from 0" in none.stderr
    assert "/no/such/driver" in run("--device", "cuda", driver="/no/such/driver").stderr
    assert not list(tmp_path.iterdir())


def test_without_a_driver(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_CUDA_DRIVER", "/no/such/driver")
    run_script("""
        import trunkline as tl, numpy as np

        class Array:
            __cuda_array_interface__ = {"shape": (8,), "typestr": "|u1", "data": (4096, False), "version": 3}

        assert not tl.pinned_empty(8).registered
        with tl.open("file", "w") as file:
            for call in (
                lambda: file.pread(Array()),
                lambda: tl.pin(np.zeros(8)),
                lambda: tl.pinned_empty(8, "cuda"),
            ):
                try:
                    call()
                except tl.Unsupported as error:
                    assert "/no/such/driver" in str(error)
                else:
                    raise AssertionError
    """)


def test_errors_of_the_driver(path: Path, gpu: Any) -> None:
    with tl.open(path, "w") as file:
        file.pwrite(bytes(100_000))
        array = CudaArray(bytes(100_000))
        gpu.fakeCudaFail(b"cuMemcpyHtoDAsync_v2", 2, 0, 1)
        with pytest.raises(tl.DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
            file.pread(array)
        assert caught.value.errno == errno.EIO
        assert "cuda:0" in str(caught.value)
        assert file.pread(array) == 100_000


def test_bad_buffers_are_named(path: Path) -> None:
    strided = CudaArray(bytes(100), shape=(10, 5), strides=(10, 1))
    read_only = CudaArray(bytes(100))
    read_only.changes = {"data": (read_only.address, True)}
    nowhere = CudaArray(bytes(100), data=(4096, False))
    with tl.open(path, "w") as file:
        file.pwrite(bytes(100))
        with pytest.raises(ValueError, match="not contiguous"):
            file.pread(strided)
        with pytest.raises(ValueError, match="read-only"):
            file.pread(read_only)
        assert file.pwrite(read_only) == 100
        with pytest.raises(ValueError, match="CUDA_ERROR_INVALID_VALUE"):
            file.pread(nowhere)
        with pytest.raises(ValueError, match="typestr"):
            file.pread(CudaArray(bytes(8), typestr="|O8", shape=(1,)))
        with pytest.raises(tl.Unsupported, match="DLPack device type 10"):
            file.pread(DlpackArray(bytes(8), device=(10, 0)))
        with pytest.raises(tl.Unsupported, match="cuda:3"):
            file.pread(DlpackArray(bytes(8), device=(2, 3)))
        with pytest.raises(ValueError, match="stream: only for buffers in the memory of a GPU"):
            file.pread(bytearray(8), stream=1)
        with pytest.raises(ValueError, match="mask"):
            file.pread(CudaArray(bytes(8), mask=object()))
        with pytest.raises(TypeError, match="stream: must be a CUDA stream"):
            file.pread(CudaArray(bytes(8)), stream="one")
        assert file.pread(CudaArray(b"")) == 0


def test_views_in_c_order_with_strides_are_taken(path: Path) -> None:
    array = CudaArray(bytes(96), shape=(4, 1, 3), typestr="<f8", strides=(24, 77, 8))
    with tl.open(path, "w") as file:
        assert file.pwrite(array) == 96


def test_a_forked_child_is_told(path: Path) -> None:
    with tl.open(path, "w") as file:
        file.pwrite(CudaArray(bytes(100)))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with tl.open(path) as file:
                array = type("Array", (), {})()
                array.__cuda_array_interface__ = {
                    "shape": (100,),
                    "typestr": "|u1",
                    "data": (1 << 40, False),
                    "version": 3,
                }
                try:
                    file.pread(array)
                except tl.Unsupported as error:
                    status = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_stand_in_cannot_be_taken_for_host_memory() -> None:
    array = CudaArray(b"1234")
    with pytest.raises(OSError, match="Bad address"):
        os.write(os.memfd_create("x"), (ctypes.c_char * 4).from_address(array.address))


REAL = """
import sys, torch, trunkline as tl
path = sys.argv[1] + "/file"
data = torch.randint(0, 256, (40_000_000,), dtype=torch.uint8, device="cuda")
for gpu in ("auto", "bounce"):
    with tl.Engine(gpu=gpu) as engine, tl.open(path, "w", engine=engine) as file:
        print(engine.explain(sys.argv[1])["gpu"])
        file.pwrite(data)
        target = torch.zeros_like(data)
        with tl.pin(target):
            file.pread(target)
        assert torch.equal(target, data)
        assert torch.equal(torch.frombuffer(open(path, "rb").read(), dtype=torch.uint8), data.cpu())
        for begin, offset, size in ((0, 0, 1), (1, 3, 4095), (512, 0, 8192), (4096, 4096, 1 << 20),
                                    (777, 12345, 9_999_999), (4096, 8192, 30_000_000)):
            target.zero_()
            file.pread(target[begin:begin + size], offset)
            assert torch.equal(target[begin:begin + size], data[offset:offset + size]), (begin, offset, size)
            file.pwrite(target[begin:begin + size], offset)
        # After the stream, and not before.
        stream = torch.cuda.Stream()
        for value in range(20):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                target.fill_(value)
                future = file.async_pwrite(target)
            future.result()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                target.fill_(255)
                future = file.async_pread(target)
            future.result()
            assert bool((target == value).all()), value
        pieces = target[:1_000_000].split(1000)
        futures = [file.async_pread(piece, index * 1000) for index, piece in enumerate(pieces)]
        for future in futures:
            future.result()
        try:
            file.pread(torch.empty(100, dtype=torch.uint8, device="cuda"), 40_000_000)
        except tl.EndOfFile:
            pass
        else:
            raise AssertionError("read past the end")
        print(engine.stats()["bytes"])
try:
    with tl.Engine(gpu="gds") as engine, tl.open(path, engine=engine) as file:
        target = torch.zeros_like(data)
        file.pread(target)
        print("cuFile, asked for:", engine.stats()["bytes"], engine.explain(path)["gpu"])
except tl.Unsupported as error:
    print(error)
print("well")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; a stand-in was tested instead")
def test_a_real_gpu(run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUNKLINE_CUDA_DRIVER", raising=False)
    assert run_script(REAL, str(tmp_path)).split()[-1] == "well"
