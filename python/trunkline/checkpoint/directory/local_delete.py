"""Removes a step from the disks of several nodes."""

import os
from typing import Any

from trunkline.checkpoint.directory.local_save import LocalContext, refusal
from trunkline.checkpoint.nodes.agreement import Inventory
from trunkline.checkpoint.nodes.node_directory import inventory_in_json
from trunkline.checkpoint.nodes.run import Refused, plan_removal
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import combine

_BUT = "nothing was deleted"
_BUT_SOME = "the step was not deleted from all nodes; delete it again"


def _planned(context: LocalContext, found: list[Inventory], step: int) -> list[str]:
    try:
        return plan_removal(found, step)
    except Refused as error:
        tier = context.node_tiers.directory_with(step) if error.kind == "missing" else None
        if tier is None:
            raise
        raise Refused(
            "missing",
            f"the nodes have no checkpoint of step {step}; the tier {tier} has a copy, which "
            f"Checkpointer({tier!r}).delete({step}) removes",
        ) from None


def delete(context: LocalContext, step: int) -> None:
    """Remove a step. Collective. The errors are those of LocalCheckpointer.delete()."""
    call = f"delete({step})"

    def plan(offered: list[Any]) -> dict[str, Any]:
        return context.planned(offered, lambda found: {"gone": _planned(context, found, step)})

    def work(exchange: Exchange | None) -> None:
        node = context.node
        try:
            offered = None
            if node is not None:
                if os.path.isdir(node.directory):  # noqa: PTH112
                    node.lock()
                node.read()
                offered = inventory_in_json(node.inventory())
            found = combine(exchange, "entries", offered, plan, _BUT)
            if "problem" in found:
                raise refusal(context, found["problem"], call)
        except BaseException:
            if node is not None:
                node.unlock_again()
            raise
        context.node_tiers.forget(step)  # before its files are gone, which a copy would miss
        if node is not None:
            node.remove(found["gone"])
            node.note_change()
        combine(exchange, "removed", None, lambda _: None, _BUT_SOME)

    context.together(call, _BUT, work)
