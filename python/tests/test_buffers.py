"""What may be a buffer: torch, numpy, the buffer protocol, DLPack; what is refused says why."""

import array
import ctypes
import gc
import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import trunkline as tl

TORCH_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint16,
]
NUMPY_DTYPES = [
    "float32",
    "float16",
    "longdouble",
    "complex128",
    "bool",
    "datetime64[ns]",
    "timedelta64[s]",
    "S7",
    "U3",
    "V5",
    ">i4",
    "i4,f8",
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.int4,
]


@pytest.fixture
def file(tmp_path: Path) -> Any:
    with tl.open(tmp_path / "file", "w") as opened:
        yield opened


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_dtypes(file: tl.File, dtype: torch.dtype) -> None:
    content = torch.randint(0, 2, (3, 1000 * dtype.itemsize), dtype=torch.uint8)
    if dtype != torch.bool:
        content = torch.randint(0, 256, content.shape, dtype=torch.uint8)
    source = content.view(dtype)
    assert file.pwrite(source, 5) == content.numel()
    target = torch.zeros_like(content).view(dtype)
    assert file.pread(target, 5) == content.numel()
    assert raw_bytes(target) == raw_bytes(content)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_numpy_dtypes(file: tl.File, dtype: Any) -> None:
    source = np.frombuffer(np.random.default_rng(0).bytes(120 * np.dtype(dtype).itemsize), dtype).reshape(
        4, 30
    )
    assert file.pwrite(source, 3) == source.nbytes
    target = np.zeros_like(source)
    assert file.pread(target, 3) == source.nbytes
    assert target.tobytes() == source.tobytes()


def test_torch_sub_byte(file: tl.File) -> None:
    content = torch.arange(64, dtype=torch.uint8)
    packed = content.view(torch.float4_e2m1fn_x2)
    assert file.pwrite(packed) == 64
    target = torch.zeros(64, dtype=torch.uint8)
    file.pread(target.view(torch.float4_e2m1fn_x2))
    assert torch.equal(target, content)


def test_builtin_buffers(file: tl.File) -> None:
    file.pwrite(b"0123456789")
    for source in (
        bytearray(b"abc"),
        memoryview(b"abc"),
        array.array("b", b"abc"),
        (ctypes.c_char * 3)(*b"abc"),
    ):
        assert file.pwrite(source, 2) == 3
    with mmap.mmap(-1, 10) as mapped:
        file.pread(mapped)
        assert mapped[:] == b"01abc56789"
        targets: list[Any] = [bytearray(3), array.array("b", b"...")]
        for target in targets:
            file.pread(memoryview(target), 2)
            assert bytes(target) == b"abc"


def test_shapes(file: tl.File) -> None:
    for empty in (torch.empty(0), torch.empty(3, 0, 2), np.empty((0, 5)), b"", bytearray()):
        assert file.pwrite(empty) == 0
        assert file.async_pwrite(empty).result() == 0
    scalar = torch.tensor(1.5)
    assert file.pwrite(scalar) == 4
    target = np.zeros((), np.float32)
    file.pread(target)
    assert target == 1.5
    assert file.pwrite(np.float64(2.5)) == 8


def test_views_with_an_offset(file: tl.File) -> None:
    base = torch.zeros(100, dtype=torch.int16)
    file.pwrite(np.arange(10, dtype=np.int16))
    file.pread(base[5:15])
    assert base[5:15].tolist() == list(range(10))
    assert base[:5].count_nonzero() == 0
    assert base[15:].count_nonzero() == 0


def test_parameters_and_tensors_that_need_gradients(file: tl.File) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    assert file.pwrite(parameter) == 20
    target = torch.zeros(5, requires_grad=True)
    file.pread(target)
    assert target.tolist() == [1.0] * 5


