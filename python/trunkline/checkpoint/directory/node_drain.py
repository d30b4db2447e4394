"""Copies the shares of nodes to one tier in the background, where they become an ordinary checkpoint.

A save whose bytes are on the disks of several nodes is copied by all of them:

1. The node of rank 0, which coordinates, makes the tier and a folder for the save there
   (tiers/staged_shares.py). It copies one save after the other, in the order of their numbers.
2. Every node waits for that folder, and copies the shares that it was told to: verified as they are read,
   made durable, read back, put on record.
3. Once all shares are on record, the coordinator locks the tier, moves the shards into the directory of the
   step, and commits a manifest of all of them, with the number of the save.

Nodes tell each other nothing but what is in the tier. Only rank 0 makes anything outside of the folder of a
save: on a node where the tier is not mounted, none appears, and nothing is written to the disk below.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from trunkline._core import CheckpointManifest, CheckpointSave, CheckpointStore, Engine
from trunkline._errors import Cancelled, Corrupt, Error, Format, Unsupported, system_errors
from trunkline._formats.checkpoint_names import step_name
from trunkline._logging import Log
from trunkline._tensor_io.flag import Flag
from trunkline._waits import Wait
from trunkline.checkpoint.directory import shards as shard_files
from trunkline.checkpoint.lock_wait import retry_while_locked
from trunkline.checkpoint.nodes.agreement import Entry
from trunkline.checkpoint.nodes.copies import Reader
from trunkline.checkpoint.nodes.node_directory import NodeDirectory, share_of
from trunkline.checkpoint.nodes.record import entry_of, json_of
from trunkline.checkpoint.save import saves_into
from trunkline.checkpoint.tiers.copying import make_private, remove_old_copies
from trunkline.checkpoint.tiers.drain import Drain, NotNeededError
from trunkline.checkpoint.tiers.listing import committed_in, last_number_in
from trunkline.checkpoint.tiers.plan import Commit, is_due, steps_to_copy
from trunkline.checkpoint.tiers.shard_copier import DamagedOriginalError, Shard, ShardCopier
from trunkline.checkpoint.tiers.staged_shares import StagedShare, StagedShares
from trunkline.checkpoint.tiers.tier import Tier

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_WARN_SECONDS = 60.0  # of waiting for other nodes
_log = Log("checkpoint")


class CopyTask(NamedTuple):
    """A save to copy, and which node copies which share: readers[3] that of node 3 of the save."""

    save: Entry
    readers: tuple[Reader, ...]

    @property
    def commit(self) -> Commit:
        """The save as steps of directories are listed."""
        return Commit(self.save.step, self.save.number)

    def owners_for(self, place: int) -> list[int]:
        """Return the nodes of the save whose shares the node with this place copies."""
        return [owner for owner, reader in enumerate(self.readers) if reader.place == place]

    def places(self) -> set[int]:
        """Return the nodes that copy something."""
        return {each.place for each in self.readers}


class CopyFailure(NamedTuple):
    """What a node could not copy: the id of the save, empty if it is nothing in particular, and why.

    is_lasting: what the node has is damaged, so that it will never be copied.
    """

    save: str
    why: str
    is_lasting: bool

    def error(self) -> Exception:
        """Make the error with which the coordinator gives the copy up."""
        text = f"another node cannot copy its part: {self.why}"
        error = Corrupt(None, text) if self.is_lasting else Error(None, text)
        error.is_of_another_node = True  # type: ignore[attr-defined]
        return DamagedOriginalError(error) if isinstance(error, Corrupt) else error


def task_in_json(task: CopyTask) -> Any:
    """Return a task as it is sent."""
    return [json_of(task.save), [list(each) for each in task.readers]]


def task_of(about: Any) -> CopyTask:
    """Return a task that was sent."""
    save, readers = about
    return CopyTask(entry_of(save), tuple(Reader(node, place) for node, place in readers))


class NodeDrain(Drain):
    """Copies what one node is to copy to one tier; on the node of rank 0, it also commits the copies."""

    def __init__(
        self, tier: Tier, store: CheckpointStore, node: NodeDirectory, place: int, engine: Engine | None
    ) -> None:
        """`store`: of the tier; place: which of the nodes this one is; 0 is that of rank 0."""
        super().__init__(tier, store, node.store, engine)
        self._directories = node.directory, tier.directory
        self.node = node
        self.place = place
        self._tasks: tuple[CopyTask, ...] = ()
        self._failures: dict[str, CopyFailure] = {}  # of this node, by the ids of saves
        self._done: set[Commit] = set()  # what the tier has, or will not get, as was found out last
        self._failed_elsewhere: dict[str, CopyFailure] = {}  # of other nodes, likewise

    @property
    def is_coordinator(self) -> bool:
        """Whether this node commits the copies."""
        return self.place == 0

    def assign(self, tasks: Sequence[CopyTask]) -> None:
        """Copy these saves, and none that were to be copied before."""
        self._failures = {save: each for save, each in self._failures.items() if each.is_lasting}
        self._tasks = tuple(each for each in tasks if is_due(each.save.step, self.tier.every))
        self.request()

    def last_task(self) -> CopyTask | None:
        """Return the task with the newest save."""
        return self._tasks[-1] if self._tasks else None

    def copied_save(self) -> Entry:
        """Return the save that is being copied."""
        assert self._copying is not None
        copy = self._copying[1]
        assert isinstance(copy, ShareCopy)
        return copy.save

    def has_assigned(self, save: str) -> bool:
        """Whether the save with this id is still to be copied, and no other Checkpointer has taken over."""
        return not self.node.is_replaced and any(each.save.id == save for each in self._tasks)

    def held_saves(self) -> set[str]:
        """Return the ids of the saves that retention must leave for this tier."""
        return {each.save.id for each in self._tasks if each.commit not in self._settled}

    def pending_saves(self) -> set[str]:
        """Return the ids of the saves that are still to be copied, also those that could not be copied."""
        return {each.save.id for each in self._tasks if each.commit not in self._done}

    def waiting_of(self, saves: Sequence[Entry]) -> list[Entry]:
        """Return those of the saves of a run that the tier, as it is now, is still to get."""
        by_commit = {Commit(each.step, each.number): each for each in saves}
        return [by_commit[each] for each in self._queue_of(list(by_commit))]

    def left(self) -> list[int]:
        """Return, on the coordinator, the steps that are still to be copied, as far as is known."""
        pending = self.pending_saves() if self.is_coordinator else set()
        return sorted(each.save.step for each in self._tasks if each.save.id in pending)

    def take_error_at_exit(self) -> BaseException | None:
        """Return the error of a copy that has failed on this node.

        None if another Checkpointer has gone on, or if it says again that the tier is another run's.
        """
        is_known = self._news is not None and isinstance(self._news[1], FileExistsError)
        if self.node.is_replaced or (is_known and self._is_known_as_others):
            return None
        return self.take_error()

    def unraised(self) -> str | None:
        """Return the text of an error that was not raised yet; None: there is none."""
        news = self._news
        return None if news is None else str(news[1])

    def failures(self) -> list[CopyFailure]:
        """Return what this node could not copy since assign(), and what it never can."""
        return list(self._failures.values())

    def note_failure(self, failure: CopyFailure) -> None:
        """Note, on the coordinator, that another node cannot copy its part of a save."""
        self._failed_elsewhere = {**self._failed_elsewhere, failure.save: failure}

    def begin_again(self, save: str) -> None:
        """Forget, on the coordinator, that a save could not be copied earlier, unless it never can."""
        failed = self._failed_elsewhere.get(save)
        if failed is not None and not failed.is_lasting:
            self.take_failure(save)

    def take_failure(self, save: str) -> CopyFailure | None:
        """Return why another node cannot copy its part of a save, once; None: it can, as far as is known."""
        found = self._failed_elsewhere.get(save)
        self._failed_elsewhere = {name: each for name, each in self._failed_elsewhere.items() if name != save}
        return found

    def what_is_copied(self) -> str:
        """Return what is being copied, and for whom it waits, as the end of a message; empty: nothing."""
        copying = self._copying
        if copying is None:
            return ""
        waits = copying[1].waits_for if isinstance(copying[1], ShareCopy) else ""
        return f"step {copying[0].step} to {self.tier.directory}{waits and f', which waits for {waits}'}"

    def forget(self, step: int) -> None:
        """Do not copy a step, which was deleted."""
        self._tasks = tuple(each for each in self._tasks if each.save.step != step)

    def staged(self, task: CopyTask) -> StagedShares:
        """Return what is in the tier of a save that is copied."""
        return StagedShares(self.tier.directory, task.save.id)

    def _queue_of(self, candidates: Sequence[Commit]) -> list[Commit]:
        there = committed_in(self.tier.directory)
        above = 0 if there else last_number_in(self.tier.directory)
        # What the coordinator has begun is finished, also if there are `keep` later ones by now.
        keep = self.tier.keep if self.is_coordinator else None
        return steps_to_copy(candidates, there, self.tier.every, keep, above)

    def _plan(self) -> tuple[list[Commit], list[Commit]]:
        commits = [each.commit for each in self._tasks]
        return commits, self._queue_of([each for each in commits if each not in self._damaged])

    def _next(self) -> Commit | None:
        """Return what to copy next: on other nodes than the coordinator's, once that has begun with it."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            seen = self._requested
            commit = super()._next()
            if commit is None or self.node.is_replaced:
                return None
            if self.is_coordinator:
                return commit
            begun = next(filter(self._is_expected, self._queue), None)
            if begun is not None:
                return begun
            if self._stop.wait(pause):
                return None
            is_news = self._requested != seen
            pause = _FIRST_PAUSE_SECONDS if is_news else min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def forget_parent(self) -> None:
        """As Drain.forget_parent(): what was to be copied is the parent's."""
        super().forget_parent()
        self._tasks, self._failures = (), {}

    def look(self) -> None:
        """Find out what is to be copied."""
        super().look()
        self._done = set(self._settled)

    def _is_expected(self, commit: Commit) -> bool:
        """Whether the coordinator waits for this node's part of a save."""
        task = self._task(commit)
        if task is None or not self.staged(task).exists():
            return False
        return any(self.staged(task).find(owner) is None for owner in task.owners_for(self.place))

    def _task(self, commit: Commit) -> CopyTask | None:
        return next((each for each in self._tasks if each.commit == commit), None)

    def _clean_up(self) -> None:
        if self.is_coordinator:
            super()._clean_up()

    def _begin(self, commit: Commit) -> "ShareCopy | None":
        task = self._task(commit)
        whole = None if task is None else self._whole_of(task.save)
        if task is None or whole is None:
            if task is None or self._is_gone(commit):
                return None
            gone = f"{self.node.store.directory}/{step_name(task.save.number)}"
            raise DamagedOriginalError(
                Corrupt(None, f"{gone} is gone, this node's share of step {commit.step}", gone)
            )
        manifest = self.node.store.open_manifest(task.save.number)
        return ShareCopy(self, task, whole, manifest, engine=self._engine, stop=self._stop)

    def _whole_of(self, save: Entry) -> Mapping[str, Any] | None:
        """Return the description of a save; None if what this node had of it was removed."""
        try:
            share = share_of(self.node.store, save.number)
        except FileNotFoundError:
            return None
        whole: Mapping[str, Any] = share["whole"]
        return whole if share["entry"]["id"] == save.id else None

    def _is_gone(self, commit: Commit) -> bool:
        return self._task(commit) is None  # retention leaves what is to be copied

    def _fail(self, commit: Commit | None, error: BaseException) -> None:
        super()._fail(commit, error)
        if getattr(error, "is_of_another_node", False):
            self._news = None  # that node raises it
        task = None if commit is None else self._task(commit)
        if task is not None:
            failed = CopyFailure(task.save.id, str(self._error), commit in self._damaged)
            self._failures = {**self._failures, task.save.id: failed}


