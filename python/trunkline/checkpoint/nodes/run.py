"""What the coordinator of nodes decides of a save or load: pure functions, but for ids that they choose."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import NamedTuple, TypeAlias

from trunkline.checkpoint.nodes.agreement import (
    Decision,
    Entry,
    History,
    Inventory,
    Metrics,
    decide,
    needed_damaged,
    next_history,
    next_number,
)
from trunkline.checkpoint.nodes.copies import KeptBy, lost_copies, missing_shares, shares_of
from trunkline.checkpoint.retention import Rules


@dataclass(frozen=True)
class Run:
    """What a run of the nodes has loaded or saved. Rank 0 needs it.

    branch, history: of its entries; empty if it has none. Then it goes on from `start`, an earlier save,
    where `latest` was the id of the latest entry. left: the ids of saves that it goes back behind. known:
    branches that it knows from elsewhere than its nodes.
    """

    branch: str = ""
    history: History = ()
    start: Entry | None = None
    latest: str = ""
    left: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @classmethod
    def of(cls, entry: Entry) -> "Run":
        """Return the run that made an entry."""
        return cls(entry.branch, entry.history)


def after_failure(found: Sequence[Inventory], run: Run | None, attempt: Run | None) -> Run | None:
    """Return the run that goes on after a save that failed at a moment when its entry may count.

    run: what went on to that save; attempt: the run with its entry; None: no save has failed.
    """
    latest = None if attempt is None else decide(found).latest
    return attempt if latest is not None and attempt is not None and latest.branch == attempt.branch else run


_MOST_WAYS = 1000  # of placing copies on new nodes that are compared


class Refused(Exception):
    """Nothing was saved or loaded, for the reason in the text. kind: that of the error to raise for it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _decide(found: Sequence[Inventory]) -> Decision:
    """Find the latest entry. found: of all nodes; those without an id have nothing.

    Raises Refused if a node cannot read what may be the latest.
    """
    here = [each for each in found if each.node]
    damaged = needed_damaged(here)
    if damaged is not None:
        raise Refused("damaged", f"on the node {damaged[0]}, {damaged[1]}")
    return decide(here)


@dataclass(frozen=True)
class SavePlan:
    """The entry of a save.

    counting: the ids of the saves that count and that it continues from, which are marked with it. removable:
    of those that may be removed once it is committed on all nodes.
    """

    entry: Entry
    counting: tuple[str, ...]
    removable: tuple[str, ...]


class NewSave(NamedTuple):
    """What is saved. kept_by, metrics: as in the entry."""

    step: int
    kept_by: KeptBy = ()
    metrics: Metrics = ()


def plan_save(
    found: Sequence[Inventory],
    run: Run | None,
    fresh: bool,
    new: NewSave,
    rules: Rules,
    *,
    first_number: int = 1,
    held: Collection[str] = (),
) -> SavePlan:
    """Plan a save. found: of all nodes of the run, each with an id. run: None before its first save.

    first_number: the least number of its entry. held: the ids of saves that retention must leave.

    Raises Refused if these nodes have checkpoints that the run does not continue from.
    """
    decision = _decide(found)
    latest = decision.latest
    if run is None and latest is not None and not fresh:
        raise Refused(
            "exists",
            f"there are checkpoints of an earlier run, up to step {latest.step}; call load() first to "
            "continue it, or pass fresh=True to start over",
        )
    if run is not None and latest is not None and latest.branch != run.branch and latest.id != run.latest:
        raise Refused("exists", f"another run has saved step {latest.step} meanwhile; call load() first")
    if run is None or not run.branch:
        start = None if run is None else run.start
        known = () if run is None else run.known
        branch, history = secrets.token_hex(8), next_history(found, start, known)
    else:
        branch, history = run.branch, run.history
    nodes = tuple(each.node for each in found)
    entry = Entry(
        secrets.token_hex(16),
        max(next_number(found), first_number),
        branch,
        history,
        nodes,
        new.step,
        kept_by=new.kept_by,
        metrics=new.metrics,
    )
    gone = {each.id for each in decision.failed}
    if run is not None:
        saves = [each for each in decision.saves if each.id not in run.left and entry.continues(each)]
        gone |= _removable(decision, saves, entry, rules) - set(held)
        if rules.keep is not None:
            gone |= set(run.left) | {each.id for each in decision.undecided if entry.supersedes(each)}
    gone |= _superfluous(found, decision, gone)
    counting = () if run is None else tuple(each.id for each in decision.saves if entry.continues(each))
    return SavePlan(entry, counting, tuple(sorted(gone)))


