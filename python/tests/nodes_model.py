"""All that can happen to nodes that save by the protocol of trunkline.checkpoint.nodes.agreement.

    nodes_model.py --nodes 3 --copies 2 --saves 2 --restarts 2

A state has the disks of all nodes, which processes run on them, and which messages coordinators have sent. A
transition is one durable write of one node, one message of a coordinator, or a restart. A node that dies is
one that does nothing more until it is restarted, and since every node may be restarted in every state, alone
or with others, no crash needs a transition: whatever is on the disks after one is there in some state. A
message that has been sent may arrive at any later time, so processes of an earlier run on nodes that were not
restarted can act on it for ever. A node is restarted with its disk, or with an empty one.

explore() visits all states within some bounds, and raises Violation where the protocol breaks its promise:

- A load returns what the last successful save or load returned, or what continues from it. Never does it go
  back behind what a node that is there knows to be committed; where too few nodes are there, it fails.
- It finds all bytes, as long as fewer nodes than copies are absent.
- It is not in doubt which run is the latest, as long as each run has had a node in common with each before.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from trunkline.checkpoint.nodes.agreement import (
    Conflict,
    Decision,
    Diverged,
    Entry,
    History,
    Inventory,
    decide,
    next_history,
    next_number,
)
from trunkline.checkpoint.nodes.copies import missing_shares, place_copies, shares_of

Ids = frozenset[int]  # of entries, which states name by their place in a table: states are compared often


class Violation(Exception):
    """The protocol broke its promise."""


class Disk(NamedTuple):
    """What one node has durably. shares: the saves whose bytes it has."""

    node: str
    prepared: Ids = frozenset()
    committed: Ids = frozenset()
    shares: Ids = frozenset()


class Run(NamedTuple):
    """A run of some nodes, and the entry that they are committing (None: none).

    alive: the nodes on which its processes still are. step: of the training. sent: the last message of the
    coordinator. failed: entries that could not count when this one was begun, and
    undecided ones that it supersedes. counting: saves that it continues from, which are marked with it.
    """

    branch: str
    history: History
    nodes: tuple[int, ...]
    alive: frozenset[int]
    number: int
    step: int
    entry: int | None = None
    sent: str = ""
    failed: Ids = frozenset()
    counting: Ids = frozenset()


class State(NamedTuple):
    """returned: by the last successful save or load. ran: the nodes of each run that has begun an entry."""

    disks: tuple[Disk, ...]
    runs: tuple[Run, ...] = ()
    returned: int | None = None
    ran: frozenset[tuple[str, ...]] = frozenset()
    saves: int = 0
    restarts: int = 0
    losses: int = 0

    def with_run(self, index: int, run: Run) -> "State":
        return self._replace(runs=(*self.runs[:index], run, *self.runs[index + 1 :]))

    def with_disk(self, node: int, disk: Disk) -> "State":
        return self._replace(disks=(*self.disks[:node], disk, *self.disks[node + 1 :]))


@dataclass(frozen=True)
class Protocol:
    """The protocol. Tests break it by changing a function, or a rule; those count nodes: done, and all."""

    decide: Callable[[list[Inventory]], Decision] = decide
    next_history: Callable[[list[Inventory], Entry | None], History] = next_history
    may_send_manifest: Callable[[int, int], bool] = int.__eq__
    may_send_commit: Callable[[int, int], bool] = int.__eq__
    may_succeed: Callable[[int, int], bool] = int.__eq__
    removes_after: str = "done"
    load_is_an_entry: bool = True


@dataclass(frozen=True)
class Bounds:
    """How many nodes there are, and how often what happens."""

    nodes: int
    copies: int
    saves: int
    restarts: int
    losses: int = 0


def explore(bounds: Bounds, protocol: Protocol | None = None) -> int:
    """Visit all states, and return how many there are."""
    model = _Model(bounds, protocol or Protocol())
    first = State(tuple(Disk(f"node {index}") for index in range(bounds.nodes)))
    seen = {first}
    pending = [first]
    while pending:
        for after in model.transitions(pending.pop()):
            if after not in seen:
                seen.add(after)
                pending.append(after)
    return len(seen)


class _Model:
    def __init__(self, bounds: Bounds, protocol: Protocol) -> None:
        self._bounds, self._protocol = bounds, protocol
        self._entries: list[Entry] = []
        self._places: dict[Entry, int] = {}
        self._decisions: dict[tuple[Disk, ...], tuple[list[Inventory], Decision | Exception]] = {}

    def transitions(self, state: State) -> Iterator[State]:
        for index, run in enumerate(state.runs):
            if run.entry is not None:
                yield from self._writes(state, run, run.entry)
                if run.nodes[0] in run.alive:
                    yield from self._messages(state, index, run, run.entry)
            elif run.alive == set(run.nodes) and state.saves < self._bounds.saves:
                yield self._begin_save(state, index, run)
        if state.restarts <= self._bounds.restarts:  # the first start is not one
            for nodes in _subsets(self._bounds.nodes, 1, self._bounds.nodes):
                for lost in _subsets(self._bounds.nodes, 0, self._bounds.losses - state.losses):
                    yield from self._restart(state, nodes, lost)

    def _place(self, entry: Entry) -> int:
        if entry not in self._places:
            self._places[entry] = len(self._entries)
            self._entries.append(entry)
        return self._places[entry]

    def _is_save(self, entry: int) -> bool:
        return self._entries[entry].base is None

    # A run -----------------------------------------------------------------------------------------------

    def _begin_save(self, state: State, index: int, run: Run) -> State:
        number = state.saves + 1
        nodes = tuple(state.disks[node].node for node in run.nodes)
        name = f"save {number} of {run.branch} {run.history} on {nodes}"  # differs from all in other states
        kept_by = place_copies(nodes, self._bounds.copies)
        entry = Entry(name, run.number, run.branch, run.history, nodes, run.step + 1, kept_by=kept_by)
        decision = self._decision(tuple(state.disks[node] for node in run.nodes))[1]
        if isinstance(decision, Exception):
            raise Violation(f"{decision!r}\n{state}") from decision
        undecided = [each for each in decision.undecided if entry.supersedes(each)]
        failed = frozenset(self._places[each] for each in (*decision.failed, *undecided))
        counting = frozenset(self._places[each] for each in decision.saves if entry.continues(each))
        begun = run._replace(
            step=entry.step, entry=self._place(entry), sent="begin", failed=failed, counting=counting
        )
        after = state.with_run(index, begun)
        return after._replace(saves=number, ran=state.ran | {nodes})

    def _messages(self, state: State, index: int, run: Run, entry: int) -> Iterator[State]:
        """What the coordinator sends, which knows of writes that are done."""
        disks = [state.disks[node] for node in run.nodes]
        count, protocol = len(disks), self._protocol
        written = sum(entry in disk.shares for disk in disks)
        prepared = sum(entry in disk.prepared for disk in disks)
        committed = sum(entry in disk.committed for disk in disks)
        if run.sent == "begin" and protocol.may_send_manifest(written, count):
            yield state.with_run(index, run._replace(sent="manifest"))
        if run.sent == "manifest" and protocol.may_send_commit(prepared, count):
            yield state.with_run(index, run._replace(sent="commit"))
        if run.sent == "commit" and protocol.may_succeed(committed, count):
            yield state.with_run(index, run._replace(sent="done"))._replace(returned=entry)
        if run.sent == "done" and run.alive == set(run.nodes):
            yield state.with_run(
                index,
                run._replace(
                    entry=None, sent="", number=run.number + 1, failed=frozenset(), counting=frozenset()
                ),
            )

    def _writes(self, state: State, run: Run, entry: int) -> Iterator[State]:
        """What the nodes write, each as far as it has messages."""
        for node in run.alive:
            disk = state.disks[node]
            if run.sent == "begin":
                if entry not in disk.shares:
                    yield state.with_disk(node, disk._replace(shares=disk.shares | {entry}))
                continue
            if entry not in disk.prepared:
                yield state.with_disk(node, disk._replace(prepared=disk.prepared | {entry}))
                continue
            if run.sent != "manifest" and entry not in disk.committed:
                marked = disk.committed | {entry} | (run.counting & disk.prepared)
                yield state.with_disk(node, disk._replace(committed=marked))
            if self._is_save(entry) and self._protocol.removes_after in ("prepared", run.sent):
                after = self._without_older(disk, entry, run.failed)
                if after != disk:
                    yield state.with_disk(node, after)

    def _without_older(self, disk: Disk, entry: int, failed: Ids) -> Disk:
        """Keep one of the lineage, no loads, and nothing that failed."""
        this = self._entries[entry]
        older = failed | {
            each
            for each in disk.prepared
            if each != entry and (this.continues(self._entries[each]) or not self._is_save(each))
        }
        return Disk(disk.node, *(kept - older for kept in disk[1:]))

    # A restart -------------------------------------------------------------------------------------------

    def _restart(self, state: State, nodes: tuple[int, ...], lost: tuple[int, ...]) -> Iterator[State]:
        number = state.restarts + 1
        disks = list(state.disks)
        for node in lost:
            disks[node] = Disk(f"node {node} after {number}")
        here = tuple(disks[node] for node in nodes)
        if not self._is_promised(state, {disk.node for disk in here}):
            self._check_beyond_promise(state, here)
            return
        run = self._new_run(state, number, nodes, here)
        if run is None:
            return
        gone = {*nodes, *lost}
        left = [each._replace(alive=each.alive - gone) for each in state.runs]
        after = state._replace(
            disks=tuple(disks),
            runs=(*(each for each in left if each.alive and each.entry is not None), run),
            restarts=number,
            losses=state.losses + len(lost),
        )
        if run.entry is not None:
            entry = self._entries[run.entry]
            after = after._replace(ran=state.ran | {entry.nodes})
            if not self._protocol.load_is_an_entry:
                returned = next(place for place, each in enumerate(self._entries) if each.id == entry.base)
                runs = (*after.runs[:-1], run._replace(entry=None, sent=""))
                after = after._replace(runs=runs, returned=returned)
        yield after

    def _is_promised(self, state: State, here: set[str]) -> bool:
        """Whether these nodes are enough for a load that returns what was returned last.

        Two jobs that are started apart, on different nodes, do not know of each other.
        """
        if not all(here & set(nodes) for nodes in state.ran):
            return False
        if state.returned is None:
            return True
        entry = self._entries[state.returned]
        return self._is_complete(self._save_of(entry), here) and bool(set(entry.nodes) & here)

    def _is_complete(self, save: Entry, here: set[str]) -> bool:
        return len(set(save.nodes) - here) < min(self._bounds.copies, len(save.nodes))

    def _save_of(self, entry: Entry) -> Entry:
        return entry if entry.base is None else next(each for each in self._entries if each.id == entry.base)

    def _decision(self, here: tuple[Disk, ...]) -> tuple[list[Inventory], Decision | Exception]:
        if here not in self._decisions:
            found = [
                Inventory(
                    disk.node,
                    tuple(self._entries[each] for each in sorted(disk.prepared)),
                    frozenset(self._entries[each].id for each in disk.committed),
                )
                for disk in here
            ]
            try:
                self._decisions[here] = found, self._protocol.decide(found)
            except (Diverged, Conflict) as error:
                self._decisions[here] = found, error
        return self._decisions[here]

    def _check_beyond_promise(self, state: State, here: tuple[Disk, ...]) -> None:
        decision = self._decision(here)[1]
        if state.returned is None or isinstance(decision, Exception):
            return
        if any(state.returned in disk.committed for disk in here):
            self._check_goes_on(state, decision.latest)

    def _check_goes_on(self, state: State, latest: Entry | None) -> None:
        returned = None if state.returned is None else self._entries[state.returned]
        if returned is not None and (latest is None or not latest.continues(returned)):
            raise Violation(f"a load goes back behind {returned}: it finds {latest}\n{state}")

    def _new_run(
        self, state: State, number: int, nodes: tuple[int, ...], here: tuple[Disk, ...]
    ) -> Run | None:
        """Return a run that has begun to load, or that begins without a checkpoint; None: the load fails."""
        found, decision = self._decision(here)
        if isinstance(decision, Exception):
            raise Violation(f"{decision!r}\n{state}") from decision
        latest, save = decision.latest, decision.save
        self._check_goes_on(state, latest)
        ids = tuple(disk.node for disk in here)
        branch, history = f"branch {number}", self._protocol.next_history(found, latest)
        step = 0 if latest is None else latest.step
        run = Run(branch, history, nodes, frozenset(nodes), next_number(found), step)
        if latest is None:
            return run
        if save is None or self._is_missing(save, here):
            if self._is_complete(self._save_of(latest), set(ids)):
                raise Violation(f"the bytes of {latest} are lost\n{state}")
            return None
        name = f"load {number} of {save.id} {history} on {ids}"
        entry = Entry(name, run.number, branch, history, ids, save.step, base=save.id)
        counting = frozenset(self._places[each] for each in decision.saves)
        return run._replace(entry=self._place(entry), sent="manifest", counting=counting)

    def _is_missing(self, save: Entry, here: Sequence[Disk]) -> bool:
        place = self._places[save]
        have = {disk.node for disk in here if place in disk.prepared and place in disk.shares}
        return bool(missing_shares(shares_of(save), have))


def _subsets(count: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    for size in range(least, most + 1):
        yield from combinations(range(count), size)


def main() -> None:
    """Explore as far as the command line says."""
    parser = argparse.ArgumentParser()
    for name in Bounds.__dataclass_fields__:
        parser.add_argument(f"--{name}", type=int, default=0, required=name != "losses")
    bounds = Bounds(**vars(parser.parse_args()))
    print(f"{bounds}: {explore(bounds)} states, and none breaks the promise")


if __name__ == "__main__":
    main()
