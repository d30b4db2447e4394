"""Finds where the states of two ranks differ, by comparing a short checksum of each value."""

import itertools
import json
import zlib
from collections.abc import Iterator

from trunkline.checkpoint.state.leaves import Json

MAX_MARKS = 4096  # of a state: they are sent to all ranks with every save
_PAIRS = ("dict", "OrderedDict", "Counter")
_MAX_KEY_CHARACTERS = 200  # in messages


def marks_of(skeleton: Json) -> list[int]:
    """Return a checksum of each of the first values of a state, in order; `skeleton`: of flatten()."""
    return [_mark(place, value) for place, value in itertools.islice(_values("state", skeleton), MAX_MARKS)]


def first_difference(skeleton: Json, marks: list[int]) -> str | None:
    """Return the place of the first value that differs from the state of `marks`, such as "state['lr']".

    None if that is unknown: only values after the last mark differ, or the other state ends with values that
    this one lacks.
    """
    for (place, value), mark in zip(_values("state", skeleton), marks):  # noqa: B905 - stops with the shorter one
        if _mark(place, value) != mark:
            return place
    if len(marks) == MAX_MARKS:
        return None
    return next((place for place, _ in itertools.islice(_values("state", skeleton), len(marks), None)), None)


def _mark(place: str, value: Json) -> int:
    return zlib.crc32(f"{place} {json.dumps(value)}".encode())


def _values(place: str, node: Json) -> Iterator[tuple[str, Json]]:
    """Yield each container, as its kind, and each value in it; lists of numbers and strings are one value."""
    items: Json = node
    if isinstance(node, dict):
        kind = next(iter(node), "")
        items = node.get(kind)
        if kind in _PAIRS and isinstance(items, list):
            yield place, kind
            for key, value in zip(items[::2], items[1::2], strict=True):
                shown = repr(key) if isinstance(key, str) else json.dumps(key)
                yield from _values(f"{place}[{shown[:_MAX_KEY_CHARACTERS]}]", value)
            if "_metadata" in node:
                yield f"{place}._metadata", node["_metadata"]
            return
        if kind != "tuple":
            yield place, node
            return
        yield place, kind
    if not isinstance(items, list) or not any(isinstance(each, dict | list) for each in items):
        yield place, items
        return
    for index, value in enumerate(items):
        yield from _values(f"{place}[{index}]", value)
