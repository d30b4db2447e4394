"""Which steps are copied to a tier, which ones retention leaves for that, and where a step is read from."""

from collections.abc import Collection, Container, Iterable, Sequence
from typing import NamedTuple


class Commit(NamedTuple):
    """A committed step, and the number of its commit."""

    step: int
    number: int


def is_due(step: int, every: int) -> bool:
    """Whether the step is one of those that a tier gets."""
    return step % every == 0


def steps_to_copy(
    local: Iterable[Commit], there: Iterable[Commit], every: int, keep: int | None, above: int = 0
) -> list[Commit]:
    """Return what to copy to a tier, in this order.

    local: what is in the directory of the run; there: what is in the tier. Steps are copied in the order of
    their commits, because the last commit of a directory is its latest step: what was committed before the
    last one that is there is not copied any more. Nor is what the tier would remove again at once, since it
    keeps the last `keep` (None: all). above: only later commits can be copied, since those up to this one
    were set aside in the tier.
    """
    newest = max((each.number for each in there), default=above)
    due = sorted(
        (each for each in local if is_due(each.step, every) and each.number > newest),
        key=lambda each: each.number,
    )
    return due if keep is None else due[-keep:]


def held_steps(local: Iterable[Commit], every: int, settled: Container[Commit]) -> set[int]:
    """Return the steps that retention must not remove: those to copy that are not settled.

    settled: what was copied, will not be copied, or could not be copied.
    """
    return {each.step for each in local if is_due(each.step, every) and each not in settled}


def newest_of(sources: Sequence[Collection[Commit]]) -> tuple[int, Commit] | None:
    """Return the commit with the highest number, and the index of the first source that has it."""
    return _highest((index, each) for index, source in enumerate(sources) for each in source)


def source_of(sources: Sequence[Collection[Commit]], step: int) -> tuple[int, Commit] | None:
    """Return the newest commit of a step, and the index of the first source that has it."""
    return _highest(
        (index, each) for index, source in enumerate(sources) for each in source if each.step == step
    )


def _highest(found: Iterable[tuple[int, Commit]]) -> tuple[int, Commit] | None:
    # max() returns the first of equal ones: that of the first source.
    return max(found, key=lambda each: each[1].number, default=None)
