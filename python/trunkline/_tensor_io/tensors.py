"""Which tensors can be stored as plain bytes, the names of their dtypes, and the stored form."""

from collections.abc import Sequence

from trunkline._tensor_io.memory import is_in_reach
from trunkline._torch_or_numpy import LIBRARY, VERSION, torch

# The names of https://huggingface.co/docs/safetensors for dtypes that both it and torch have.
_SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float4_e2m1fn_x2: "F4",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
SAFETENSORS_NAMES = frozenset(_SAFETENSORS_NAMES.values())
_PLAIN_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
_QUANTISED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_ALL_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_NAMES: dict[torch.dtype, str] = {
    dtype: _SAFETENSORS_NAMES.get(dtype, f"torch.{str(dtype).removeprefix('torch.')}")
    for dtype in sorted(_ALL_DTYPES, key=str)
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# Stored unchanged, for any shape.
_STORED_ALIKE = _SAFETENSORS_NAMES.keys() - {torch.float4_e2m1fn_x2}
_COMPLEX_PARTS = {torch.complex128: torch.float64, torch.complex32: torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in safetensors files ("BF16"), or else that of torch ("torch.complex128")."""
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with this name: the inverse of dtype_name. Raises ValueError for any other text."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"{name!r} is not a dtype of this {LIBRARY} ({VERSION})") from None


def in_safetensors(dtype: torch.dtype) -> bool:
    """Whether the safetensors format has the dtype."""
    return dtype in _SAFETENSORS_NAMES


_FREED = (
    "has lost its memory: its storage was resized to less, as FSDP does with parameters between uses. For "
    "FSDP, use the state dict that get_model_state_dict() of torch.distributed.checkpoint.state_dict "
    "returns; otherwise resize the storage and fill it first"
)


# Dtypes of torch without arithmetic and storages.
_BELOW_A_BYTE = {
    getattr(torch, name, None)
    for name in (f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))
}


def objection_in_pt(dtype: torch.dtype) -> str | None:
    """Return why .pt files cannot hold the dtype; None if they can."""
    if dtype not in _BELOW_A_BYTE:
        return None
    return (
        f"has the dtype {dtype}, which torch.save does not support; save its bytes, "
        "tensor.view(torch.uint8), or use a Checkpointer"
    )


def objection_in_any_file(tensor: torch.Tensor) -> str | None:
    """Return why no file format can hold the tensor; None if one can."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return (
            "is a tensor of torch.func (inside of vmap, grad or similar), which has no separate memory; save "
            "it outside of the transformed function"
        )
    if type(tensor).__name__ == "FakeTensor":
        return "is a FakeTensor, which has no elements; save outside of FakeTensorMode"
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return "is an MKL-DNN tensor, which has an opaque layout; convert it with .to_dense()"
    return None


def objection(tensor: torch.Tensor) -> str | None:
    """Return why the tensor is not a dense one of plain elements on the CPU or a CUDA GPU; None if it is."""
    why = objection_in_any_file(tensor)
    if why is not None:
        return why
    if type(tensor) not in _PLAIN_TYPES:
        if (own := _own_objection(tensor)) is not None:
            return own
        name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        if is_distributed(tensor):
            return _about_distributed(tensor, name)
        return f"is a {name}, a subclass of torch.Tensor that may hold more than its elements"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.layout is not torch.strided:
        return f"is a sparse tensor ({tensor.layout})"
    if tensor.is_meta:
        return "is on the meta device, where tensors have no memory"
    if not is_in_reach(tensor.device):
        return f"is on the device {tensor.device}, but must be on the CPU or a CUDA GPU; move it with .cpu()"
    if tensor.dtype in _QUANTISED:
        return f"is quantised ({tensor.dtype}); store its int_repr() and parameters"
    if _is_freed(tensor):
        return _FREED
    return None


def _own_objection(tensor: torch.Tensor) -> str | None:
    """Return what the class of the tensor says about saving it; None if it says nothing."""
    why = getattr(type(tensor), "saving_objection", None)
    return why if isinstance(why, str) else None


def objection_if_freed(tensor: torch.Tensor) -> str | None:
    """Return why a tensor that torch.save accepts has lost its memory; None if it has not."""
    if tensor.layout is not torch.strided or tensor.is_nested or not is_in_reach(tensor.device):
        return None  # it has no separate storage, or none that is saved
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None  # its elements are those of other tensors
    if type(tensor) in _PLAIN_TYPES:
        return _FREED if _is_freed(tensor) else None
    with torch._C.DisableTorchFunctionSubclass():  # the subclass may reject these calls
        return _FREED if _is_freed(tensor) else None


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether objection() accepts the tensor, and it is in main memory and plain() except for autograd.

    Fast, and False if in doubt: most tensors are ordinary, and need no further checks.
    """
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and tensor.dtype not in _QUANTISED
        and not torch._is_zerotensor(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
        # data_ptr() is null without memory, but only where the offset is 0.
        and tensor.storage_offset() == 0
        and tensor.data_ptr() != 0
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= tensor.nbytes
    )


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor."""
    return type(tensor).__name__ == "DTensor"


def has_own_advice(tensor: torch.Tensor) -> bool:
    """Whether objection() already says what to do: saving to a .pt file would not help."""
    return is_distributed(tensor) or _own_objection(tensor) is not None or objection(tensor) == _FREED


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether the tensor has lost memory: its storage ends before its last element."""
    elements = tensor.numel()
    if not elements or torch._is_zerotensor(tensor):
        return False
    if tensor.is_contiguous():
        return (tensor.storage_offset() + elements) * tensor.itemsize > tensor.untyped_storage().nbytes()
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.itemsize > tensor.untyped_storage().nbytes()


def _about_distributed(tensor: torch.Tensor, name: str) -> str:
    placements = getattr(tensor, "placements", ())
    shown = f" ({', '.join(map(str, placements))})" if placements else ""
    if placements and all(placement.is_replicate() for placement in placements):
        return (
            f"is a {name}, of which each rank holds a copy{shown}; use its to_local(), or "
            "torch.distributed.checkpoint with trunkline.dcp"
        )
    return (
        f"is a {name}, of which each rank holds a part{shown}; use torch.distributed.checkpoint with "
        "trunkline.dcp, or its full_tensor(), which all ranks call"
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without autograd, with memory that contains its actual values.

    A lazy conjugate, negative or zero is computed into new memory; any other tensor is shared.
    """
    tensor = tensor.detach()
    if torch._is_zerotensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_conj().resolve_neg()


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return plain(tensor) in C order; copies only if it is not."""
    tensor = plain(tensor)
    if tensor.is_contiguous():
        return tensor
    if tensor.dtype.itemsize == 1:  # torch cannot copy some of these dtypes
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a tensor of one dimension that shares its memory."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # it has at most one element: torch would not view it as bytes
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def stored_as(dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and shape in which such a tensor is stored, since safetensors lacks some dtypes.

    Complex numbers become pairs of reals in a last dimension, other elements integers of the same size.
    """
    shape = tuple(shape)
    if dtype in _STORED_ALIKE:
        return dtype, shape
    if dtype in _COMPLEX_PARTS:
        return _COMPLEX_PARTS[dtype], (*shape, 2)
    # Its elements are pairs, which the format counts separately: that requires a dimension.
    if in_safetensors(dtype) and not (dtype is torch.float4_e2m1fn_x2 and not shape):
        return dtype, shape
    return (torch.uint8 if dtype.itemsize == 1 else torch.int16), shape


def to_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of plain(tensor) with the dtype and shape of stored_as()."""
    return as_stored(plain(tensor))


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return to_stored() of a tensor that is already plain."""
    if tensor.dtype in _STORED_ALIKE:
        return tensor
    dtype, _ = stored_as(tensor.dtype, tensor.shape)
    if dtype is tensor.dtype:
        return tensor
    if tensor.dtype in _COMPLEX_PARTS:
        return torch.view_as_real(tensor)
    return tensor.view(dtype)


def from_stored(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the stored tensor as a view of `dtype`: the inverse of to_stored."""
    if stored.dtype is dtype:
        return stored
    if dtype in _COMPLEX_PARTS:
        return torch.view_as_complex(stored)
    return stored.view(dtype)
