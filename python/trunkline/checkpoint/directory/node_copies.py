"""Waits, on all ranks, until what all nodes are to copy to tiers is there."""

import time
from typing import Any

from trunkline._errors import Timeout
from trunkline.checkpoint.directory.local_load import LocalLoading
from trunkline.checkpoint.directory.local_save import LocalContext
from trunkline.checkpoint.directory.node_tiers import plan_tasks
from trunkline.checkpoint.nodes.agreement import Inventory
from trunkline.checkpoint.ranks.group import Exchange, rank_error
from trunkline.checkpoint.ranks.outcomes import combine

_BUT = "not all copies were waited for"
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
            offered = self._loading.entries(lock=True)
            return combine(exchange, "entries", offered, lambda all_: context.planned(all_, self._plan), _BUT)

        try:
            found = context.together("wait_drained()", _BUT, work)
        except BaseException:
            if context.node is not None:
                context.node.unlock_again()
            raise
        finally:
            context.must_read = True
            if context.node is not None:
                context.node.is_used = False
        if "problem" not in found:
            context.node_tiers.raise_again()
            context.node_tiers.assign(found["to_copy"])

    def _plan(self, found: list[Inventory]) -> dict[str, Any]:
        """Plan the copies, on rank 0."""
        here = [each for each in found if each.node]
        if len(here) < len(found):  # a node has nothing yet: it cannot take part
            return {"to_copy": []}
        return {"to_copy": plan_tasks(found, self._context.node_tiers.waiting(found), None)}

    def are_done(self, *, is_late: bool) -> bool:
        """Whether all is copied. is_late: this rank does not want to wait any longer.

        Raises the error of this node, or RankError with that of another; Timeout on all ranks if one of them
        is late.
        """
        context = self._context
        tiers = context.node_tiers

        def work(exchange: Exchange | None) -> Any:
            own = {
                "failed": tiers.failures(),
                "unraised": tiers.unraised(),
                "has_ended": tiers.have_ended(),
                "is_late": is_late,
            }
            return combine(exchange, "copied", own, self._outcome, _BUT)

        found = context.together("wait_drained()", _BUT, work)
        if not found["is_done"] and not found["is_late"]:
            return False
        tiers.raise_failure()
        if found["unraised"] is not None:
            rank, why = found["unraised"]
            raise rank_error(rank, f"rank {rank} could not copy to a tier: {why}")
        if not found["is_done"]:
            what = found["what"] or "to tiers"
            raise Timeout(None, f"copying {what}: not finished in the given time; it goes on, wait again")
        return True

    def _outcome(self, theirs: list[dict[str, Any]]) -> dict[str, Any]:
        tiers = self._context.node_tiers
        tiers.note_failures([each["failed"] for each in theirs[1:]])
        unraised = [(rank, each["unraised"]) for rank, each in enumerate(theirs) if each["unraised"]]
        return {
            "unraised": unraised[0] if unraised else None,
            "is_done": theirs[0]["has_ended"],  # the coordinator commits the copies, after all others
            "is_late": any(each["is_late"] for each in theirs),
            "what": tiers.what_is_copied(),
        }

    def pause(self) -> None:
        """Wait a little before the next are_done()."""
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