def _removable(decision: Decision, saves: Sequence[Entry], new: Entry, rules: Rules) -> set[str]:
    """Return what retention removes of the lineage.

    Those that cannot be loaded without nodes that are not there take the place of none that can be.
    """
    loadable = [each for each in saves if not _missing_owners(decision, each)]
    missing = {each.id for each in saves} - {each.id for each in loadable}
    return _excess(loadable, new, rules) | (_excess(saves, new, rules) & missing)


def _excess(saves: Sequence[Entry], new: Entry, rules: Rules) -> set[str]:
    """Return what retention removes of so many saves, as for other checkpoints."""
    same = [each for each in saves if each.step == new.step]
    others = [each for each in saves if each.step != new.step]
    gone = list(same)
    if rules.keep is not None:
        # Those of later steps first: the run has gone back behind them.
        in_order = sorted(others, key=lambda each: (each.step < new.step, each.number))
        excess = in_order[: max(0, len(in_order) + 1 - rules.keep)]
        best = _best([*others, new], rules)
        gone += [
            each
            for each in excess
            if (rules.every is None or each.step % rules.every) and each.id not in best
        ]
    return {each.id for each in gone}


def _best(saves: Sequence[Entry], rules: Rules) -> list[str]:
    if rules.best is None:
        return []
    return rules.ranking_of([(each.id, metrics_of(each)) for each in saves])[: rules.best[2]]


def metrics_of(entry: Entry) -> dict[str, float]:
    """Return the metrics of a save as numbers."""
    return {name: float(value) for name, value in entry.metrics}


def _superfluous(found: Sequence[Inventory], decision: Decision, gone: Collection[str]) -> set[str]:
    """Return the continuations that are not needed any more.

    A new save supersedes them all. Those are needed that show that a save counts, since not all nodes of that
    are there.
    """
    needed = {each.id for each in decision.saves if each.id not in gone and _lacks_nodes(decision, each)}
    every = [each for inventory in found for each in inventory.prepared]
    return {each.id for each in every if each.base is not None and each.base not in needed}


def goes_on_from(entry: Entry, other: Entry) -> bool:
    """Whether the run of an entry may replace what the run of `other` has copied to a tier.

    That is so if it is the same run; and if it knows that run, and the two have an ancestor: a run from whose
    saves both go on. So a run may go back to an earlier step, and one that starts over may not go on there.
    """
    if entry.branch == other.branch:
        return True
    history = dict(entry.history)
    # 0: a run is known, but nothing of it is continued from.
    lineage = {other.branch, *(branch for branch, last in other.history if last > 0)}
    return other.branch in history and any(history.get(branch, 0) > 0 for branch in lineage)


def branches_of(entry: Entry) -> tuple[str, ...]:
    """Return the branches that a run knows that has seen an entry."""
    return (entry.branch, *(branch for branch, _ in entry.history))


def _are_related(here: Entry, newest: Entry) -> bool:
    """Whether one of two runs goes on from the other."""
    return goes_on_from(here, newest) or newest.supersedes(here)


# The directory of a tier, and the saves there, in the order of their numbers.
TierSaves: TypeAlias = tuple[str, Sequence[Entry]]


