"""The tiers of a Checkpointer with local=True, as one rank has them.

Rank 0 decides which saves are copied, and whose a tier is: it is this run's if the run goes on from the save
that the tier has got last, as the history of the run says (nodes/agreement.py). The first rank of each node
copies. All ranks load from a tier, which is an ordinary directory of checkpoints.
"""

import _thread
import errno
import os
from collections.abc import Sequence
from typing import Any

from trunkline._core import CheckpointStore, Engine
from trunkline._errors import Error, exception_of
from trunkline._logging import Log
from trunkline.checkpoint.directory.node_drain import (
    CopyFailure,
    CopyTask,
    NodeDrain,
    task_in_json,
    task_of,
)
from trunkline.checkpoint.directory.step_reader import StepReader
from trunkline.checkpoint.lock_wait import retry_while_locked
from trunkline.checkpoint.nodes.agreement import Entry, Inventory
from trunkline.checkpoint.nodes.copies import Reader, choose_readers, readers_of, shares_of
from trunkline.checkpoint.nodes.node_directory import NodeDirectory
from trunkline.checkpoint.nodes.record import entry_of, json_of, wrong_values_named
from trunkline.checkpoint.nodes.run import branches_of, goes_on_from, loadable_saves, places_of
from trunkline.checkpoint.tiers.drain import DrainStatus, raise_failures
from trunkline.checkpoint.tiers.hung import read_beside
from trunkline.checkpoint.tiers.listing import committed_in, id_of, last_number_in
from trunkline.checkpoint.tiers.origin import (
    NAME,
    identity_of,
    origins_and_saves_of,
    origins_of,
    write_origins,
)
from trunkline.checkpoint.tiers.plan import Commit
from trunkline.checkpoint.tiers.tier import Tier, about_missing_tier, missing_tier
from trunkline.checkpoint.tiers.tiers import named_steps

_log = Log("checkpoint")

_PREFIX = "nodes:"  # of the id of an origin: before the branch of a run


