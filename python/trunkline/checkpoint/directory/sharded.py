"""Checkpoints of trunkline.dcp on nodes: their tensors are what single ranks have of the state.

Where another checkpoint has its state, they have an object with one key, which no saved state has there.
"""

from typing import Any

from trunkline._errors import Format

_KEY = "parts of a sharded state"


def as_state(parts: Any) -> dict[str, Any]:
    """Return what such a checkpoint has as its state. parts: what trunkline.dcp needs to know."""
    return {_KEY: parts}


def parts_in(state: Any) -> Any:
    """Return what trunkline.dcp needs to know; None: it is an ordinary state."""
    return state[_KEY] if isinstance(state, dict) and list(state) == [_KEY] else None


def check_is_whole(state: Any, where: str) -> None:
    """Raise Format unless it is an ordinary state."""
    if parts_in(state) is None:
        return
    error = Format(
        None,
        f"{where} was saved with trunkline.dcp.Checkpointer(..., local=True), by each rank what it has of "
        "the state; load it with trunkline.dcp",
    )
    error.is_of_sharded_state = True  # type: ignore[attr-defined]
    raise error


def says_sharded(error: Format) -> bool:
    """Whether an error is that of check_is_whole()."""
    return getattr(error, "is_of_sharded_state", False)
