"""Copies the tensors of a state to other devices."""

import collections
from collections.abc import Callable
from typing import Any

from trunkline._tensor_io.memory import CPU, is_in_reach
from trunkline._torch_or_numpy import torch


def savable(state: Any) -> Any:
    """Return `state`, with tensors on devices that cannot be saved from copied to main memory.

    Copies like copied_to().
    """
    return _StateCopier(CPU, is_in_reach).node(state)


def copied_to(state: Any, device: torch.device) -> Any:
    """Return `state`, with the tensors of other devices copied to `device`.

    Traverses dicts, OrderedDicts (with their `_metadata`), lists and tuples. Tensors that share memory are
    copied once, and share memory afterwards, if shape and strides are equal too (tied weights). On devices
    without addresses (XLA) only the same object counts as shared.
    """
    return _StateCopier(device, lambda place: place == device).node(state)


class _StateCopier:
    """One traversal of a state."""

    def __init__(self, device: torch.device, stays: Callable[[torch.device], bool]) -> None:
        self._device = device
        self._stays = stays
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}  # by a key that shared tensors have in common

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
        # It is 0 for every tensor on a device without addresses, such as XLA: then only the same object
        # counts.
        memory: tuple[Any, ...] = (id(tensor),)
        if address != 0:
            memory = (tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype)
            memory += (tensor.is_conj(), tensor.is_neg())  # views of the same memory with other values
        if memory not in self._copies:
            self._copies[memory] = tensor.to(self._device)
        return self._copies[memory]