class NodeTiers:
    """The tiers, in their order."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        node: NodeDirectory | None,
        place: int,
        engine: Engine | None,
        fresh: bool,
    ) -> None:
        """Open the tiers, which need not exist.

        node, place: the directory of this rank's node, on its first rank, and which of the nodes it is.
        fresh: the first save sets aside what is there. Raises the errors of opening directories.
        """
        self._tiers = list(tiers)
        self._directories = [tier.directory for tier in tiers]
        self._stores = [CheckpointStore(tier.directory) for tier in tiers]
        self._engine = engine
        self.fresh = fresh
        self._first_number = 0  # of saves: above all in the tiers; 0: not known yet
        self._node = node
        self._is_recorded = self._is_checked = self._has_looked = False
        self._recording = _thread.allocate_lock()  # taken by the threads that save and copy alone
        self._drains: list[NodeDrain] = []
        if node is not None:
            self._drains = [
                NodeDrain(tier, store, node, place, engine)
                for tier, store in zip(self._tiers, self._stores, strict=True)
            ]
        for drain in self._drains:
            drain.connect(
                check_place=lambda drain=drain: self._check_mounted(drain),  # type: ignore[misc]
                check_run=lambda drain=drain: self._check_tasks(drain),  # type: ignore[misc]
                before_commit=lambda drain=drain: self._take(drain),  # type: ignore[misc]
            )

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._tiers)

    # On all ranks.

    def seen(self) -> list[str]:
        """Return the id of each tier as this node sees it; empty if it sees none there.

        Ctrl-C ends the wait for one that hangs.
        """
        if not self._directories:
            return []
        return read_beside(
            lambda: [id_of(each) for each in self._directories],
            lambda: f"one of the tiers {', '.join(self._directories)}",
        )

    def seen_first(self) -> dict[str, list[str]]:
        """Return what seen() returns, as "tiers", unless saves of this run have been copied."""
        return {} if self._has_looked else {"tiers": self.seen()}

    def reader(self, index: int) -> StepReader:
        """Return what reads the steps of a tier."""
        store = self._stores[index]
        return StepReader(lambda: store, store.directory, self._engine)

    def directory(self, index: int) -> str:
        """Return the directory of a tier."""
        return self._tiers[index].directory

    def assign(self, tasks: Sequence[Any]) -> None:
        """Let this node copy its parts of these saves, which rank 0 has planned."""
        if self._drains and tasks and not self._is_recorded:
            self._record()
            self._is_recorded = True
        self._has_looked = True
        found = list(map(task_of, tasks))
        for drain in self._drains:
            drain.assign(found)

    def forget(self, step: int) -> None:
        """Do not copy a step, which was deleted."""
        for drain in self._drains:
            drain.forget(step)

    def go_on(self) -> None:
        """Note that the run goes on from what was loaded: whose the tiers are has to be found out again."""
        self.fresh = self._is_checked = self._has_looked = False
        self._first_number = 0

    def status(self) -> list[DrainStatus]:
        """Return how far the copies of this node are; none on other ranks than its first."""
        return [drain.status() for drain in self._drains]

    def raise_failure(self, more: str = "") -> None:
        """Raise the error of a copy that this node could not make, once. more: what to do."""
        raise_failures(self._drains, more)

    def failures(self) -> list[list[CopyFailure]]:
        """Return, of each tier, what this node could not copy."""
        return [drain.failures() for drain in self._drains]

    def unraised(self) -> str | None:
        """Return the text of the first error that raise_failure() would raise; None: there is none."""
        return next(filter(None, (drain.unraised() for drain in self._drains)), None)

    def raise_again(self) -> None:
        """Let raise_failure() raise the errors of the same saves again."""
        for drain in self._drains:
            drain.raise_again()

    # On rank 0.

    def check_same(self, seen: Sequence[Sequence[str]], nodes: Sequence[str]) -> None:
        """Raise Error unless all nodes see the same directories. seen: by each node; nodes: their ids."""
        for index, directory in enumerate(self._directories):
            ids = [each[index] for each in seen]
            if not ids[0] and any(ids):  # this node may have made it since it looked
                ids[0] = id_of(directory)
            for node, found in zip(nodes, ids, strict=True):
                if found != ids[0] and found:
                    what = "another directory" if ids[0] else "nothing"
                    raise Error(
                        None,
                        f"the tier {directory} is not the same on all nodes: the node of rank 0 sees {what} "
                        f"where node {node or 'without an id'} sees a tier; is it mounted on the first?",
                        directory,
                    )

    def note_failures(self, theirs: Sequence[Sequence[Any]]) -> None:
        """Note what other nodes could not copy: failures() of each."""
        for failed in theirs:
            for drain, of_tier in zip(self._drains, failed, strict=False):
                for each in of_tier:
                    drain.note_failure(CopyFailure(*each))

    def what_is_copied(self) -> str:
        """Return what is being copied, and for whom it waits, in words."""
        return "; ".join(filter(None, (drain.what_is_copied() for drain in self._drains)))

    def have_ended(self) -> bool:
        """Whether nothing is being copied any more: all is copied, or what is left has failed."""
        return all(drain.wait(0) for drain in self._drains)

    def first_number(self) -> int:
        """Return the least number of a save: above those that the tiers had when the run began."""
        if self._first_number == 0:
            last = max((last_number_in(tier.directory) for tier in self._tiers), default=0)
            self._first_number = last + 1
        return self._first_number

    def saves_in_tiers(self) -> list[list[Entry]]:
        """Return the saves in each tier, in their order. Ctrl-C ends the wait for one that hangs."""
        reading = [""]

        def read() -> list[list[Entry]]:
            found = []
            for tier in self._tiers:
                reading[0] = f"the tier {tier.directory}"
                saves = self._saves_in(tier.directory)
                if not saves and self._is_missing(tier.directory):
                    _log.warn("%s", about_missing_tier(tier.directory))
                found.append(saves)
            return found

        return read_beside(read, lambda: reading[0]) if self._tiers else []

    def directory_with(self, step: int) -> str | None:
        """Return the first tier that has a step; None: there is none."""
        for directory, saves in zip(self._directories, self.saves_in_tiers(), strict=True):
            if any(each.step == step for each in saves):
                return directory
        return None

    def waiting(self, found: Sequence[Inventory]) -> list[Entry]:
        """Return the saves of a run that tiers are still to get. found: of all nodes."""
        saves = loadable_saves(found)
        if self._has_looked:
            pending = {each for drain in self._drains for each in drain.pending_saves()}
        else:  # an earlier process may have left something
            pending = {each.id for drain in self._drains for each in drain.waiting_of(saves)}
        return [each for each in saves if each.id in pending]

    def held(self, waiting: Sequence[Entry]) -> list[str]:
        """Return the ids of the saves, of those that wait, which retention must leave for any tier."""
        if not self._has_looked:
            return [each.id for each in waiting]
        held = {each for drain in self._drains for each in drain.held_saves()}
        return [each.id for each in waiting if each.id in held]

    def check(self, new: Entry) -> None:
        """Raise FileExistsError if a tier holds steps that the run of a new save does not go on from.

        With fresh=True, they are set aside. Does this once for a run: later saves must not depend on tiers.
        """
        if self._is_checked:
            return
        for tier, store in zip(self._tiers, self._stores, strict=True):
            if self.fresh and (committed_in(tier.directory) or origins_of(tier.directory)):
                _set_aside(store, new)
            self._check_run(tier.directory, new)
        self.fresh, self._is_checked = False, True

    # Whose a tier is.

    def _saves_in(self, directory: str) -> list[Entry]:
        there = committed_in(directory)
        if not there:
            return []
        # Read at once: the thread that copies may replace the file between two readings.
        origins, saves = origins_and_saves_of(directory)
        with wrong_values_named(f"{directory}/{NAME}"):
            recorded = [entry_of(each) for each in saves]
        # The last on record may not be there: it is put on record before it is committed.
        found = [each for each in recorded if Commit(each.step, each.number) in there]
        found.sort(key=lambda each: each.number)
        last = max(there, key=lambda each: each.number)
        is_of_nodes = found and Commit(found[-1].step, found[-1].number) == last
        if is_of_nodes and origins[-1:] == [f"{_PREFIX}{recorded[-1].branch}"]:
            return found
        return _saves_of_directory(directory, there)

    def _check_run(self, directory: str, save: Entry) -> None:
        found = self._saves_in(directory)
        if found and not goes_on_from(save, found[-1]):
            raise self._of_another_run(directory, [Commit(each.step, each.number) for each in found])
        if not found and self._is_claimed_by_another(directory, save):
            raise exception_of(
                "system",
                errno.EEXIST,
                f"another run has begun to copy to the tier {directory}; name another directory for the "
                f"tier. If that run is not to go on, remove {directory}",
                directory,
            )

    def _is_claimed_by_another(self, directory: str, save: Entry) -> bool:
        """Whether another run has begun to copy to a tier that has no step yet."""
        known = {f"{_PREFIX}{branch}" for branch in branches_of(save)}
        return any(each.startswith(_PREFIX) and each not in known for each in origins_of(directory)[-1:])

    def _check_mounted(self, drain: NodeDrain) -> None:
        """Raise Error if a tier that this node has seen does not exist any more."""
        directory = drain.tier.directory
        if identity_of(directory):
            self._record(directory)
        elif self._is_missing(directory):
            raise missing_tier(directory)

    def _is_missing(self, directory: str) -> bool:
        """Whether this node has seen a tier that does not exist any more."""
        is_known = self._node is not None and bool(self._recorded().get(directory))
        return is_known and not os.path.isdir(directory)  # noqa: PTH112

    def _recorded(self) -> dict[str, str]:
        """Return the tiers on this node's record, with what identity_of() each was; empty: not seen yet."""
        assert self._node is not None
        return dict(self._node.store.tiers())

    def _record(self, seen: str = "") -> None:
        """Put the tiers on this node's record. seen: one that this node has just seen."""
        assert self._node is not None
        if not os.path.isdir(self._node.store.directory):  # noqa: PTH112 - a node that has saved nothing yet
            return
        with self._recording:
            before = self._recorded()
            ids = {
                each: identity_of(each) if each == seen else before.get(each, "")
                for each in self._directories
            }
            if ids != before:
                self._node.store.record_tiers(list(ids.items()))

    def _check_tasks(self, drain: NodeDrain) -> None:
        """Raise FileExistsError, on the coordinator, if the run does not go on from the steps in a tier."""
        last = drain.last_task()
        if drain.is_coordinator and last is not None:
            self._check_run(drain.tier.directory, last.save)

    def _take(self, drain: NodeDrain) -> None:
        """Make the tier this run's, before a copy is committed. The caller has locked the tier."""
        directory = drain.tier.directory
        save = drain.copied_save()
        self._check_run(directory, save)
        before = self._saves_in(directory)
        own = f"{_PREFIX}{save.branch}"
        origins = [each for each in origins_of(directory) if each != own] if before else []
        write_origins(directory, [*origins, own], [*map(json_of, before), json_of(save)])
        self._record(directory)

    def _of_another_run(self, directory: str, steps: Sequence[Commit]) -> Exception:
        named = named_steps(sorted(each.step for each in steps))
        return exception_of(
            "system",
            errno.EEXIST,
            f"the tier {directory} holds {named} of another run; "
            "name another directory for the tier, pass fresh=True, which moves them into a separate folder "
            "and deletes nothing, or call load() first, if this run is to go on from them. "
            f"Checkpointer({directory!r}) loads them, too",
            directory,
        )


