"""Arrays of numpy as tensors, and tensors as arrays, of the same memory."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy

from trunkline._errors import Unsupported
from trunkline._tensor_io.tensors import SAFETENSORS_NAMES, dtype_name
from trunkline._torch_or_numpy import HAS_TORCH, torch

Array: TypeAlias = "numpy.ndarray[Any, numpy.dtype[Any]]"
Framework: TypeAlias = Literal["torch", "pt", "numpy", "np"]

# The dtypes of numpy that torch has too, by name; bool and numbers.
_ALIKE = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
# Those of ml_dtypes.
_EXTENSIONS = {
    *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
}
_INTEGERS = {1: "uint8", 2: "int16"}  # by the size of an element


def wants_arrays(framework: Any) -> bool:
    """Whether an argument `framework` asks for arrays of numpy. Raises ValueError, and Unsupported."""
    if framework is None:
        return not HAS_TORCH
    if framework in ("numpy", "np"):
        return True
    if framework not in ("torch", "pt"):
        raise ValueError(f'framework: must be "torch" ("pt"), "numpy" ("np") or None, not {framework!r}')
    if not HAS_TORCH:
        raise Unsupported(
            None, f'framework: torch is not installed: pip install torch, or pass "numpy", not {framework!r}'
        )
    return False


def tensor_of(array: Array, what: str) -> torch.Tensor:
    """Return an array as a tensor in C order, which shares its memory unless elements have to be moved.

    Raises Unsupported, with `what` as the subject, for dtypes that tensors do not have, and masked arrays.
    """
    if isinstance(array, numpy.ma.MaskedArray):
        raise Unsupported(None, f"{what} is a masked array; save its filled(), and its mask if you need it")
    plain = numpy.asarray(array)
    if not plain.dtype.isnative:
        plain = plain.astype(plain.dtype.newbyteorder("="))
    name = plain.dtype.name
    kind = getattr(torch, name, None) if name in _ALIKE | _EXTENSIONS else None
    if not isinstance(kind, torch.dtype):
        raise Unsupported(
            None,
            f"{what} is an array with the dtype {plain.dtype}, which safetensors files do not support; save "
            "it as numbers, or with a Checkpointer",
        )
    if not plain.flags.c_contiguous:
        plain = plain.copy(order="C")
    if HAS_TORCH and name in _EXTENSIONS:
        plain = plain.view(_INTEGERS[plain.itemsize])
    if HAS_TORCH and not plain.flags.writeable:  # of which torch warns
        plain = numpy.asarray(_Unprotected(plain))
    tensor = torch.from_numpy(plain)
    return tensor if tensor.dtype is kind else tensor.view(kind)


class _Unprotected:
    """A read-only array as a writable one, which nobody writes to."""

    def __init__(self, array: Array) -> None:
        about = array.__array_interface__
        self.owner = array
        self.__array_interface__ = {**about, "data": (about["data"][0], False)}


def array_of(tensor: torch.Tensor, what: str, path: str | None = None) -> Array:
    """Return a tensor in main memory as an array that shares its memory.

    Raises Unsupported, with `what` as the subject, for dtypes that neither numpy nor ml_dtypes has.
    """
    if not HAS_TORCH:
        return tensor.numpy()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _ALIKE:
        return tensor.numpy()
    if name in _EXTENSIONS:
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            raise no_such_dtype(what, dtype_name(tensor.dtype), path) from None
        found: Array = tensor.view(getattr(torch, _INTEGERS[tensor.itemsize])).numpy()
        return found.view(getattr(ml_dtypes, name))
    raise no_such_dtype(what, dtype_name(tensor.dtype), path)


def arrays_of(tensors: Mapping[str, torch.Tensor], path: str) -> dict[str, Array]:
    """Return tensors as array_of() does, by name."""
    return {name: array_of(tensor, f"{path}: the tensor {name!r}", path) for name, tensor in tensors.items()}


def is_dtype_of_torch(name: Any) -> bool:
    """Whether it names a dtype, and torch, which has all of them, is not installed."""
    return (
        not HAS_TORCH and isinstance(name, str) and (name in SAFETENSORS_NAMES or name.startswith("torch."))
    )


def no_such_dtype(what: str, name: str, path: str | None) -> Unsupported:
    """Make the error for a dtype that arrays do not have; `name` is that of the format."""
    kinds = {"BF16", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"}
    remedy = "install ml_dtypes (pip install ml_dtypes)" if name in kinds else "install torch"
    if HAS_TORCH:
        other = 'load it without framework="numpy"'
    else:
        other = "install torch" if name in kinds else "convert the file where torch is installed"
    return Unsupported(
        None,
        f"{what} has the dtype {name}, which numpy lacks; {remedy}, {other}, or omit it with keys=",
        path,
    )