def related_tiers(found: Sequence[Inventory], tiers: Sequence[TierSaves], *, fresh: bool) -> list[TierSaves]:
    """Return what is in tiers of the run whose saves the nodes have, if they have any.

    Raises Refused for tiers of another run; if this one is to start over, `fresh`, they count as empty.
    """
    here = _decide(found).latest
    related: list[TierSaves] = []
    for directory, saves in tiers:
        if here is None or not saves or _are_related(here, saves[-1]):
            related.append((directory, saves))
        elif fresh:
            related.append((directory, []))
        else:
            raise Refused(
                "exists",
                f"the tier {directory} holds step {saves[-1].step} of another run; name another directory "
                "for the tier, or pass fresh=True to start over",
            )
    return related


class TierPlan(NamedTuple):
    """A save to load from a tier. tier: its index. lost: why a later one is not loaded; None: there is none.

    run: goes on from there.
    """

    tier: int
    save: Entry
    lost: str | None
    run: Run


def plan_tier_load(
    found: Sequence[Inventory],
    step: int | None,
    tiers: Sequence[TierSaves],
) -> TierPlan | None:
    """Plan a load from a tier; None: what the nodes have is to be loaded, or there is nothing anywhere.

    tiers: as related_tiers() returns them. From a tier come the latest save where the nodes have none, where
    not all of its bytes are on the nodes that are here, or where another run has gone on from what they have;
    and steps that they do not have.
    """
    decision = _decide(found)
    here = decision.latest
    newest = max(
        ((number, saves[-1]) for number, (_, saves) in enumerate(tiers) if saves),
        key=lambda each: (each[1].number, -each[0]),
        default=None,
    )
    if newest is None:
        return None

    def planned(tier: int, save: Entry, lost: str | None = None) -> TierPlan:
        latest, known = "" if here is None else here.id, branches_of(tiers[tier][1][-1])
        return TierPlan(tier, save, lost, Run(start=save, latest=latest, known=known))

    if step is not None:
        if any(each.step == step for each in _loadable_saves(decision)):
            return None
        copies = [(tier, each) for tier, (_, saves) in enumerate(tiers) for each in saves]
        same = [each for each in copies if each[1].step == step]
        last = max(same, key=lambda each: (each[1].number, -each[0]), default=None)
        return None if last is None else planned(*last)
    if here is None or newest[1].supersedes(here):
        return planned(*newest)
    absent = _missing_owners(decision, decision.save or here)
    if decision.save is not None and not absent:
        return None
    if newest[1].id in (here.id, here.base):
        return planned(*newest)
    lost = (
        f"step {here.step} cannot be loaded: its bytes on {', '.join(absent) or 'other nodes'} are not here"
    )
    return planned(*newest, lost)


@dataclass(frozen=True)
class LoadPlan:
    """What to load: a save, and the entry from which the run goes on.

    places: by the ids of the nodes that have the save, which they are of those that are there: several where
    one is in the place of another that has returned. counting: the ids of the saves that it continues from,
    which are marked with its entry. run: goes back to the save; None if that is the latest: then the load is
    an entry.
    """

    save: Entry
    chosen: Entry
    places: Mapping[str, list[int]]
    counting: tuple[str, ...]
    run: Run | None


def plan_load(found: Sequence[Inventory], step: int | None) -> LoadPlan | None:
    """Plan a load. found: of all nodes; those without an id have nothing. None: there is no checkpoint.

    Raises Refused if a step does not exist, or cannot be loaded without nodes that are not there.
    """
    decision = _decide(found)
    if decision.latest is None and step is None:
        return None
    if step is None:
        save = decision.save
    else:
        save = next((each for each in reversed(decision.saves) if each.step == step), None)
    if save is None and (step is not None or decision.latest is None):
        raise Refused("missing", f"there is no checkpoint of step {step}{_loadable(decision)}")
    absent = _missing_owners(decision, save or decision.latest)
    if save is None or absent:
        what = (save or decision.latest).step  # type: ignore[union-attr]
        raise Refused(
            "incomplete",
            f"step {what} cannot be loaded: its bytes on {', '.join(absent) or 'other nodes'} are not "
            f"here{_loadable(decision)}. Bring back the nodes with these ids, which are in "
            f"trunkline-node.json,{_or_restore(found)} or load another step",
        )
    latest = decision.latest
    assert latest is not None
    if save == decision.save:
        counting = tuple(each.id for each in decision.saves)
        return LoadPlan(save, latest, places_of(found, save), counting, None)
    left = tuple(each.id for each in decision.saves if not save.continues(each))
    return LoadPlan(save, save, places_of(found, save), (), Run(start=save, latest=latest.id, left=left))


