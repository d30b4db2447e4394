"""Stands in for torch where it is not installed: the few parts of it that files and checkpoints use.

Tensors are arrays of numpy in main memory, and dtypes are those of numpy; of the dtypes that numpy lacks,
those of ml_dtypes if that is installed. Names and semantics are those of torch. Users never get a Tensor:
results are plain arrays (_tensor_io/arrays.py).
"""

from collections.abc import Sequence
from typing import Any

import numpy

ml_dtypes: Any
try:
    import ml_dtypes
except ModuleNotFoundError:
    ml_dtypes = None

__version__ = numpy.__version__

dtype = numpy.dtype
_Array = numpy.ndarray


class _Absent:
    """A dtype or layout of torch that no array has: equal to nothing else."""


strided = _Absent()
_mkldnn = _Absent()


class device:  # noqa: N801 - as torch names it
    """The name of a device; only main memory can be used."""

    def __init__(self, kind: Any, index: int | None = None) -> None:
        if not isinstance(kind, str | device):
            raise TypeError(type(kind).__name__)
        name, _, number = str(kind).partition(":")
        if not name.isalpha() or (number and not number.isdecimal()):
            raise RuntimeError(f"invalid device string: {kind!r}")
        self.type = name
        self.index = int(number) if number else index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self) -> int:
        return hash((self.type, self.index))

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __repr__(self) -> str:
        return f"device({str(self)!r})"


_CPU = device("cpu")


class Size(tuple[int, ...]):
    """A shape that was saved as torch.Size."""

    __slots__ = ()


class UntypedStorage:
    """The memory of a tensor, from its first byte to its last."""

    def __init__(self, tensor: "Tensor") -> None:
        self._tensor = tensor

    def data_ptr(self) -> int:
        """Return the address."""
        return self._tensor.data_ptr()

    def nbytes(self) -> int:
        """Return its size."""
        tensor = self._tensor
        if tensor.size == 0 or tensor.is_contiguous():
            return tensor.nbytes
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
        return int(last + tensor.itemsize)


TypedStorage = UntypedStorage


