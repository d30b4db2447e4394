"""Numbers that users pass: errors name the argument."""

import math
from typing import Any


def check_count(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless the value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name}: must be at least 1, not {value}")


def check_positive(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless the value is a finite number above 0."""
    _check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: must be above 0, not {value}")


def check_not_negative(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless the value is a finite number of at least 0."""
    _check_number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: must not be below 0, not {value}")


def check_share(name: str, value: Any, with_one: bool) -> None:
    """Raise TypeError or ValueError unless the value is above 0 and below 1, or with `with_one` at most 1."""
    _check_number(name, value)
    if not (0 < value < 1 or (with_one and value == 1)):
        limit = "at most 1" if with_one else "below 1"
        raise ValueError(f"{name}: must be above 0 and {limit}, not {value}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: must be a number, not {value!r}")
