"""Arguments of the public functions: what each accepts, and errors that name the argument."""

import math
import operator
import os
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy

from trunkline._core import Engine, parse_size
from trunkline._torch_or_numpy import torch

_MAX_SHOWN = 40  # characters of a string


def step_argument(value: SupportsIndex, hint: str = "") -> int:
    """Return the number of a step; raises TypeError or ValueError. `hint`: advice for another type."""
    step = _whole(value)
    if step is None:
        raise TypeError(f"step: must be an integer from 0 to 2^63 - 1, not {_shown(value)}{hint}")
    if not 0 <= step < 2**63:
        raise ValueError(f"step: must be an integer from 0 to 2^63 - 1, not {step}")
    return step


def shown_step(value: Any) -> str:
    """Return the text for a value that was passed as a step, valid or not."""
    step = _whole(value)
    return _shown(value) if step is None else str(step)


def keep_argument(value: SupportsIndex | None) -> int | None:
    """Return how many checkpoints to keep, None for all; raises TypeError or ValueError."""
    if value is None:
        return None
    keep = _whole(value)
    if keep is None:
        raise TypeError(f"keep: must be an integer of at least 1, or None to keep all, not {_shown(value)}")
    if keep < 1:
        raise ValueError(f"keep: must be an integer of at least 1, or None to keep all, not {keep}")
    return keep


def count_argument(value: SupportsIndex, name: str) -> int:
    """Return a number of at least 1; raises TypeError or ValueError."""
    return _integer_argument(value, name, 1)


def offset_argument(value: SupportsIndex, name: str) -> int:
    """Return the offset of a byte in a file; raises TypeError or ValueError."""
    return _integer_argument(value, name, 0)


def _integer_argument(value: SupportsIndex, name: str, least: int) -> int:
    number = _whole(value)
    if number is None:
        raise TypeError(f"{name}: must be an integer of at least {least}, not {_shown(value)}")
    if not least <= number < 2**63:
        raise ValueError(f"{name}: must be an integer of at least {least}, not {number}")
    return number


def bool_argument(value: Any, name: str) -> bool:
    """Return a bool of Python or numpy, or 0 or 1, as bool; raises TypeError.

    Other values are rejected although they have a truth value: that of "no" is True.
    """
    if isinstance(value, bool | numpy.bool_) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name}: must be True or False, not {value!r}")


def seconds_argument(value: Any, name: str = "timeout") -> float:
    """Return a number of seconds; raises TypeError, and ValueError for NaN."""
    if isinstance(value, bool | str | bytes | bytearray):  # float() would parse the latter
        raise TypeError(f"{name}: must be a number of seconds, not {value!r}")
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: must be a number of seconds, not {value!r}") from None
    except OverflowError:
        return math.inf
    if math.isnan(seconds):
        raise ValueError(f"{name}: must be a number of seconds, not {value!r}")
    return seconds


def check_staging_bytes(value: Any) -> None:
    """Raise TypeError or ValueError for an invalid size."""
    if value is not None:
        parse_size(value, "staging_bytes")


def check_engine(value: Any) -> None:
    """Raise TypeError unless the value is an Engine or None."""
    if value is not None and not isinstance(value, Engine):
        raise TypeError(f"engine: must be trunkline.Engine or None, not {type(value).__name__}")


def items_argument(value: Any, message: str) -> list[Any]:
    """Return the items of an iterable; raises TypeError with `message` for anything else, or a string."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        raise TypeError(message)
    return list(value)


def _shown(value: Any) -> str:
    """Return a number or a short string as text; of anything else, which may be a state, only the type."""
    if (
        value is None
        or isinstance(value, bool | int | float | complex)
        or (isinstance(value, str | bytes) and len(value) <= _MAX_SHOWN)
    ):
        return repr(value)
    return type(value).__name__


def _whole(value: Any) -> int | None:
    """Return an integer, or None for anything else; bools are not integers, though they have __index__."""
    if isinstance(value, bool) or getattr(value, "dtype", None) in (bool, torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def started_ranks() -> int:
    """Return how many processes a launcher such as torchrun has started together; 1 without one.

    Raises ValueError if the environment variable WORLD_SIZE is not a number.
    """
    value = os.environ.get("WORLD_SIZE") or "1"
    if not value.strip().isdecimal():
        raise ValueError(f"environment variable WORLD_SIZE: must be a number of processes, not {value!r}")
    return int(value)