class ShareCopy:
    """One node's part of the copy of one save, which run() makes once."""

    def __init__(
        self,
        drain: NodeDrain,
        task: CopyTask,
        whole: Mapping[str, Any],
        manifest: CheckpointManifest,
        *,
        engine: Engine | None,
        stop: Flag,
    ) -> None:
        """`whole`, manifest: of the save, and of what this node has of it."""
        self._drain = drain
        self.save = task.save
        self._task = task
        self._manifest = manifest
        self._stop = stop
        self.waits_for = ""  # nodes, on the coordinator
        self._staged = drain.staged(task)
        self._whole = whole
        limit = drain.tier.bytes_per_second
        directory = drain.node.directory
        self._copier = ShardCopier(
            manifest,
            task.save.step,
            drain.tier.directory,
            # The limit is that of the tier, to which all of these nodes copy at once.
            bytes_per_second=None if limit is None else max(1, limit // len(task.places())),
            engine=engine,
            stop=stop,
            is_saving=lambda: bool(saves_into(directory)),
        )
        shards = [shard for owner in task.owners_for(drain.place) for shard in self._shards_of(owner)]
        self._total = 2 * sum(manifest.shard_bytes()[each] for each in shards)

    def progress(self) -> tuple[int, int]:
        """Return the bytes that this node has written or read back, and how many these will be."""
        return self._copier.done, self._total

    def run(self, before_commit: Callable[[], None], keep: int | None) -> list[OSError]:
        """Copy the part of this node; on the coordinator, then commit the copy of the whole.

        before_commit, keep, and what this returns and raises: as for StepCopy.run(). Raises NotNeededError if
        the copy has been given up meanwhile.
        """
        if not self._drain.is_coordinator:
            try:
                self._copy_own()
            except OSError:
                if not self._staged.exists():
                    raise NotNeededError from None  # the coordinator has removed the folder
                raise
            return []
        self._prepare(before_commit)
        self._copy_own()
        try:
            shares = self._wait_for_all()
            if not self._drain.has_assigned(self.save.id):
                raise NotNeededError
        except NotNeededError:
            self._staged.remove()
            raise
        return self._commit(shares, before_commit, keep)

    def _copy_own(self) -> None:
        for owner in self._task.owners_for(self._drain.place):
            if self._find(owner) is None:
                self._copy_share(owner)

    def _prepare(self, claim: Callable[[], None]) -> None:
        """Make the tier, if it is not there, and a folder for the save in it.

        claim: makes the tier this run's, so that no other run begins there meanwhile.
        """
        store, directory = self._drain.store, self._drain.tier.directory
        if store.volumes:
            raise Unsupported(
                None,
                f"{directory} is spread over volumes, which a tier is not with local=True; name another "
                "directory for the tier",
                directory,
            )
        is_new = not os.path.exists(directory)  # noqa: PTH110
        save = self._begin(0)
        try:
            if is_new:
                make_private(directory, self._drain.node.directory)
            claim()
        finally:
            save.abandon()
        self._drain.begin_again(self.save.id)
        self._staged.make()
        self._staged.remove_others()

    def _begin(self, shards: int) -> CheckpointSave:
        """Lock the tier, and begin the step there. Whose its steps are is for the caller to check."""
        store = self._drain.store
        store.continue_from(store.position())
        save: CheckpointSave = retry_while_locked(lambda: store.begin(self.save.step, [shards]))
        return save

    def _find(self, owner: int) -> StagedShare | None:
        """Return the share of a node if all of it is in the tier."""
        found = self._staged.find(owner)
        if found is None or found.node >= len(self._whole["shares"]):
            return None
        return found if len(found.files) == len(shards_of_share(self._whole, found.node, owner)) else None

    def _copy_share(self, owner: int) -> None:
        node = self.save.nodes.index(self._task.readers[owner].node)
        numbers = self._shards_of(owner)
        paths, sizes = self._manifest.shard_paths(), self._manifest.shard_bytes()
        copies = self._staged.new_files(owner, len(numbers))
        try:
            self._copier.copy(
                [
                    Shard(number, paths[number], copy, sizes[number], self._manifest.shard_checksums(number))
                    for number, copy in zip(numbers, copies, strict=True)
                ]
            )
            self._staged.add(owner, node, copies)
        except BaseException:
            for copy in copies:
                with suppress(OSError):
                    os.unlink(copy)  # noqa: PTH108
            raise

    def _shards_of(self, owner: int) -> list[int]:
        """Return which shards of the node that copies a share are of that share."""
        return shards_of_share(self._whole, self.save.nodes.index(self._task.readers[owner].node), owner)

    def _wait_for_all(self) -> list[StagedShare]:
        """Wait until all nodes have copied their parts."""
        pause = _FIRST_PAUSE_SECONDS
        with Wait(_log, "wait for other nodes", f"step {self.save.step}", _WARN_SECONDS) as wait:
            while True:
                found = [self._find(owner) for owner in range(len(self._task.readers))]
                complete = [each for each in found if each is not None]
                if len(complete) == len(found):
                    return complete
                missing = [self._task.readers[owner].node for owner, each in enumerate(found) if each is None]
                self.waits_for = _named(missing)
                wait.check(self._about_missing)
                failed = self._drain.take_failure(self.save.id)
                if failed is not None:
                    raise failed.error()
                if not self._drain.has_assigned(self.save.id):
                    raise NotNeededError
                if self._stop.wait(pause):
                    raise Cancelled(None, f"copying step {self.save.step} was stopped")
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _about_missing(self) -> str:
        return (
            f"what {self.waits_for} copies of step {self.save.step} to {self._drain.tier.directory}. Is that "
            "mounted there, and the same directory?"
        )

    def _commit(
        self, shares: Sequence[StagedShare], before_commit: Callable[[], None], keep: int | None
    ) -> list[OSError]:
        """Make the copied shards the checkpoint of the step."""
        copies = _Copies.of(self._whole, shares, f"step {self.save.step} in {self._drain.tier.directory}")
        save = self._begin(len(copies.shards))
        try:
            before_commit()
            files = [file for share in self._staged.take(shares) for file in share.files]
            for file, placed in zip(files, save.placement["shards"], strict=True):
                with system_errors(f"move {file} to {placed['path']}", file):
                    os.rename(file, placed["path"])  # noqa: PTH104
            save.commit(
                {
                    "step": self.save.step,
                    "chunk_bytes": shard_files.CHUNK_BYTES,
                    "world_size": self._whole["world_size"],
                    "volumes": save.placement["volumes"],
                    "shards": [
                        {"volume": placed["volume"], "file": placed["file"], **about}
                        for placed, about in zip(save.placement["shards"], copies.shards, strict=True)
                    ],
                    "state": self._whole["state"],
                    **{key: self._whole[key] for key in ("features", "metrics") if self._whole[key]},
                },
                copies.tensors,
                first_number=self.save.number,
            )
        except BaseException:
            with suppress(OSError):
                save.abandon()
            self._staged.remove()  # some of the shards are gone with what was abandoned
            raise
        self._staged.remove()
        return remove_old_copies(save, keep)


def _named(nodes: Sequence[str]) -> str:
    """Return the ids of nodes in words."""
    shown = [*nodes[:3], *(["..."] if len(nodes) > 3 else [])]
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(shown)}"


