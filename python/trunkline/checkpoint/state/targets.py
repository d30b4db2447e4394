"""The tensors that a state is loaded into: some are read into directly, the others are copied to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from trunkline._tensor_io.memory import empty_bytes
from trunkline._tensor_io.tensors import as_stored, bytes_of, from_stored, to_stored
from trunkline._torch_or_numpy import torch
from trunkline.checkpoint.state.leaves import BadLeaf, shown_key
from trunkline.checkpoint.state.storages import View, copy_values, with_gaps
from trunkline.checkpoint.state.views import (
    Strided,
    TooManyRuns,
    groups,
    merged,
    sharing,
    significant_strides,
    spans,
    strided,
    view_of,
)

METADATA: Any = object()  # stands for the attribute _metadata of an OrderedDict in a path


def path_text(path: Sequence[Any]) -> str:
    """Return a path of keys and indices in a state as text."""
    return "state" + "".join("._metadata" if key is METADATA else f"[{shown_key(key)}]" for key in path)


class Use(NamedTuple):
    """A tensor to load a stored one into."""

    path: tuple[Any, ...]
    tensor: torch.Tensor
    view: View | None  # with which it was saved

    @property
    def place(self) -> str:
        """Its place in the state, for messages."""
        return path_text(self.path)

    def is_whole(self) -> bool:
        """Whether the stored tensor is all of it, in C order."""
        return self.view is None or self.view.storage is None

    def saved_stride(self) -> tuple[int, ...]:
        """Return its strides in the saved memory."""
        if self.view is not None and self.view.storage is not None:
            return self.view.at.stride
        strides, step = [], 1
        for extent in reversed(self.tensor.shape):
            strides.append(step)
            step *= max(extent, 1)
        return tuple(reversed(strides))

    def is_laid_out_as_saved(self) -> bool:
        """Whether its elements are in the order of the saved memory."""
        if self.is_whole():
            return self.tensor.is_contiguous()
        return all(
            extent == 1 or now == saved
            for extent, now, saved in zip(
                self.tensor.shape, self.tensor.stride(), self.saved_stride(), strict=True
            )
        )

    def base(self) -> int:
        """Return the address at which the saved memory would begin, given where the tensor is."""
        offset = self.view.at.offset if self.view is not None and self.view.storage is not None else 0
        return self.tensor.data_ptr() - offset

    def layout(self) -> tuple[object, ...]:
        """Return a key that tensors must share to be allowed to share memory: all store equal bytes there."""
        if self.is_laid_out_as_saved():
            return (self.base(),)
        return (self.tensor.data_ptr(), significant_strides(self.tensor), self.view)


class Targets:
    """The memory to read stored tensors into, and the copies to make afterwards."""

    def __init__(
        self,
        uses: Mapping[str, Sequence[Use]],
        stored_views: Callable[[], Mapping[str, Sequence[Strided]]] | None = None,
    ) -> None:
        """Raises ValueError for tensors that cannot hold what was saved, BadLeaf for impossible views.

        stored_views: if `uses` may be some of those in the state: returns all views of each name of which
        only the bytes of its views are stored.
        """
        self._stored_views = stored_views
        self._all_views: Mapping[str, Sequence[Strided]] | None = None
        self.by_name: dict[str, torch.Tensor] = {}
        self._copies: dict[str, list[Use]] = {}
        self._views: dict[str, Sequence[Strided]] = {}
        for name, all_uses in uses.items():
            self._add(name, all_uses)
        _check_overlaps(uses)

    def finish(self) -> None:
        """Copy to the tensors that were not read into. Raises BadLeaf for impossible sizes."""
        for name, uses in self._copies.items():
            target = self.by_name[name]
            memory = bytes_of(target)
            for use in uses:
                if use.view is None or use.view.storage is None:
                    source = from_stored(target, use.tensor.dtype)
                else:
                    if use.view.storage != memory.numel():
                        memory = with_gaps(name, memory, use.view.storage, self._views[name])
                    source = view_of(memory, use.view.at, use.tensor.dtype)
                _copy(use, source)

    def _views_of(self, name: str, uses: Sequence[Use]) -> Sequence[Strided]:
        if self._stored_views is None:
            return [use.view.at for use in uses if use.view is not None]
        if self._all_views is None:
            self._all_views = self._stored_views()
        return self._all_views.get(name, ())

    def _add(self, name: str, uses: Sequence[Use]) -> None:
        if len(uses) == 1 and uses[0].view is None and uses[0].tensor.is_contiguous():
            self.by_name[name] = as_stored(uses[0].tensor)
            return
        wholes = [use for use in uses if use.is_whole()]
        direct = next((use for use in wholes if use.tensor.is_contiguous()), None)
        if direct is not None:
            target = to_stored(direct.tensor)
        elif wholes:
            like = to_stored(wholes[0].tensor)
            target = empty_bytes(like.nbytes, like.device).view(like.dtype).reshape(like.shape)
        else:
            views = self._views_of(name, uses)
            if views:
                self._views[name] = views
                nbytes = _bytes_of_views(name, views)
            else:  # all of the memory is stored, as a tensor that is not loaded
                nbytes = next((use.view.storage or 0 for use in uses if use.view is not None), 0)
            target = empty_bytes(nbytes, uses[0].tensor.device)
        self.by_name[name] = target
        _check_storages(name, target.nbytes, uses, has_gaps=name in self._views)
        for use in uses:
            if use.tensor.numel() == 0 or (
                direct is not None and use.is_laid_out_as_saved() and use.base() == target.data_ptr()
            ):
                continue
            _check_distinct(use)
            self._copies.setdefault(name, []).append(use)


def _check_storages(name: str, nbytes: int, uses: Sequence[Use], has_gaps: bool) -> None:
    """Raise BadLeaf unless all views of a tensor of `nbytes` are of the same memory.

    That is the tensor itself or, with `has_gaps`, larger memory of which it has the bytes of the views.
    """
    storages = {use.view.storage for use in uses if use.view is not None and use.view.storage is not None}
    if len(storages) > 1:
        raise BadLeaf(f'"storage" of {name!r} differs between views of it')
    if storages and not has_gaps and storages != {nbytes}:
        raise BadLeaf(f'"storage" of {name!r} differs from its size, {nbytes} bytes')


def _bytes_of_views(name: str, views: Sequence[Strided]) -> int:
    try:
        runs = merged(numpy.concatenate([view.runs() for view in views]))
    except TooManyRuns:
        raise BadLeaf(f"a view of {name!r} has too many pieces") from None
    return int((runs[:, 1] - runs[:, 0]).sum())


def _copy(use: Use, source: torch.Tensor) -> None:
    """Copy to a tensor, whose elements may share memory if they did when it was saved."""
    if use.tensor.is_contiguous() or not use.is_laid_out_as_saved():
        copy_values(use.tensor, source)
        return
    at = strided(use.tensor)
    for begin, end in (at.runs() - at.offset).tolist():
        first, count = begin // at.itemsize, (end - begin) // at.itemsize
        target, values = (
            each.as_strided((count,), (1,), each.storage_offset() + first) for each in (use.tensor, source)
        )
        copy_values(target, values)


def _check_distinct(use: Use) -> None:
    """Raise ValueError if elements to load into share memory, but the saved ones did not."""
    if use.tensor.is_contiguous() or (not use.is_whole() and use.is_laid_out_as_saved()):
        return
    try:
        runs = strided(use.tensor).runs()
    except TooManyRuns:
        return
    if int((runs[:, 1] - runs[:, 0]).sum()) < use.tensor.nbytes:
        raise ValueError(
            f"into: {use.place} has elements that share memory, but did not when it was saved; load without "
            "`into`"
        )


def _check_overlaps(uses: Mapping[str, Sequence[Use]]) -> None:
    """Raise ValueError if two tensors share memory in a different way than when they were saved."""
    flat = [(name, use) for name, each in uses.items() for use in each if use.tensor.numel()]
    begins, ends = spans([use.tensor for _, use in flat])
    for group in groups(begins, ends):
        views = {index: strided(flat[index][1].tensor) for index in group}
        for members, _ in sharing(views, group):
            first_name, first = flat[members[0]]
            for name, use in (flat[index] for index in members[1:]):
                if name != first_name or use.layout() != first.layout():
                    raise ValueError(
                        f"into: {first.place} and {use.place} share memory, but did not when they were "
                        "saved; load without `into`"
                    )
