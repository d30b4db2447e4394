"""The paths of an index: bytes in one array, decoded when they are looked at."""

import os
from collections.abc import Sequence
from typing import overload

import numpy


class PathSequence(Sequence[str]):
    """Paths in a blob of bytes, as a read-only sequence of str."""

    def __init__(self, blob: "numpy.ndarray", ends: "numpy.ndarray") -> None:
        """`blob`: bytes of all paths, one after another; `ends`: where each ends in it."""
        self._blob = blob
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> "Sequence[str]": ...

    def __getitem__(self, index: int | slice) -> "str | Sequence[str]":
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return os.fsdecode(self.encoded(range(len(self))[index]))

    def encoded(self, index: int) -> bytes:
        """Return the bytes of a path. `index` is not negative."""
        begin = int(self._ends[index - 1]) if index else 0
        return self._blob[begin : int(self._ends[index])].tobytes()

    def __repr__(self) -> str:
        shown = ", ".join(repr(path) for path in self[:3])
        return f"[{shown}{', ...' if len(self) > 3 else ''}]"