class Tensor(numpy.ndarray[Any, Any]):
    """An array with the methods of a tensor that the package calls."""

    layout = strided
    device = _CPU  # type: ignore[assignment]
    is_cpu = True
    is_cuda = is_meta = is_nested = requires_grad = False
    _version = 0

    def __getitem__(self, index: Any) -> Any:
        """Return a view, also of a single element."""
        found = super().__getitem__(index)
        return found if isinstance(found, numpy.ndarray) else numpy.array(found, self.dtype).view(Tensor)

    def is_conj(self) -> bool:
        """Return False."""
        return False

    is_neg = is_conj

    def is_contiguous(self) -> bool:
        """Whether it is in C order."""
        return self.flags.c_contiguous

    def is_floating_point(self) -> bool:
        """Whether its elements are not integers, bool or complex."""
        return self.dtype.kind not in "biuc"

    def numel(self) -> int:
        """Return the number of elements."""
        return self.size

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def data_ptr(self) -> int:
        """Return the address."""
        address: int = self.__array_interface__["data"][0]
        return address

    def stride(self, dimension: int | None = None) -> Any:
        """Return the strides in elements."""
        steps = tuple(step // self.itemsize for step in self.strides)
        return steps if dimension is None else steps[dimension]

    def storage_offset(self) -> int:
        """Return 0: its storage begins with it."""
        return 0

    def untyped_storage(self) -> UntypedStorage:
        """Return its memory."""
        return UntypedStorage(self)

    def set_(
        self, storage: UntypedStorage, offset: int, shape: Sequence[int], stride: Sequence[int]
    ) -> "Tensor":
        """Return these bytes of a storage; self is empty, and of bytes."""
        flat = _strided(storage._tensor, (storage.nbytes(),), (1,), numpy.dtype(numpy.uint8))
        part: Tensor = flat[offset : offset + shape[0] * stride[0]]
        return part

    def as_strided(self, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> "Tensor":
        """Return a view of its memory from `offset` on, in elements."""
        at: Any = self.reshape(-1)[offset:] if offset else self
        return _strided(at, shape, [step * self.itemsize for step in stride], self.dtype)

    def detach(self) -> "Tensor":
        """Return itself."""
        return self

    cpu = resolve_conj = resolve_neg = detach

    def requires_grad_(self, wanted: object = True) -> "Tensor":
        """Return itself: arrays have no gradients."""
        return self

    def contiguous(self) -> "Tensor":
        """Return it in C order."""
        return self if self.is_contiguous() else self.clone()

    def clone(self) -> "Tensor":
        """Return a copy in C order."""
        return self.copy(order="C").view(Tensor)

    def copy_(self, source: Any) -> "Tensor":
        """Copy the elements of `source`."""
        numpy.copyto(self, source)
        return self

    def numpy(self) -> "_Array":
        """Return the plain array that shares its memory."""
        return self.view(_Array)


def _strided(tensor: Tensor, shape: Sequence[int], steps: Sequence[int], kind: Any) -> Tensor:
    class Memory:
        owner = tensor
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "shape": tuple(shape),
            "strides": tuple(steps),
            "typestr": f"|V{kind.itemsize}",
            "data": (tensor.data_ptr(), not tensor.flags.writeable),
        }

    made: Tensor = numpy.asarray(Memory()).view(kind).view(Tensor)
    return made


class _Parameter(type):
    def __call__(cls, data: Tensor, requires_grad: bool = True) -> Tensor:
        return data


class nn:  # noqa: N801 - as torch names it
    """Modules."""

    class Parameter(Tensor, metaclass=_Parameter):
        """Makes the tensor itself; nothing is an instance of it."""


class Generator:
    """Nothing is an instance of it."""


class OutOfMemoryError(MemoryError):
    """Never raised: numpy raises MemoryError."""


class cuda:  # noqa: N801 - as torch names it
    """GPUs, of which there are none."""

    class Stream:
        """Nothing is an instance of it."""

    @staticmethod
    def is_available() -> bool:
        """Return False."""
        return False


class _C:
    class _functorch:  # noqa: N801
        @staticmethod
        def is_functorch_wrapped_tensor(tensor: Tensor) -> bool:
            return False


def is_inference_mode_enabled() -> bool:
    """Return False."""
    return False


def _is_zerotensor(tensor: Tensor) -> bool:
    return False


def from_numpy(array: "numpy.ndarray[Any, Any]") -> Tensor:
    """Return an array as a tensor that shares its memory."""
    return array.view(Tensor)


def frombuffer(buffer: Any, *, dtype: Any, count: int = -1, offset: int = 0) -> Tensor:
    """Return the memory of a buffer as a flat tensor."""
    return numpy.frombuffer(buffer, dtype, count, offset).view(Tensor)


def empty(shape: "int | Sequence[int]", *, dtype: Any, device: device = _CPU) -> Tensor:
    """Return a tensor of any contents."""
    return numpy.empty(shape, dtype).view(Tensor)


def zeros(shape: "int | Sequence[int]", *, dtype: Any, device: device = _CPU) -> Tensor:
    """Return a tensor of zeros."""
    return numpy.zeros(shape, dtype).view(Tensor)


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Return flat tensors, one after the other."""
    return numpy.concatenate(tensors).view(Tensor)


def view_as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of reals in a last dimension."""
    parts = numpy.dtype(f"float{tensor.itemsize * 4}")
    made: Any = tensor.reshape(*tensor.shape, 1).view(parts)
    return from_numpy(made)


def view_as_complex(tensor: Tensor) -> Tensor:
    """Return pairs of reals as complex numbers."""
    made: Any = tensor.view(numpy.dtype(f"complex{tensor.itemsize * 16}")).reshape(tensor.shape[:-1])
    return from_numpy(made)


# At the end: `bool` is one of them.
_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML_DTYPES = (
    *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_NEVER = ("complex32", "float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2", "quint2x4")

for _name in _DTYPES:
    globals()[_name] = numpy.dtype(_name)
for _name in _ML_DTYPES:
    _kind = getattr(ml_dtypes, _name, None)
    globals()[_name] = _Absent() if _kind is None else numpy.dtype(_kind)
for _name in _NEVER:
    globals()[_name] = _Absent()
