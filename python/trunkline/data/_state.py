"""The state of a Loader: where its training is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class Cursor:
    """The samples of an epoch that all ranks together have got."""

    epoch: int = 0
    samples: int = 0
    # For a reader that shares the batches of its rank with others: how many steps of theirs come before its
    # own next one. None: as its number among them says.
    steps_of_others: int | None = None


def state_of(cursor: Cursor, seed: int, block: int, fingerprint: str) -> dict[str, Any]:
    """Return a state as plain ints and strs, which JSON can hold."""
    state: dict[str, Any] = {
        "version": VERSION,
        "seed": seed,
        "shuffle": block,
        "epoch": cursor.epoch,
        "samples": cursor.samples,
        "fingerprint": fingerprint,
    }
    if cursor.steps_of_others is not None:
        state["steps_of_others"] = cursor.steps_of_others
    return state


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def cursor_of(state: Mapping[str, Any], block: int, fingerprint: str, samples: int) -> tuple[Cursor, int]:
    """Return the cursor and the seed of a state; raises ValueError if it is not one, or of other data."""
    if not isinstance(state, Mapping) or not isinstance(state.get("version"), int):
        raise ValueError(f"state: must be what Loader.state_dict() returned, not {_shown(state)}")
    if state["version"] > VERSION:
        raise ValueError(
            f"state: has version {state['version']}, of a newer release; this one reads {VERSION}"
        )
    numbers: list[Any] = [state.get(name) for name in ("seed", "shuffle", "epoch", "samples")]
    others = state.get("steps_of_others")
    if not all(_is_number(each) for each in (*numbers, 0 if others is None else others)):
        raise ValueError(
            f"state: lacks numbers of a state, or has some that are negative or too large: {_shown(state)}"
        )
    seed, shuffle, epoch, position = numbers
    if state.get("fingerprint") != fingerprint:
        raise ValueError(
            "state: belongs to other data (its fingerprint differs): files were added, removed or resized "
            "since it was saved, or the index was made with different arguments"
        )
    if shuffle != block:
        was, now = (each if each > 1 else bool(each) for each in (shuffle, block))
        raise ValueError(f"state: was saved with shuffle={was}, and this loader has shuffle={now}")
    if position > samples:
        raise ValueError(f"state: is at sample {position} of {samples}")
    return Cursor(epoch, position, others), seed


def _shown(state: object) -> str:
    shown = repr(state)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."