class _Copies(NamedTuple):
    """What the manifest of a copy says: its shards, and where in them each tensor is."""

    shards: list[dict[str, Any]]
    tensors: list[Any]  # of each: name, dtype, shape, and its pieces

    @classmethod
    def of(cls, whole: Mapping[str, Any], shares: Sequence[StagedShare], where: str) -> "_Copies":
        """Describe the copies of all shares. Raises Format unless every byte of all tensors is there once."""
        shards: list[dict[str, Any]] = []
        pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in whole["tensors"]]
        for owner, share in enumerate(shares):
            described = whole["shares"][share.node]["shards"]
            for number in shards_of_share(whole, share.node, owner):
                about = described[number]
                for tensor, begin, end, offset in about["pieces"]:
                    pieces[tensor].append((begin, len(shards), offset, end - begin))
                shards.append({"bytes": about["bytes"], "crc32c": about["crc32c"]})
        tensors = []
        for (name, dtype, shape, nbytes), parts in zip(whole["tensors"], pieces, strict=True):
            at = 0
            for begin, _, _, length in sorted(parts):
                if begin != at:
                    break
                at += length
            if at != nbytes or sum(part[3] for part in parts) != nbytes:
                raise Format(None, f"{where}: what the nodes have copied is not the whole of {name!r}")
            tensors.append((name, dtype, tuple(shape), [part[1:] for part in sorted(parts)]))
        return cls(shards, tensors)


def shards_of_share(whole: Mapping[str, Any], node: int, owner: int) -> list[int]:
    """Return which of the shards that a node keeps are of the share of node `owner` of a save."""
    described = whole["shares"][node]["shards"]
    return [number for number, about in enumerate(described) if about.get("copy_of", node) == owner]
