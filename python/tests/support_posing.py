"""Torch tensors and streams that pose as those of a GPU, in the memory of the stand-in's devices.

A posing tensor is one of the meta device, so that torch knows shapes, strides and views of it, with memory of
the stand-in in place of the missing data.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch
from support_gpu import Context, CudaArray, Stream, stand_in


class Posing(torch.Tensor):
    """See above; `array` is its memory."""

    array: CudaArray

    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda", self.array.ordinal))  # type: ignore[assignment]

    @classmethod
    def over(cls, array: CudaArray, dtype: torch.dtype, shape: Any) -> Posing:
        """A contiguous tensor whose bytes are those of the array."""
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        tensor.array = array
        return tensor

    @classmethod
    def of(cls, tensor: torch.Tensor, ordinal: int = 0) -> Posing:
        """A copy of a tensor of the CPU, in C order."""
        array = CudaArray(_bytes_of(tensor), ordinal=ordinal)
        return cls.over(array, tensor.dtype, tensor.shape)

    def get_device(self) -> int:
        return self.array.ordinal

    def data_ptr(self) -> int:
        assert self.array.address is not None
        return self.array.address + self.storage_offset() * self.itemsize if self.numel() else 0

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        data = bytearray(self.array.contents())
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(data, dtype=torch.uint8).view(self.dtype)
        return flat.as_strided(self.shape, self.stride(), self.storage_offset()).clone()

    def contiguous(self) -> torch.Tensor:  # type: ignore[override]
        return self if self.is_contiguous() else Posing.of(self.cpu(), self.array.ordinal)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Posing) and "array" not in vars(result):
            result.array = args[0].array
        return result


class Shadowed(torch.Tensor):
    """A tensor of the CPU over the memory of a stand-in's device, so that models can compute with it.

    Who asks for its device or address is told those of the GPU.
    """

    array: CudaArray

    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda", self.array.ordinal))  # type: ignore[assignment]

    @classmethod
    def over(cls, array: CudaArray, dtype: torch.dtype, shape: Any) -> Any:
        """A contiguous tensor whose bytes are those of the array."""
        if array.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        memory = (ctypes.c_char * array.nbytes).from_address(_shadow_of(array))
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(shape).as_subclass(cls)
        tensor.array = array
        return tensor

    def get_device(self) -> int:
        return self.array.ordinal

    def data_ptr(self) -> int:
        assert self.array.address is not None
        return self.array.address + self._address() - _shadow_of(self.array)

    def _address(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.data_ptr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # Views are still in that memory; all else is the CPU's.
        source = next((each for each in args if isinstance(each, Shadowed)), None)
        if source is None or not isinstance(result, torch.Tensor) or result.device.type != "cpu":
            return result
        begin = _shadow_of(source.array)
        if not begin <= torch.Tensor.data_ptr(result) < begin + source.array.nbytes:
            return result
        view = result.as_subclass(cls)
        view.array = source.array
        return view


def _shadow_of(array: CudaArray) -> int:
    return int(stand_in().fakeCudaShadow(ctypes.c_uint64(array.address)))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class PosingStream:
    """As torch.cuda.Stream."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device(device)
        self.stream = Stream(self.device.index or 0)
        self.cuda_stream = self.stream.ptr

    def wait_stream(self, other: PosingStream) -> None:
        event = ctypes.c_void_p()
        with Context(self.stream.ordinal):
            assert stand_in().cuEventCreate(ctypes.byref(event), 0) == 0
            assert stand_in().cuEventRecord(event, ctypes.c_void_p(other.cuda_stream)) == 0
            assert stand_in().cuStreamWaitEvent(ctypes.c_void_p(self.cuda_stream), event, 0) == 0
            assert stand_in().cuEventDestroy_v2(event) == 0


class _Current:
    """As torch.cuda.stream: makes a stream the current one of this thread."""

    def __init__(self, poser: Poser, stream: PosingStream) -> None:
        self._poser = poser
        self._stream = stream

    def __enter__(self) -> None:
        self._before = self._poser.current_stream(self._stream.device)
        self._poser.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        self._poser.set_stream(self._before)


class Poser:
    """What stands in for torch.cuda; a thread begins with the default streams."""

    def __init__(self) -> None:
        self._streams = threading.local()
        self._defaults = [PosingStream(f"cuda:{ordinal}") for ordinal in range(2)]
        self.capturing = False

    def current_stream(self, device: torch.device) -> PosingStream:
        return getattr(self._streams, f"s{device.index or 0}", self._defaults[device.index or 0])

    def set_stream(self, stream: PosingStream) -> None:
        setattr(self._streams, f"s{stream.device.index or 0}", stream)

    def pose(self, patch: pytest.MonkeyPatch, kind: Any = Posing) -> None:
        """Let torch's functions know of the stand-in's GPUs; their tensors are Posing or Shadowed."""
        from trunkline._tensor_io import tensors

        # The first use of a device as a context remembers torch's constructors: ours must not be among them.
        with torch.device("meta"):
            empty = torch.empty
            assert empty(1).is_meta

        def empty_on(*arguments: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device is None or torch.device(device).type != "cuda":
                return empty(*arguments, device=device, **options)
            shape = torch.Size(arguments if isinstance(arguments[0], int) else arguments[0])
            dtype = options.get("dtype") or torch.float32
            array = CudaArray(
                b"\x5a" * shape.numel() * dtype.itemsize, ordinal=torch.device(device).index or 0
            )
            return kind.over(array, dtype, shape)

        patch.setattr(torch, "empty", empty_on)
        patch.setattr(tensors, "_PLAIN_TYPES", (*tensors._PLAIN_TYPES, Posing))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
        patch.setattr(torch.cuda, "Stream", PosingStream)
        patch.setattr(torch.cuda, "current_stream", self.current_stream)
        patch.setattr(torch.cuda, "stream", lambda stream: _Current(self, stream))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
