"""States whose tensors are on certain devices."""

import collections
from collections.abc import Callable
from typing import Any

import torch

from trunkline._tensor_io.memory import CPU, is_in_reach


def savable(state: Any) -> Any:
    """Return `state` with the tensors that cannot be saved from where they are copied to main memory.

    As copied_to() does it.
    """
    return _StateCopier(CPU, is_in_reach).node(state)


def copied_to(state: Any, device: torch.device) -> Any:
    """Return `state` with the tensors of other devices copied to `device`; what is there stays as it is.

    Looks into dicts, OrderedDicts (with their `_metadata`), lists and tuples. What shares memory is copied
    once and shares it afterwards, if shape and strides are the same too (tied weights). On devices that give
    tensors no addresses (XLA) only what is the same object is known to share.
    """
    return _StateCopier(device, lambda place: place == device).node(state)


class _StateCopier:
    """One walk over a state."""

    def __init__(self, device: torch.device, stays: Callable[[torch.device], bool]) -> None:
        self._device = device
        self._stays = stays
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}  # by what says that memory is shared

    def node(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is dict:
            return {key: self.node(item) for key, item in value.items()}
        if kind is collections.OrderedDict:
            copied = collections.OrderedDict((key, self.node(item)) for key, item in value.items())
            vars(copied).update(vars(value))
            return copied
        if kind is list or kind is tuple:
            return kind(self.node(item) for item in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._stays(tensor.device):
            return tensor
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return tensor.to(self._device)
        address = tensor.data_ptr()
        # 0 for every tensor of a device that has no addresses, as XLA: only an object shares with itself.
        memory: tuple[Any, ...] = (id(tensor),)
        if address != 0:
            memory = (tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype)
            memory += (tensor.is_conj(), tensor.is_neg())  # views of the same memory with other values
        if memory not in self._copies:
            self._copies[memory] = tensor.to(self._device)
        return self._copies[memory]