def places_of(found: Sequence[Inventory], save: Entry) -> dict[str, list[int]]:
    """Return the nodes that have a save, and which of `found` they are, or who is in their place."""
    places: dict[str, list[int]] = {}
    for index, each in enumerate(found):
        if save in each.prepared:
            places.setdefault(each.as_node(save), []).append(index)
    return dict(sorted(places.items()))


def _or_restore(found: Sequence[Inventory]) -> str:
    """Return what else to do where nodes that are there cannot read what they have."""
    damaged = [each.node for each in found if each.damaged]
    if not damaged:
        return ""
    return f" restore what is damaged on {', '.join(damaged)} (opening the directory there names the file),"


def _lacks_nodes(decision: Decision, save: Entry) -> bool:
    """Whether not all nodes of a save are there to show that it was prepared."""
    return bool(set(save.nodes) - set(decision.holders.get(save.id, ())))


def _missing_owners(decision: Decision, save: Entry | None) -> list[str]:
    """Return the nodes whose share of a save no node has that is there."""
    if save is None:
        return []
    return [share.owner for share in missing_shares(shares_of(save), decision.holders.get(save.id, ()))]


def latest_step(found: Sequence[Inventory]) -> int | None:
    """Return the latest step of these nodes, whether or not they can load it; None: there is none."""
    latest = _decide(found).latest
    return None if latest is None else latest.step


def loadable_saves(found: Sequence[Inventory]) -> list[Entry]:
    """Return the saves that these nodes can load, in their order; of each step the last one."""
    return _loadable_saves(_decide(found))


def _loadable_saves(decision: Decision) -> list[Entry]:
    last = {each.step: each for each in decision.saves if not _missing_owners(decision, each)}
    return sorted(last.values(), key=lambda each: each.number)


def _loadable(decision: Decision) -> str:
    steps = sorted(each.step for each in _loadable_saves(decision))
    return (
        f"; of these nodes, {', '.join(map(str, steps))} can be loaded"
        if steps
        else "; no step can be loaded"
    )


def plan_continuation(found: Sequence[Inventory], plan: LoadPlan) -> Entry:
    """Return the entry of a load. found: of all nodes, each with an id."""
    return Entry(
        secrets.token_hex(16),
        next_number(found),
        secrets.token_hex(8),
        next_history(found, plan.chosen),
        tuple(each.node for each in found),
        plan.save.step,
        base=plan.save.id,
    )


def steps_with_lost_copies(found: Sequence[Inventory]) -> list[tuple[list[int], str]]:
    """Return the steps that can be loaded and have fewer copies than they had, by the nodes without which."""
    decision = _decide(found)
    steps: dict[str, list[int]] = {}
    for save in _loadable_saves(decision):
        lost = lost_copies(save, decision.holders[save.id])
        if lost:
            steps.setdefault(", ".join(lost), []).append(save.step)
    return [(sorted(each), nodes) for nodes, each in steps.items()]


class Refill(NamedTuple):
    """A save of which a node is to be given what a lost one had. place: which of those that are there."""

    save: Entry
    lost: str
    place: int


