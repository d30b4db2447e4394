"""The argument dtype of load(): floating-point tensors of a nesting as another dtype."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

from trunkline._torch_or_numpy import torch

_CONTAINERS = (dict, OrderedDict, list, tuple)  # others, such as torch.Size, hold no tensors


def dtype_argument(dtype: Any) -> torch.dtype | None:
    """Return the floating-point dtype that an argument `dtype` names. Raises TypeError and ValueError."""
    if dtype is None:
        return None
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        what = repr(dtype) if isinstance(dtype, str) else type(dtype).__name__
        error = ValueError if isinstance(dtype, str) else TypeError
        raise error(f'dtype: must be a dtype of torch, such as torch.bfloat16 or "bfloat16", not {what}')
    if not named.is_floating_point or named.itemsize < 2:
        raise ValueError(f"dtype: must be a floating-point dtype of at least 16 bits, not {named}")
    return named


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Return a nesting with its floating-point tensors as `dtype`; dicts and lists are changed in place.

    Tensors of fewer than 16 bits are stored in a quantized form and stay as they are, like all other values.
    A tensor is freed once it is converted. Tensors that are equal views of the same memory share the new one,
    and each stays what it is, a Parameter or not; other views get memory of their own.
    """
    counts = Counter(_memory_of(tensor) for tensor in _tensors_in(value) if _is_converted(tensor, dtype))
    return _Converter(dtype, {memory for memory, count in counts.items() if count > 1}).convert(value)


def _is_converted(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not dtype and tensor.itemsize >= 2


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    pending = [value]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if isinstance(part, torch.Tensor):
            yield part
        elif type(part) in _CONTAINERS and id(part) not in seen:
            seen.add(id(part))
            pending.extend(part.values() if isinstance(part, dict) else part)


class _Converter:
    def __init__(self, dtype: torch.dtype, shared: set[tuple[Any, ...]]) -> None:
        self._dtype = dtype
        self._shared = shared  # memory of more than one tensor
        self._memory: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self._containers: dict[int, Any] = {}

    def convert(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value) if _is_converted(value, self._dtype) else value
        if type(value) not in _CONTAINERS or id(value) in self._containers:
            return value
        self._containers[id(value)] = value
        if isinstance(value, tuple):
            items = [self.convert(item) for item in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else tuple(items)
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            value[key] = self.convert(value[key])
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = _memory_of(tensor)
        if memory not in self._shared:
            return _like(tensor, tensor.detach().to(self._dtype))
        if memory not in self._memory:
            # With the tensor: its address must not be used again.
            self._memory[memory] = tensor, tensor.detach().to(self._dtype)
        kind = (*memory, isinstance(tensor, torch.nn.Parameter), tensor.requires_grad)
        if kind not in self._made:
            self._made[kind] = _like(tensor, self._memory[memory][1].detach())
        return self._made[kind]


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return `memory` as a Parameter if the tensor is one, and with its need for gradients."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(memory, tensor.requires_grad)
    return memory.requires_grad_() if tensor.requires_grad else memory
