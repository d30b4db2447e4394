"""Verifies what all nodes have of steps, each what is on its own disks."""

from collections.abc import Collection, Sequence
from typing import Any

from trunkline._cli_errors import described
from trunkline._errors import Error
from trunkline._progress import progress_to
from trunkline.checkpoint.directory.local_save import LocalContext, refusal
from trunkline.checkpoint.nodes.agreement import Entry
from trunkline.checkpoint.nodes.copies import shares_of
from trunkline.checkpoint.nodes.node_directory import NodeDirectory, inventory_in_json
from trunkline.checkpoint.nodes.record import entry_of, json_of
from trunkline.checkpoint.nodes.run import saves_to_verify
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import combine

_BUT = "nothing was verified"


def verify(context: LocalContext, step: int | None, every: bool) -> dict[str, Any]:
    """Return what the nodes have of a step (None: the one that was saved last), or of every one. Collective.

    The document of `trunkline checkpoint verify --all-nodes`, without its name. Nothing is locked.
    """

    def plan(offered: list[Any]) -> dict[str, Any]:
        return context.planned(
            offered, lambda found: {"saves": [each.id for each in saves_to_verify(found, step, every)]}
        )

    def work(exchange: Exchange | None) -> dict[str, Any]:
        node = context.node
        offered = None if node is None else inventory_in_json(node.inventory())
        found = combine(exchange, "entries", offered, plan, _BUT)
        if "problem" in found:
            raise refusal(context, found["problem"], "verify")
        is_first = context.ranks.rank == 0
        own = None if node is None else _verified_here(node, found["saves"], step, is_first)
        # A rank may verify for as long as it is alive.
        return dict(
            combine(exchange, "verified", own, lambda values: _merged(context.of_nodes(values)), _BUT)
        )

    return dict(context.together("verify", _BUT, work))


def _verified_here(
    node: NodeDirectory, ids: Collection[str], step: int | None, shows_progress: bool
) -> dict[str, Any]:
    """Return what a node has of these saves, and what else is wrong with what it has."""
    before = {each.id: each for each in node.inventory().prepared}
    node.read()  # again, since a save that counts may have come after it was read
    if node.lost_save() is not None:
        node.read()  # a training may have removed it between two steps of reading
    inventory = node.inventory()
    here = {each.id: each for each in inventory.prepared}
    problems = []
    if step is None:
        for number, error in sorted(node.damaged.items()):
            problems.append({"node": node.id, "entry": number, "error": described(error)})
    lost = node.lost_save()
    if lost is not None and step in (None, lost.step):
        problems.append({"node": node.id, "entry": lost.number, "error": described(node.lost_error(lost))})
    shares = []
    for each in ids:
        save = here.get(each) or before.get(each)
        if save is None or save.number in node.damaged or (lost is not None and lost.id == each):
            continue
        about = {"save": json_of(save), "as": inventory.as_node(save), "is_here": True, "node": node.id}
        found = _compared(node, save, shows_progress) if each in here else {"ok": False, "is_removed": True}
        shares.append({**about, **found})
    return {"shares": shares, "problems": problems}


def _compared(node: NodeDirectory, save: Entry, shows_progress: bool) -> dict[str, Any]:
    """Compare every byte that a node has of a save with its checksum."""
    failure: dict[str, Any] = {}
    try:
        with progress_to(f"verifying step {save.step} on this node") as show:
            found = node.store.verify(save.number, progress=show if shows_progress else None)
    except Error as error:
        found, failure = {"bytes": 0, "mismatches": []}, {"error": described(error)}
    ok = not found["mismatches"] and not failure
    about = {"ok": ok, "bytes": found["bytes"], "mismatches": found["mismatches"], **failure}
    return about if ok else {**about, "is_removed": _is_removed(node, save)}


def _is_removed(node: NodeDirectory, save: Entry) -> bool:
    """Whether a training has removed a save meanwhile."""
    try:
        node.store.open_manifest(save.number)
    except FileNotFoundError:
        return True
    except Error:
        return False
    return False


def _merged(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    shares = [share for each in nodes for share in each["shares"]]
    saves = {share["save"]["id"]: entry_of(share["save"]) for share in shares}
    found = [
        _verdict(save, [share for share in shares if share["save"]["id"] == save.id])
        for save in sorted(saves.values(), key=lambda save: save.number)
    ]
    problems = [problem for each in nodes for problem in each["problems"]]
    return {
        "ok": bool(found) and not problems and all(each["ok"] for each in found),
        "checkpoints": found,
        "problems": problems,
    }


def _verdict(save: Entry, shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what is known of a save: of each of its nodes, and which shares no node has intact."""
    about = {"step": save.step, "entry": save.number}
    if any(share.get("is_removed") for share in shares):
        return {**about, "ok": True, "removed": True, "nodes": [], "lost_shares": []}
    nodes = []
    for name in save.nodes:
        held = [share for share in shares if share["as"] == name]
        left_out = {"save", "as", "is_removed"}
        nodes += [{key: share[key] for key in share if key not in left_out} for share in held]
        if not held:
            nodes.append({"node": name, "is_here": False, "ok": False, "bytes": 0, "mismatches": []})
    intact = {share["as"] for share in shares if share["ok"]}
    return {
        **about,
        "ok": all(each["ok"] for each in nodes),
        "nodes": nodes,
        "lost_shares": [share.owner for share in shares_of(save) if not intact & set(share.nodes)],
    }