def _set_aside(store: CheckpointStore, new: Entry) -> None:
    """Move what is in a tier into a folder, and make the tier that of the run of a new save."""
    store.start_over(True)
    save = retry_while_locked(lambda: store.begin(0, [0] * max(1, len(store.volumes))))  # moves it
    try:
        write_origins(store.directory, [f"{_PREFIX}{new.branch}"], [])
    finally:
        save.abandon()


def _saves_of_directory(directory: str, steps: Sequence[Commit]) -> list[Entry]:
    """Return steps that no nodes have saved as saves of one run, which nodes can go on from.

    Its branch is the id of the directory.
    """
    branch = f"directory {id_of(directory)}"
    ordered = sorted(steps, key=lambda each: each.number)
    return [Entry(f"{branch} {each.number}", each.number, branch, (), (), each.step) for each in ordered]


def plan_tasks(found: Sequence[Inventory], saves: Sequence[Entry], new: Entry | None) -> list[Any]:
    """Return, as JSON, which node copies what of these saves, and of a new one that all nodes make.

    found: of all nodes, in the order of their places, which is also that of the nodes of the new save. A save
    of which the first of them, that of rank 0, has nothing is left out: it has no description of the whole to
    commit.
    """
    tasks = []
    for save in saves:
        places = places_of(found, save)
        if any(0 in each for each in places.values()):
            able = [readers_of(share, places) for share in shares_of(save)]
            tasks.append(CopyTask(save, tuple(choose_readers(able))))
    if new is not None:
        tasks.append(CopyTask(new, tuple(Reader(node, place) for place, node in enumerate(new.nodes))))
    return list(map(task_in_json, tasks))
