"""GPUs for tests: the two of the stand-in of tests/fake_cuda, built once, and arrays in their memory."""

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl

ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def library() -> str:
    """Build the stand-in and return where it is."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler to build the stand-in for the CUDA driver with")
    folder = tempfile.mkdtemp(prefix="trunkline-fake-cuda-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    built = f"{folder}/libfake_cuda.so"
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    sources = sorted((ROOT / "tests/fake_cuda").glob("*.cpp"))
    subprocess.run([compiler, *options, *sources, "-o", built], check=True)
    return built


@functools.cache
def stand_in() -> Any:
    """Make the stand-in the process's CUDA driver, and return its functions."""
    functions = ctypes.CDLL(library())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRUNKLINE_CUDA_DRIVER", library())
        tl.pinned_empty(1, "cuda")  # the driver that was found first stays
    functions.fakeCudaComplaints.restype = ctypes.c_char_p
    functions.fakeCudaLive.restype = ctypes.c_uint64
    functions.fakeCudaAwaited.restype, functions.fakeCudaAwaited.argtypes = ctypes.c_uint64, [ctypes.c_void_p]
    functions.fakeCudaShadow.restype = ctypes.c_void_p
    functions.cuInit(0)
    return functions


class Context:
    """A device's primary context, current in this thread, as where torch is used."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal

    def __enter__(self) -> None:
        context = ctypes.c_void_p()
        assert stand_in().cuDevicePrimaryCtxRetain(ctypes.byref(context), self.ordinal) == 0
        assert stand_in().cuCtxPushCurrent_v2(context) == 0

    def __exit__(self, *_: object) -> None:
        stand_in().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class Stream:
    """A stream, as CuPy shows it."""

    def __init__(self, ordinal: int = 0) -> None:
        handle = ctypes.c_void_p()
        self.ordinal = ordinal
        with Context(ordinal):
            assert stand_in().cuStreamCreate(ctypes.byref(handle), 1) == 0
        self.ptr = handle.value

    def hold(self) -> None:
        """Let what is added from here on wait for fakeCudaRelease()."""
        stand_in().fakeCudaHold(ctypes.c_void_p(self.ptr))

    def fill(self, array: "CudaArray", value: int) -> None:
        """Fill the array with a byte."""
        address, size = ctypes.c_uint64(array.address), ctypes.c_size_t(array.nbytes)
        with Context(self.ordinal):
            assert stand_in().fakeCudaFill(address, size, value, ctypes.c_void_p(self.ptr)) == 0

    def __del__(self) -> None:
        stand_in().cuStreamDestroy_v2(ctypes.c_void_p(self.ptr))


class CudaArray:
    """Memory of the device with __cuda_array_interface__, as CuPy and Numba have it."""

    def __init__(self, contents: bytes, *, ordinal: int = 0, **changes: Any) -> None:
        address = ctypes.c_uint64()
        self.nbytes = len(contents)
        self.ordinal = ordinal
        with Context(ordinal):
            assert stand_in().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(1, self.nbytes))) == 0
        self.address = address.value
        self.changes = changes
        stand_in().fakeCudaPoke(ctypes.c_uint64(self.address), contents, ctypes.c_size_t(self.nbytes))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shown = {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        return shown | self.changes

    def contents(self) -> bytes:
        """What it holds now."""
        memory = ctypes.create_string_buffer(self.nbytes)
        stand_in().fakeCudaPeek(memory, ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
        return memory.raw

    def __del__(self) -> None:
        with Context(self.ordinal):
            stand_in().cuMemFree_v2(ctypes.c_uint64(self.address))


class _DlpackTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class DlpackArray:
    """The same with DLPack of version 0, as JAX has it."""

    def __init__(self, contents: bytes, *, device: tuple[int, int] = (2, 0)) -> None:
        self.array = CudaArray(contents, ordinal=device[1] if device in ((2, 0), (2, 1)) else 0)
        self.device = device
        self.streams: list[Any] = []  # that consumers named
        self.shape = (ctypes.c_int64 * 1)(len(contents))
        self.tensor = _DlpackTensor(self.array.address, *device, 1, 1, 8, 1, self.shape, None, 0, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)