def plan_refill(found: Sequence[Inventory], domains: Sequence[str]) -> list[Refill]:
    """Plan how nodes without a save are given what lost ones had of it, the latest save first.

    found: of all nodes, each with an id; domains: that of each. A node that has lost its share gets that
    again. Otherwise it is one that the save does not know, in another domain than the copies if there is one.
    """
    decision = _decide(found)
    planned: list[Refill] = []
    for save in reversed(_loadable_saves(decision)):
        free = [index for index, each in enumerate(found) if _has_room_for(each, save)]
        lost = lost_copies(save, decision.holders[save.id])
        again = {name: index for name in lost for index in free if found[index].node == name}
        new = [index for index in free if found[index].node not in save.nodes]
        names = [name for name in lost if name not in again]
        domains_of = {
            node: [domains[index] for index in places] for node, places in places_of(found, save).items()
        }
        domains_of |= {name: [domains[index]] for name, index in again.items()}
        chosen = min(
            islice(permutations(new, min(len(new), len(names))), _MOST_WAYS),
            key=lambda way: crowded_shares(
                save,
                {**domains_of, **{name: [domains[each]] for name, each in zip(names, way, strict=False)}},
            ),
        )
        everyone = [*again.items(), *zip(names, chosen, strict=False)]
        planned += [Refill(save, name, index) for name, index in sorted(everyone)]
    return planned


def crowded_shares(save: Entry, domains_of: Mapping[str, Sequence[str]]) -> int:
    """Return how many shares have two copies in one domain. domains_of: those of the nodes that have it."""
    crowded = 0
    for share in shares_of(save):
        there = [domains_of[node] for node in share.nodes if node in domains_of]
        crowded += len({domain for domains in there for domain in domains}) < len(there)
    return crowded


def _has_room_for(node: Inventory, save: Entry) -> bool:
    """Whether nothing else has the number of a save, which names its directory.

    What is damaged under that number is replaced if it is known to be of this save.
    """
    taken = {each.number for each in node.prepared if each.base is None}
    if save.id not in node.marked:
        taken |= {each for each, _ in node.damaged}
    return save.number not in taken


def plan_removal(found: Sequence[Inventory], step: int) -> list[str]:
    """Return the ids of the entries that go with a step. Raises Refused if there is none, and for the latest.

    All nodes agree on the latest by what they have, so while one of them has it, it must be on all of them.
    """
    decision = _decide(found)
    gone = {each.id for each in decision.saves if each.step == step}
    if not gone:
        raise Refused("missing", f"there is no checkpoint of step {step}{_loadable(decision)}")
    if decision.save is None or decision.save.id in gone:
        raise Refused(
            "latest",
            f"step {step} is the latest, which cannot be deleted with local=True; to go on from another "
            "step, load() that and save",
        )
    every = [each for inventory in found for each in inventory.prepared]
    return sorted(gone | {each.id for each in every if each.base in gone})


def saves_to_verify(found: Sequence[Inventory], step: int | None, every: bool) -> list[Entry]:
    """Return the saves of a step (None: the last that was saved), or all, in the order of their numbers.

    Of those that count: others are being saved, or failed. Raises Refused if no node has any of such a step.
    """
    committed = frozenset[str]().union(*(each.committed for each in found))
    prepared = [each for inventory in found for each in inventory.prepared if each.base is None]
    saves = {
        each.id: each
        for each in prepared
        if each.id in committed or sum(other.id == each.id for other in prepared) == len(each.nodes)
    }
    ordered = sorted(saves.values(), key=lambda each: (each.number, each.id))
    if every:
        return ordered
    chosen = [each for each in ordered if step in (None, each.step)][-1:]
    if not chosen and step is not None:
        steps = ", ".join(sorted({str(each.step) for each in ordered}, key=int))
        raise Refused(
            "missing", f"no node has a share of step {step}{f'; there are those of {steps}' if steps else ''}"
        )
    return chosen


def abandoned_steps(found: Sequence[Inventory]) -> list[tuple[int, str]]:
    """Return the steps, with their nodes, of saves that a run has left behind without knowing them."""
    decision = decide(each for each in found if each.node)
    return [
        (each.step, ", ".join(decision.holders[each.id])) for each in decision.abandoned if each.base is None
    ]
