"""Documents that are wrong in one place."""

import copy
import math
from collections.abc import Iterator
from typing import Any

_WRONG = (None, "x", True, -1, 0, math.nan, math.inf, 10**400, [], [None], {}, {"x": 1})


def each_value_replaced(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield copies in which one value, however deep, is another one or missing."""
    for path in _paths(document):
        for wrong in (*_WRONG, ...):
            changed = copy.deepcopy(document)
            place: Any = changed
            for key in path[:-1]:
                place = place[key]
            if wrong is ...:
                del place[path[-1]]
            else:
                place[path[-1]] = wrong
            yield changed


def _paths(value: Any) -> Iterator[list[Any]]:
    pairs: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, below in pairs:
        yield [key]
        for rest in _paths(below):
            yield [key, *rest]