class Lender:
    """Lends a torch tensor or numpy array through DLPack and nothing else."""

    def __init__(self, lent: Any, *, versioned: bool = True, device: tuple[int, int] = (1, 0)) -> None:
        self.lent = lent
        self.versioned = versioned
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and options:
            raise TypeError("unexpected keyword argument")
        return self.lent.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(file: tl.File, versioned: bool) -> None:
    source = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    assert file.pwrite(Lender(source[1], versioned=versioned)) == 24
    target = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert file.async_pread(Lender(target, versioned=versioned)).result() == 24
    assert torch.equal(target, source[1])
    with pytest.raises(ValueError, match=r"^buffer: .*not contiguous"):
        file.pread(Lender(torch.zeros(4, 4)[:, 1:3], versioned=versioned))
    assert file.pread(Lender(torch.zeros(3, 0, 2), versioned=versioned)) == 0


def test_dlpack_tensor_is_given_back(file: tl.File) -> None:
    source = np.arange(10)
    references = sys.getrefcount(source)
    file.pwrite(Lender(source))
    gc.collect()
    assert sys.getrefcount(source) == references


def test_dlpack_refusals(file: tl.File) -> None:
    file.pwrite(bytes(80))
    frozen = np.zeros(10)
    frozen.flags.writeable = False
    assert file.pwrite(Lender(frozen)) == 80
    with pytest.raises(ValueError, match=r"^buffer: .*read-only"):
        file.pread(Lender(frozen))
    with pytest.raises(tl.Unsupported, match=r"^buffer: .*DLPack device type 8, which is not supported"):
        file.pread(Lender(np.zeros(10), device=(8, 0)))  # Metal
    with pytest.raises(tl.Unsupported, match=r"^buffer: .*(cuda:99|libcuda)"):
        file.pread(Lender(np.zeros(10), device=(2, 99)))
    assert file.pread(Lender(np.zeros(10), device=(3, 0))) == 80  # pinned by CUDA, on the host


@pytest.mark.parametrize("wrong", [None, 3, "text", 1.5, [1, 2], object()], ids=repr)
def test_what_is_no_buffer(file: tl.File, wrong: Any) -> None:
    for call in (file.pread, file.pwrite, file.async_pread, file.async_pwrite):
        with pytest.raises(TypeError, match=f"^buffer: .*not {type(wrong).__name__}"):
            call(wrong)


def test_strided_is_refused(file: tl.File) -> None:
    strided: list[tuple[Any, str]] = [
        (torch.zeros(4, 4)[:, :2], "contiguous()"),
        (torch.zeros(4, 4).t()[1:], "contiguous()"),
        (np.zeros((4, 4))[:, :2], "ascontiguousarray"),
        (np.asfortranarray(np.zeros((4, 4))), "ascontiguousarray"),
        (np.zeros((4, 4), ml_dtypes.bfloat16)[:, :2], "ascontiguousarray"),
        (memoryview(bytearray(10))[::2], "contiguous"),
    ]
    for buffer, remedy in strided:
        for call in (file.pread, file.pwrite, file.async_pread, file.async_pwrite):
            with pytest.raises(ValueError, match=r"^buffer: .*not contiguous") as caught:
                call(buffer)
            assert remedy in str(caught.value)


def test_read_only_targets_are_refused(file: tl.File) -> None:
    file.pwrite(bytes(100))
    frozen = np.zeros(10)
    frozen.flags.writeable = False
    frozen_time = np.zeros(10, "datetime64[s]")
    frozen_time.flags.writeable = False
    for target in (b"abc", memoryview(b"abc"), frozen, frozen_time):
        for call in (file.pread, file.async_pread):
            with pytest.raises(ValueError, match=r"^buffer: .*read-only"):
                call(target)
        assert file.pwrite(target) > 0


def test_objects_are_refused(file: tl.File) -> None:
    fields = np.zeros(3, dtype=[("O_name", "i4"), ("ref", "O")])
    for target in (np.array([None, 1]), fields):
        with pytest.raises(ValueError, match=r"^buffer: .*Python objects"):
            file.pwrite(target)
    assert file.pwrite(np.zeros(3, dtype=[("O_name", "i4")])) == 12  # an O in a name is none


