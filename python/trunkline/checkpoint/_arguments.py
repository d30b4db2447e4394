"""Arguments that are whole numbers: of Python, numpy, or whatever else has __index__."""

import operator
from typing import Any, SupportsIndex

import torch


def step_argument(value: SupportsIndex) -> int:
    """Return the number of a step; raises ValueError."""
    step = _whole(value)
    if step is None or not 0 <= step < 2**63:
        raise ValueError(f"step: must be an int from 0 to 2^63 - 1, not {value!r}")
    return step


def keep_argument(value: SupportsIndex | None) -> int | None:
    """Return how many checkpoints stay, None for all; raises ValueError."""
    if value is None:
        return None
    keep = _whole(value)
    if keep is None or keep < 1:
        raise ValueError(f"keep: must be an int of at least 1, or None to keep all, not {value!r}")
    return keep


def _whole(value: Any) -> int | None:
    """Truth values are no numbers, though they have __index__."""
    if isinstance(value, bool) or getattr(value, "dtype", None) in (bool, torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
