"""Waits, on all ranks, until what all nodes are to copy to tiers is there."""

import time
from typing import Any

from trunkline.checkpoint.directory.local_load import LocalLoading
from trunkline.checkpoint.directory.local_save import LocalContext
from trunkline.checkpoint.directory.node_tiers import plan_tasks
from trunkline.checkpoint.nodes.agreement import Inventory
from trunkline.checkpoint.ranks.group import Exchange, rank_error
from trunkline.checkpoint.ranks.outcomes import combine

_BUT = "it was not waited for all copies"
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class NodeCopies:
    """One wait for copies, whose calls are collective but for pause()."""

    def __init__(self, context: LocalContext, loading: LocalLoading) -> None:
        self._context = context
        self._loading = loading
        self._pause = _FIRST_PAUSE_SECONDS

    def begin(self) -> None:
        """Let every node copy what tiers are still to get, also of what an earlier run has left."""
        context = self._context

        def work(exchange: Exchange | None) -> Any:
            offered = self._loading.entries()
            return combine(exchange, "entries", offered, lambda all_: context.planned(all_, self._plan), _BUT)

        found = context.together("wait_drained()", _BUT, work)
        if "problem" not in found:
            context.node_tiers.raise_again()
            context.node_tiers.assign(found["to_copy"])

    def _plan(self, found: list[Inventory]) -> dict[str, Any]:
        """Plan the copies, on rank 0."""
        here = [each for each in found if each.node]
        if len(here) < len(found):  # a node has nothing yet: it cannot take part
            return {"to_copy": []}
        return {"to_copy": plan_tasks(found, self._context.node_tiers.waiting(found), None)}

    def are_done(self) -> bool:
        """Whether all is copied. Raises the error of this node, or RankError with that of another."""
        context = self._context
        tiers = context.node_tiers

        def work(exchange: Exchange | None) -> Any:
            own = {"failed": tiers.failures(), "is_done": tiers.are_copied()}
            return combine(exchange, "copied", own, self._outcome, _BUT)

        found = context.together("wait_drained()", _BUT, work)
        if found["failed"] is not None:
            tiers.raise_failure()
            rank, why = found["failed"]
            raise rank_error(rank, f"rank {rank} could not copy to a tier: {why}")
        return bool(found["is_done"])

    def _outcome(self, theirs: list[dict[str, Any]]) -> dict[str, Any]:
        self._context.node_tiers.note_failures([each["failed"] for each in theirs[1:]])
        failed = [(rank, each[1]) for rank, own in enumerate(theirs) for each in own["failed"] if each]
        # The coordinator commits the copies, after all others.
        return {"failed": failed[0] if failed else None, "is_done": theirs[0]["is_done"]}

    def pause(self) -> None:
        """Wait a little before the next are_done()."""
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
