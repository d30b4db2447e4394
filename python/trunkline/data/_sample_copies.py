"""Samples on their way to an executor, whose workers may be processes."""

from collections.abc import Callable
from typing import Any


class Samples:
    """Samples that can be pickled: memoryviews, which cannot, become views of copies."""

    def __init__(self, values: list[Any]) -> None:
        """`values`: as Batch.samples has them."""
        self.values = values

    def __reduce__(self) -> tuple[Callable[[list[Any]], "Samples"], tuple[list[Any]]]:
        return Samples, ([_picklable(value) for value in self.values],)


class _View:
    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __reduce__(self) -> tuple[Callable[[bytearray], memoryview], tuple[bytearray]]:
        return memoryview, (bytearray(self._view),)


def _picklable(value: Any) -> Any:
    if isinstance(value, memoryview):
        return _View(value)
    if isinstance(value, dict):
        return {name: _picklable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_picklable(part) for part in value]
    return value