def test_torch_refusals(file: tl.File) -> None:
    with pytest.raises(tl.Unsupported, match=r"^buffer: .*meta"):
        file.pwrite(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match=r"^buffer: .*layout"):
        file.pwrite(torch.eye(3).to_sparse())
    conjugated = torch.zeros(3, dtype=torch.complex64).conj()
    with pytest.raises(ValueError, match="resolve_conj"):
        file.pwrite(conjugated)
    with pytest.raises(ValueError, match="resolve_neg"):
        file.pwrite(torch._neg_view(torch.zeros(3)))  # type: ignore[attr-defined]


def test_a_held_bytearray_cannot_be_resized(tmp_path: Path) -> None:
    faults = tl.Faults()
    faults.hold("read", 0)
    with tl.Engine(faults=faults) as engine, tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.pwrite(b"abc")
        target = bytearray(3)
        future = file.async_pread(target)
        with pytest.raises(BufferError):
            target.append(1)
        faults.release()
        assert future.result() == 3
        target.append(1)  # the memory is free once the result was seen
        assert target == b"abc\x01"


class Weak(np.ndarray[Any, Any]):
    """A numpy array that can be watched for its end."""


@pytest.mark.parametrize("drop_future", [True, False])
def test_buffers_live_until_the_operation_is_done(tmp_path: Path, drop_future: bool) -> None:
    faults = tl.Faults()
    faults.hold("read", 0)
    with tl.Engine(faults=faults) as engine, tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.pwrite(bytes(8192))
        target = np.ones(8192, np.uint8).view(Weak)
        watch = weakref.ref(target)
        future: tl.Future | None = file.async_pread(target)
        assert future is not None
        del target
        if drop_future:
            future = None
        gc.collect()
        assert watch() is not None
        faults.release()
        if future is not None:
            future.result()
        else:
            # Callbacks run in order behind the hand-over of the memory.
            done = file.async_pread(bytearray(1))
            done.result()
            wait_for_notifier(file)
        gc.collect()
        assert watch() is None


def rebind_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty(3)


def rebind_set(tensor: torch.Tensor) -> None:
    tensor.set_()  # type: ignore[call-overload]


def rebind_cast(tensor: torch.Tensor) -> None:
    """Replace the parameter's storage as casting its module does."""
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(tensor, requires_grad=False))
    module.weight.data = tensor.data
    tensor.data = module.half().weight.data


@pytest.mark.parametrize("rebind", [rebind_data, rebind_set, rebind_cast])
def test_a_tensor_that_gets_another_storage_keeps_the_one_that_is_read_into(
    tmp_path: Path, rebind: Callable[[torch.Tensor], None]
) -> None:
    faults = tl.Faults()
    faults.hold("read", 0, 1000)
    with tl.Engine(faults=faults) as engine, tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.pwrite(bytes(8192))
        target = torch.ones(2048)
        watch = StorageWeakRef(target.untyped_storage())
        future = file.async_pread(target)
        rebind(target)
        gc.collect()
        assert not watch.expired()
        faults.release()
        future.result()
        assert watch.expired()


def wait_for_notifier(file: tl.File) -> None:
    """Return once the notifier has done all that was due before."""
    passed = threading.Event()
    file.async_pread(bytearray(1)).add_done_callback(lambda _: passed.set())
    assert passed.wait(60)


def test_no_reference_is_leaked(file: tl.File) -> None:
    file.pwrite(bytes(4096))
    buffers: list[Any] = [
        np.zeros(4096, np.uint8),
        torch.zeros(4096, dtype=torch.uint8),
        np.zeros(512, "datetime64[s]"),
        Lender(np.zeros(512)),
    ]

    def references() -> list[int]:
        gc.collect()
        return [sys.getrefcount(buffer) for buffer in buffers]

    def use(buffer: Any) -> None:
        file.pread(buffer)
        file.async_pread(buffer).result()
        with pytest.raises(tl.EndOfFile):
            file.pread(buffer, 1)

    before = references()
    for _ in range(50):
        for i in range(len(buffers)):
            use(buffers[i])
    assert references() == before
