"""Writes a step whose bytes are on the disks of several nodes to a file or folder, on rank 0."""

from collections.abc import Callable
from typing import Any

from trunkline.checkpoint.directory.local_load import LocalLoading, OnProgress, no_progress
from trunkline.checkpoint.directory.local_save import LocalContext
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import combine

_BUT = "nothing was exported"

Check = Callable[[], None]
Write = Callable[[int, Any], dict[str, Any]]


def export(
    context: LocalContext,
    loading: LocalLoading,
    step: int | None,
    check: Check,
    write: Write,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """Return, on all ranks, what `write` returns on rank 0, which is called with a step and its state.

    Collective. No run goes on from the step, as after load(), and nothing is locked. check: called on rank 0
    before anything is read; its error, as that of `write`, is one of all. on_progress: called on rank 0.
    """

    def checked(_: list[Any]) -> None:
        check()

    def work(exchange: Exchange | None) -> dict[str, Any]:
        combine(exchange, "target", None, checked, _BUT)
        is_first = context.ranks.rank == 0
        number, state = loading.read(exchange, step, on_progress if is_first else no_progress)
        written: dict[str, Any] = combine(exchange, "written", None, lambda _: write(number, state), _BUT)
        return written

    found: dict[str, Any] = context.together("export", _BUT, work)
    return found
