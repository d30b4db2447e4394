"""Tensors of a skeleton that are views of memory that several tensors share."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy

from trunkline._tensor_io.memory import empty_bytes, out_of_memory
from trunkline._tensor_io.tensors import bytes_of
from trunkline._torch_or_numpy import torch
from trunkline.checkpoint.state.leaves import BadLeaf, Json
from trunkline.checkpoint.state.views import Strided, TooManyRuns, merged, scatter, view_of

_MAX = 2**63


class View(NamedTuple):
    """The "stride" of a node; for a view of shared memory also its offset and the size of that memory."""

    at: Strided
    storage: int | None


def stride_fields(node: dict[str, Json]) -> list[str]:
    """Return the fields of a node that view_in() reads."""
    if "offset" in node or "storage" in node:
        return ["stride", "offset", "storage"]
    return ["stride"] if "stride" in node else []


def view_in(node: dict[str, Json], shape: tuple[int, ...], itemsize: int) -> View | None:
    """Return the view that a node describes; None if it has no "stride". Raises BadLeaf."""
    if "stride" not in node:
        return None
    stride, offset = node["stride"], node.get("offset", 0)
    if type(stride) is not list or len(stride) != len(shape):
        raise BadLeaf('its "stride" is not an array of one number for each dimension')
    if any(type(step) is not int or not 0 <= step < _MAX for step in [*stride, offset]):
        raise BadLeaf('its "stride" or "offset" is not a non-negative integer')
    at = Strided(shape, tuple(stride), itemsize, offset)
    if "storage" not in node:
        if not at.is_dense():
            raise BadLeaf('its "stride" leaves gaps, or repeats elements')
        return View(at, None)
    storage = node["storage"]
    if type(storage) is not int or at.end() > storage or storage >= _MAX or offset % itemsize:
        raise BadLeaf('it is not within the bytes of its "storage"')
    return View(at, storage)


def restrided(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """Return a copy of a contiguous tensor with the strides of the view, which is dense."""
    memory = empty_bytes(tensor.nbytes, tensor.device)
    copy = view_of(memory, view.at, tensor.dtype)
    copy_values(copy, tensor)
    return copy


def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the elements of any dtype, which must be the same for both: torch cannot copy some dtypes."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(target.itemsize)
    target, source = target.detach(), source.detach()
    if as_integers is not None:
        target, source = target.view(as_integers), source.view(as_integers)
    target.copy_(source)


def with_gaps(name: str, stored: torch.Tensor, storage: int, views: Sequence[Strided]) -> torch.Tensor:
    """Return memory of `storage` bytes: those of the views, from the flat `stored`, and zeros between them.

    Raises BadLeaf if `stored` has more or fewer bytes than the views, or one of these ends beyond `storage`.
    """
    try:
        runs = merged(numpy.concatenate([view.runs() for view in views]))
    except TooManyRuns:
        raise BadLeaf(f"a view of {name!r} has too many pieces") from None
    if int((runs[:, 1] - runs[:, 0]).sum()) != stored.numel():
        raise BadLeaf(f"the tensor {name!r} does not have the bytes of its views")
    if int(runs[:, 1].max(initial=0)) > storage:
        raise BadLeaf(f'"storage" of {name!r} differs between views of it')
    try:
        if stored.device.type == "cpu":
            memory = torch.from_numpy(numpy.zeros(storage, numpy.uint8))  # untouched gaps use no memory
        else:
            memory = torch.zeros(storage, dtype=torch.uint8, device=stored.device)
    except (RuntimeError, MemoryError, ValueError) as error:
        full = out_of_memory(error, f"the memory of {name!r} ({storage} bytes on {stored.device})")
        raise full or BadLeaf(f"the memory of {name!r}: {error}") from None
    scatter(stored, runs, memory)
    return memory


class Storages:
    """The memory behind the views of one skeleton."""

    def __init__(self, all_views: Callable[[], Mapping[str, Sequence[Strided]]]) -> None:
        """`all_views`: returns the views of each name; called once, if some memory has gaps."""
        self._all_views = all_views
        self._views: Mapping[str, Sequence[Strided]] | None = None
        self._memory: dict[str, tuple[int, torch.Tensor]] = {}

    def view(self, name: str, stored: torch.Tensor, view: View, dtype: torch.dtype) -> torch.Tensor:
        """Return the view as a tensor; `stored`, contiguous, has the bytes of the shared memory.

        Raises BadLeaf if `stored` does not match the views of the skeleton.
        """
        assert view.storage is not None
        if name not in self._memory:
            memory = bytes_of(stored)
            if view.storage != memory.numel():
                if self._views is None:
                    self._views = self._all_views()
                memory = with_gaps(name, memory, view.storage, self._views[name])
            self._memory[name] = view.storage, memory
        storage, memory = self._memory[name]
        if storage != view.storage:
            raise BadLeaf(f'"storage" of {name!r} differs between views of it')
        return view_of(memory, view.at, dtype)
