"""Finds the part of an object that cannot be pickled, to name it in an error."""

import pickle
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 100  # of nested parts


def find_unpicklable(root: object, try_pickling: Callable[[Any], object]) -> str | None:
    """Return the path of the innermost part that `try_pickling` raises for, as Python code; None if none.

    The path begins with `obj`, such as obj['model'].callbacks[0]. Another thread may change `root` meanwhile;
    then the path may be that of an outer part.
    """

    def fails(part: object) -> bool:
        try:
            try_pickling(part)
        except (pickle.PicklingError, AttributeError, TypeError):
            return True
        except Exception:  # not the failure that is looked for
            return False
        return False

    if not fails(root):
        return None
    place, value = "obj", root
    for _ in range(_MAX_DEPTH):
        inner = next(((name, part) for name, part in _parts_of(value) if fails(part)), None)
        if inner is None:
            break
        place, value = f"{place}{inner[0]}", inner[1]
    return place


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a container, or the attributes of an object, each with its place."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in list(value.items())]
    if isinstance(value, (list, tuple)):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return []
    return [(f".{name}", part) for name, part in list(vars(value).items())]
