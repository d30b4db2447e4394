"""How nodes with disks of their own agree on which save is the latest, whatever dies at whatever moment.

Each node is named by a random id that lies on its disk: a disk that is replaced makes another node. What a
node knows are *entries* in a directory that it alone sees. An entry is a save, or the continuation of one: a
load() after which a run may go on. The entries of one run are its *branch*, a random id; they are numbered,
each above all numbers that its nodes had seen. An entry also has a *history*: for each other branch that
the nodes knew when the run began, the number of the last entry there that the run continues from, 0 if none.

A save, of which rank 0 is the coordinator:

  1. The coordinator chooses the entry: a random id, the branch and history of the run, the next number, and
     its nodes, which are all nodes of the run.
  2. Every node writes its share of the bytes, and the copies that it keeps of others, durably; it reports
     what it has written.
  3. When all have reported, the coordinator makes the manifest, which says which shares there are, their
     checksums and the nodes that hold them, and sends it to all. Nobody has it before all shares are durable.
  4. Every node writes the entry with the manifest durably, and reports: the entry is *prepared* there.
  5. When it is prepared on all of its nodes, the coordinator tells them so.
  6. Every node durably marks the entry as *committed*, and reports. With it, it marks the saves of the
     lineage, below, that count and that it has: so they still count when nodes are lost that have them.
  7. When it is committed on all of its nodes, the coordinator tells them, and the save has succeeded: no
     handle.wait() returns before. Until then it has failed or not; a load finds out.
  8. Only now each node may remove earlier entries of the lineage, below, and those of which nobody was told
     that they count: that no node can have committed, and that only nodes can which are not there, if the run
     has superseded them. Others are never removed.

A load:

  1. The nodes that are there lock their directories and send their entries to the coordinator. Saves of an
     earlier run that still wait for one of them cannot go on.
  2. The coordinator finds the latest entry, by decide(), which depends on nothing but the entries that were
     sent. An entry *counts* if it is committed on any of these nodes, or prepared on all nodes that it names.
     So an entry that some node has committed counts; and one that nobody can have committed does not, since
     the node that did not prepare it is here, and never will.
  3. Of those that count, an entry *supersedes* others of which its run knew: all entries of the branches in
     its history, whether it continues from them or not, and earlier entries of its own branch. The latest
     is the one that is not superseded. Its *lineage* are those that it continues from. Others were abandoned
     while the nodes that had committed them were away: they are left as they are, neither used nor removed.
     If there are several latest entries, runs went on apart that did not know of each other, each with its
     nodes: this is an error, since only users know which one they want.
  4. A load of the latest save is an entry of a new branch, the continuation of the save, on all nodes that
     are there. It is prepared and committed on them like a save without bytes, steps 3 to 7, before any
     load() returns. So no later load, by whichever of these nodes, goes back behind it, nor does it return to
     what this one superseded. A load of an earlier save, which the user has named, is none: the first save
     after it has the history of a run that continues from that.
  5. The bytes are read where they are. If some are nowhere, this is an error: no other save is used instead.

The functions are pure. python/tests/test_nodes_agreement.py runs this protocol with two and three nodes in
all orders of messages and durable writes, with restarts of any of the nodes at every moment and lost disks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

History = tuple[tuple[str, int], ...]  # branches, sorted, and the last number that is continued from
Metrics = tuple[tuple[str, float | str], ...]  # by name, as manifests have them: "NaN", and "Infinity"


@dataclass(frozen=True)
class Entry:
    """A save, or the continuation of one.

    kept_by: of the share of each node, which nodes keep it (indexes of `nodes`); empty: each node its own.
    metrics: what was measured of the state.
    """

    id: str
    number: int
    branch: str
    history: History
    nodes: tuple[str, ...]
    step: int
    digest: str = ""  # of the manifest of the save
    base: str | None = None  # of a continuation: the id of the save
    kept_by: tuple[tuple[int, ...], ...] = ()
    metrics: Metrics = ()

    def continues(self, other: "Entry") -> bool:
        """Whether `other` is in the lineage of this entry. Every entry is in its own."""
        if other.branch == self.branch:
            return other.number <= self.number
        return other.number <= dict(self.history).get(other.branch, 0)

    def supersedes(self, other: "Entry") -> bool:
        """Whether the run of this entry knew of that of `other`, and went on from it or from another."""
        if other.branch == self.branch:
            return other.number < self.number
        return any(branch == other.branch for branch, _ in self.history)


@dataclass(frozen=True)
class Inventory:
    """The entries that a node has.

    committed: the ids of those that are. damaged: the numbers of those that it cannot read, and why.
    marked: the ids that it has marked as committed, also of those that it cannot read. in_place_of: of ids of
    saves, the lost node whose share and copies it has been given.
    """

    node: str
    prepared: tuple[Entry, ...] = ()
    committed: frozenset[str] = frozenset()
    damaged: tuple[tuple[int, str], ...] = ()
    marked: frozenset[str] = frozenset()
    in_place_of: tuple[tuple[str, str], ...] = ()

    def as_node(self, entry: Entry) -> str:
        """Return the id of the node as which it has an entry: its own, or that of one that was lost."""
        return dict(self.in_place_of).get(entry.id, self.node)


class Conflict(Exception):
    """Inventories that this protocol does not produce; the text says what is wrong with them."""


class Diverged(Exception):
    """Several latest entries: runs that did not know of each other."""

    def __init__(self, latest: Sequence[Entry], holders: Mapping[str, tuple[str, ...]]) -> None:
        """holders: the nodes that have each entry, by its id."""
        super().__init__("; ".join(f"step {each.step} on {', '.join(holders[each.id])}" for each in latest))
        self.latest = tuple(latest)
        self.holders = holders


@dataclass(frozen=True)
class Decision:
    """What the inventories of some nodes say.

    latest: the latest entry; None: there is none. save: the save that it is, or continues; its entry is
    needed to load it, and None if no node has that. saves: those of the lineage, in their order. abandoned:
    entries that count and are not in the lineage. failed: entries that no node can have committed.
    undecided: entries that only nodes which are not there can have committed. holders: by the id of an entry,
    the nodes that have it, or those in whose place others have it.
    """

    latest: Entry | None = None
    save: Entry | None = None
    saves: tuple[Entry, ...] = ()
    abandoned: tuple[Entry, ...] = ()
    failed: tuple[Entry, ...] = ()
    undecided: tuple[Entry, ...] = ()
    holders: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))


def decide(inventories: Iterable[Inventory]) -> Decision:
    """Find the latest entry of these nodes, the same in whatever order they are given.

    Raises Diverged if there are several, and Conflict for inventories that contradict each other.
    """
    found = sorted(inventories, key=lambda each: each.node)
    here = {each.node for each in found}
    entries, holders = _merge(found)
    committed = frozenset[str]().union(*(each.committed for each in found))
    counting = [each for each in entries if each.id in committed or set(each.nodes) == set(holders[each.id])]
    latest = [each for each in counting if not any(other.supersedes(each) for other in counting)]
    if len(latest) > 1:
        raise Diverged(latest, holders)
    if counting and not latest:
        raise Conflict("entries supersede each other")
    last = latest[0] if latest else None
    lineage = [] if last is None else [each for each in counting if last.continues(each)]
    # What was continued from counts, also if not all of its nodes are here to show that it was prepared.
    bases = {each.base for each in lineage}
    saves = [each for each in entries if each.base is None and (each in lineage or each.id in bases)]
    others = [each for each in entries if each not in counting and each not in saves]
    failed = tuple(each for each in others if set(each.nodes) & here - set(holders[each.id]))
    return Decision(
        latest=last,
        save=None
        if last is None
        else next((each for each in saves if each.id == (last.base or last.id)), None),
        saves=tuple(saves),
        abandoned=tuple(each for each in counting if each not in lineage and each not in saves),
        failed=failed,
        undecided=tuple(each for each in others if each not in failed),
        holders=holders,
    )


def _merge(inventories: Sequence[Inventory]) -> tuple[list[Entry], dict[str, tuple[str, ...]]]:
    """Return the different entries in the order of their numbers, and which nodes have each."""
    nodes = [each.node for each in inventories]
    if len(set(nodes)) < len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise Conflict(f"two nodes have the id {twice}: the directory of one is a copy of that of the other")
    entries: dict[str, Entry] = {}
    holders: dict[str, tuple[str, ...]] = {}
    for inventory in inventories:
        ids = {each.id for each in inventory.prepared}
        if not inventory.committed <= ids:
            raise Conflict(f"node {inventory.node} has marked entries as committed that it does not have")
        for entry in inventory.prepared:
            if entries.setdefault(entry.id, entry) != entry:
                raise Conflict(f"nodes have different entries of step {entry.step} with the id {entry.id}")
            known = holders.get(entry.id, ())
            if inventory.as_node(entry) not in known:
                holders[entry.id] = (*known, inventory.as_node(entry))
    return sorted(entries.values(), key=lambda each: (each.number, each.id)), holders


def next_number(inventories: Iterable[Inventory]) -> int:
    """Return the number of the next entry: above all that these nodes have."""
    found = list(inventories)
    known = [entry.number for each in found for entry in each.prepared]
    return 1 + max([*known, *(number for each in found for number, _ in each.damaged)], default=0)


def needed_damaged(inventories: Iterable[Inventory]) -> tuple[str, str] | None:
    """Return a node with why it cannot read an entry that may be the latest; None: there is none.

    An entry has a higher number than all that its nodes had seen, and supersedes them. So what a node cannot
    read is not needed if an entry with a higher number that names the node is committed on any node. If one
    with the same number is, it is the entry itself: before that was committed it was prepared on this node.
    Nor is it needed if another node has what this one has marked under that number: as a node has that is in
    the place of a lost one.
    """
    found = list(inventories)
    entries = [entry for each in found for entry in each.prepared]
    committed = [entry for each in found for entry in each.prepared if entry.id in each.committed]
    for each in found:
        last = max((entry.number for entry in committed if each.node in entry.nodes), default=0)
        known = {entry.number for entry in entries if entry.id in each.marked}
        for number, why in each.damaged:
            if number > last and number not in known:
                return each.node, why
    return None


def next_history(inventories: Iterable[Inventory], chosen: Entry | None, also: Iterable[str] = ()) -> History:
    """Return the history of a run of these nodes that continues from `chosen`; None: from nothing.

    All branches that they know are in it, and those of `also`, so that the run supersedes their entries.
    """
    known: dict[str, int] = dict.fromkeys(also, 0)
    for each in inventories:
        for entry in each.prepared:
            known.update(dict.fromkeys([entry.branch, *(name for name, _ in entry.history)], 0))
    if chosen is not None:
        known.update(chosen.history)
        known[chosen.branch] = chosen.number
    return tuple(sorted(known.items()))
