"""The checkpoints of a run that saves with torch.distributed.checkpoint: trunkline.dcp.Checkpointer."""

import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from trunkline._arguments import bool_argument, check_engine, keep_argument, step_argument
from trunkline._core import Engine, Volume, is_on_local_filesystem
from trunkline._errors import Error, exception_of
from trunkline._exit_hook import check_threads_run
from trunkline._formats.checkpoint_names import step_name, step_of
from trunkline._logging import Log
from trunkline._modes import keeps_grad_mode
from trunkline._paths import absolute_path, path_name
from trunkline._trace import span
from trunkline._warnings import Caller, caller, warn_without_failing
from trunkline.checkpoint.directory.turn import Turn
from trunkline.checkpoint.ranks.store import rank_error
from trunkline.dcp import _directory, run_directory, running_saves
from trunkline.dcp._reader import StorageReader
from trunkline.dcp._run_ranks import RunRanks
from trunkline.dcp._staging import stage
from trunkline.dcp._step_writer import StepWriter
from trunkline.dcp._task import Task
from trunkline.dcp._writer import StorageWriter
from trunkline.dcp.run_directory import Commit

if TYPE_CHECKING:
    from typing_extensions import Self

    from trunkline.checkpoint.tiers.drain import DrainStatus
    from trunkline.checkpoint.tiers.tier import Tier

_log = Log("checkpoint")
_MOST_READS = 20  # of a load, while another process removes what it reads


class Checkpointer:
    """The checkpoints of a run in one directory, saved with torch.distributed.checkpoint; keeps the last few.

    directory: created by the first save. Each step is a folder in it, step-00000100, as StorageWriter writes
    it, and is there whole or not at all, whatever crashes. Opening creates nothing, and rejects a directory
    that holds anything else. Nothing but Checkpointers may save into it.

    keep: how many of the checkpoints that it loaded or saved are kept (None: all). Once a new one is durable,
    checkpoints of later steps are removed first (the run went back to an earlier step), then the oldest.
    Checkpoints of other runs are never removed; a RuntimeWarning says so once.

    A Checkpointer continues from the checkpoints that it loaded or saved; load() of any step counts for all
    existing ones. If there are others of the same or later steps, save() raises FileExistsError: call load()
    first, or use another directory. Two processes cannot save at once: the second raises Error (EBUSY).

    volumes: directories, ideally one on each disk, over which each rank spreads its bytes.

    process_group: the ranks that save together; None is the default group if there is one. They communicate
    through a group of their own (gloo), so that a save in the background does not meet the collective
    operations of the training. save(), async_save(), load() and delete() are collective: all ranks make the
    same calls in the same order. Without local=True, the constructor is not collective, and all ranks see the
    directory under the same absolute path.

    local: `directory` and `volumes` are on disks of which each node sees only its own, such as local SSDs.
    Each rank writes to those of its node, and a step counts once all nodes have committed it. load() reads
    there what a rank needs, and asks other nodes for the rest, over the process group: any number of ranks
    loads, as long as all bytes are on nodes that are there. The constructor, latest(), steps(), locations()
    and restore_copies() are collective too. A process that has saved or loaded keeps the directory of its
    node locked until it ends. durable=False is not supported.

    copies, domain, fresh, timeout, tiers: with local=True, as those of trunkline.Checkpointer. copies=2: what
    each rank has is also sent to a second node, which needs main memory for it while the save runs; so a step
    survives the loss of any node. domain: a name for the hardware that fails together with this node.
    fresh: start over; the earlier run is left in its place, and not used any more. timeout: seconds without a
    sign of life until a rank counts as dead. tiers: directories on storage that all nodes see, to which some
    of the steps are copied in the background; there, StorageReader("TIER/step-00000010") reads a step without
    the nodes.
    """

    def __new__(cls, directory: "str | os.PathLike[str]", *, local: bool = False, **options: Any) -> "Self":
        """Return a LocalCheckpointer if the directory is on a disk that one node alone sees."""
        if cls is Checkpointer and bool_argument(local, "local"):
            from trunkline.dcp.local_checkpointer import LocalCheckpointer

            return super().__new__(LocalCheckpointer)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        *,
        keep: SupportsIndex | None = 3,
        local: bool = False,
        copies: SupportsIndex = 1,
        domain: str | None = None,
        fresh: bool = False,
        timeout: float = 300.0,
        tiers: "Sequence[Tier] | None" = None,
        volumes: "Sequence[str | os.PathLike[str]] | Volume | None" = None,
        process_group: Any = None,
        durable: bool = True,
        engine: Engine | None = None,
    ) -> None:
        """Open the directory, which need not exist.

        Raises TypeError or ValueError, which names the argument, for invalid ones; Error with ENOTDIR or
        ENOTEMPTY for a path that cannot hold the steps of a run.
        """
        needs_local = {"copies": copies != 1, "domain": domain is not None, "fresh": fresh is not False}
        needs_local |= {"timeout": timeout != 300.0, "tiers": tiers is not None}
        for name, is_given in needs_local.items():
            if is_given:
                raise ValueError(f"{name}: needs local=True")
        self.directory = Path(path_name(directory, "directory"))
        self._path = Path(absolute_path(directory, "directory"))
        number_kept = keep_argument(keep)
        check_engine(engine)
        self._options = {"volumes": volumes, "durable": bool_argument(durable, "durable"), "engine": engine}
        StorageWriter(self._path, **self._options)  # type: ignore[arg-type]  # checks the arguments
        ranks = RunRanks(process_group)
        run_directory.check_usable(self._path)
        self._begin_calls(ranks, engine, number_kept)
        self._known: set[Commit] = set()  # rank 0 alone needs it
        self._saved: set[Commit] = set()  # those of them that it has saved itself
        self._reported: set[Commit] = set()
        self._warned: set[str] = set()
        if self._ranks.rank == 0:
            self._warn_of_ignored()

    def _begin_calls(self, ranks: RunRanks, engine: Engine | None, keep: int | None) -> None:
        """Let calls begin, which take turns."""
        self._ranks = ranks
        self._engine = engine
        self._keep = keep
        self._turn = Turn()
        self._pending: Task | None = None
        _checkpointers.add(self)

    def save(self, step: SupportsIndex, state_dict: dict[str, Any], *, planner: Any = None) -> None:
        """Save `state_dict` as the checkpoint of `step`, durably, as torch.distributed.checkpoint.save does.

        Waits for an async_save() before, and raises its error; then nothing is saved. Raises FileExistsError,
        having written nothing, for checkpoints of this step or later ones that this Checkpointer has neither
        loaded nor saved; Error (EBUSY) if another process saves into the directory; the error of this rank's
        part; RankError, which names the rank, if another one failed. Earlier checkpoints stay intact. An
        existing checkpoint of the step is replaced atomically.
        """
        number = step_argument(step, "; the order is save(step, state_dict)")
        state = _state_argument(state_dict)
        check_threads_run(f"save step {number} to {self._path}")
        call = f"save({number})"
        self._turn.check(call, self._path)
        with self._turn.lock, span("checkpoint", "dcp.Checkpointer.save", str(self._path)):
            self._turn.begin(call)
            try:
                self._join()
                prepared = self._prepare(lambda: _state_of_objects(state))
                self._pending = task = self._save_task(number, call, prepared, planner)
                try:
                    task.start()
                    task.wait()
                except BaseException:
                    task.cancellation.request()  # what it reads may change from now on
                    task.wait()
                    raise
                self._join()
            finally:
                self._turn.end()

    @keeps_grad_mode
    def async_save(
        self, step: SupportsIndex, state_dict: dict[str, Any], *, planner: Any = None
    ) -> "Future[None]":
        """Begin to save as save() does, in the background, as torch.distributed.checkpoint.async_save does.

        Returns once the state is copied to main memory: it may change then. The future is done once the
        checkpoint is durable and old ones are removed; its result() raises the error of the save, as do
        wait() and the next save. Torch requires that the default process group has a backend for the CPU
        ("cpu:gloo,cuda:nccl").
        """
        number = step_argument(step, "; the order is async_save(step, state_dict)")
        state = _state_argument(state_dict)
        check_threads_run(f"save step {number} to {self._path}")
        call = f"async_save({number})"
        self._turn.check(call, self._path)
        with self._turn.lock:
            self._turn.begin(call)
            try:
                self._join()
                prepared = self._prepare(lambda: self._staged(_state_of_objects(state)))
                self._pending = task = self._save_task(number, call, prepared, planner)
                task.start()
                task.wait_until_begun()
                if not task.has_begun or task.runs_here:
                    self._join()
            finally:
                self._turn.end()
        return task.future

    def _staged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state that async_save() saves, in main memory."""
        return stage(state)

    def load(
        self, state_dict: dict[str, Any], step: SupportsIndex | None = None, *, planner: Any = None
    ) -> int:
        """Fill `state_dict` in place from `step` (None: what was committed last), and return the step.

        As torch.distributed.checkpoint.load does, for any number of ranks that saved. Waits for a running
        async_save(). Raises FileNotFoundError if there is no such checkpoint; Corrupt, naming file, chunk and
        tensor, if it is damaged: never start over because of that. RankError names another rank that failed.
        """
        state = _state_argument(state_dict, "; the order is load(state_dict, step)")
        wanted = None if step is None else step_argument(step)
        self._turn.check("load()", self._path)
        with self._turn.lock, span("checkpoint", "dcp.Checkpointer.load", str(self._path)):
            self._turn.begin("load()")
            try:
                self._join()
                return self._load(state, wanted, planner)
            finally:
                self._turn.end()

    def _load(self, state: dict[str, Any], wanted: int | None, planner: Any) -> int:
        def choose() -> tuple[int | None, list[Commit]]:
            if wanted is None:
                self._warn_of_ignored()
            commits = run_directory.commits_of(self._path, even_damaged=wanted is not None)
            folder = run_directory.step_directory(self._path, wanted)
            intact = [each for each in commits if each.number != run_directory.DAMAGED]
            return step_of(folder.name), intact

        call = f"load({'' if wanted is None else wanted})"
        for _ in range(_MOST_READS):
            chosen, commits = self._ranks.agree(call, choose)
            reader = StorageReader(self._path / step_name(chosen), engine=self._engine)
            try:
                load(state, storage_reader=reader, planner=planner, **self._ranks.how())
            except (CheckpointException, Exception) as failed:
                # All ranks know of the former. After another error they may not be here together.
                is_known = isinstance(failed, CheckpointException) or self._ranks.size == 1
                if is_known and self._is_replaced(call, chosen, commits):
                    _log.info("%s: step %d is gone, or saved again; reading again", self._path, chosen)
                    continue
                if isinstance(failed, CheckpointException):
                    raise self._own_error(failed) from None
                raise
            self._known.update(commits)
            _log.info("%s: step %d is loaded", self._path, chosen)
            return int(chosen)
        raise Error(
            errno.EBUSY,
            f"{self._path}: another process has removed checkpoints {_MOST_READS} times while they were "
            "loaded; let that keep more of them (keep=), or load when it has ended",
            str(self._path),
        )

    def _is_replaced(self, call: str, step: int, commits: Sequence[Commit]) -> bool:
        """Whether another process has removed a step, or saved it again, since it was in `commits`."""
        before = next((each for each in commits if each.step == step), None)

        def changed() -> bool:
            return run_directory.commit_of(self._path, step, even_damaged=True) != before

        return bool(before is not None and self._ranks.agree(call, changed))

    def latest(self) -> int | None:
        """Return the step that was committed last; None if there is no checkpoint. Not collective.

        Before it returns None, it waits for saves of this process into the directory. Raises Corrupt for a
        step whose manifest is damaged: it may be the latest.
        """
        found = run_directory.latest_of(self._path)
        if found is None:
            running_saves.await_saves_into(self._path)
            found = run_directory.latest_of(self._path)
        return found

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending. Not collective."""
        return run_directory.steps_of(self._path)

    def wait(self) -> None:
        """Wait for the running async_save(), if there is one, and raise its error."""
        self._turn.check("wait()", self._path)
        with self._turn.lock:
            self._turn.begin("wait()")
            try:
                self._join()
            finally:
                self._turn.end()

    def delete(self, step: SupportsIndex) -> None:
        """Remove the checkpoint of `step`, durably, with its shards on volumes.

        Waits for a running save. Raises FileNotFoundError if there is no such checkpoint; Error (EBUSY) while
        another process saves.
        """
        number = step_argument(step)
        call = f"delete({number})"
        self._turn.check(call, self._path)
        with self._turn.lock:
            self._turn.begin(call)
            try:
                self._join()
                self._pending = task = Task(lambda task: self._delete(number, call))
                task.start()
                self._join()
            finally:
                self._turn.end()

    def _delete(self, step: int, call: str) -> None:
        def remove() -> None:
            run_directory.step_directory(self._path, step)
            with run_directory.locked(self._path):
                run_directory.remove_step(self._path, step)

        self._ranks.agree(call, remove)

    def wait_drained(self, timeout: float | None = None) -> None:
        """Wait for the running save, and until all nodes have copied what `tiers` are to get. Collective.

        As trunkline.Checkpointer.wait_drained() does with local=True. Without tiers, this is wait().
        """
        self.wait()

    def drains(self) -> "list[DrainStatus]":
        """Return how far copying to each tier is, on the first rank of each node; none on the others."""
        return []

    def locations(self) -> dict[int, list[str]]:
        """Return the directories that have each step, tiers too. Collective with local=True."""
        return {step: [str(self._path)] for step in self.steps()}

    def restore_copies(self) -> list[int]:
        """With local=True: give nodes in the place of lost ones the copies that those had; return the steps.

        Collective. As trunkline.Checkpointer.restore_copies() does. Raises ValueError without local=True.
        """
        raise ValueError("restore_copies() needs local=True: other directories have no copies on other nodes")

    def __repr__(self) -> str:
        return f"<trunkline.dcp.Checkpointer {str(self.directory)!r} keep={self._keep}>"

    def _join(self) -> None:
        """Wait for the task before, and raise its error; wait for saves of others of this process."""
        pending = self._pending
        error = None
        if pending is not None:
            pending.wait()
            error = pending.take_error()
        self._pending = None  # only now: an interrupt may have ended the wait
        if error is not None:
            raise error
        running_saves.await_saves_into(self._path)

    def _prepare(self, make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        """Make the state that is saved, in this thread; return what returns it, or raises the error.

        With several ranks it is raised once the others learn of it.
        """
        try:
            made = make()
        except BaseException as error:
            if self._ranks.size == 1:
                raise
            failed = error

            def fail() -> dict[str, Any]:
                raise failed

            return fail
        return lambda: made

    def _save_task(self, step: int, call: str, prepared: Callable[[], dict[str, Any]], planner: Any) -> Task:
        """Return what saves, in a thread."""
        where = caller()

        def act(task: Task) -> None:
            running_saves.begin(task.future, self._path, f"saving step {step} to {self._path}")
            with contextlib.ExitStack() as until_ended:
                save_id, replaces = self._ranks.agree(call, lambda: self._begin(step, until_ended, where))

                def writer_and_state() -> tuple[StepWriter, dict[str, Any]]:
                    folder = self._path / step_name(step)
                    options = {**self._options, "overwrite": replaces}
                    return StepWriter(folder, save_id, task.cancellation, **options), prepared()

                writer, state = self._ranks.together(call, writer_and_state)
                task.begin()
                self._write(
                    step,
                    save_id,
                    where,
                    lambda: save(state, storage_writer=writer, planner=planner, **self._ranks.how()),
                )

        return Task(act)

    def _begin(self, step: int, until_ended: contextlib.ExitStack, where: Caller) -> tuple[str, bool]:
        """Lock the directory, and check that the run continues. Return save_id, and if a step is replaced."""
        if not self._path.exists():
            _directory.make_directory(self._path, durable=True)
        run_directory.check_usable(self._path)
        until_ended.enter_context(run_directory.locked(self._path))
        run_directory.check_no_link(self._path, step)
        run_directory.check_not_torchs(self._path, step)
        if is_on_local_filesystem(self._path):  # elsewhere the lock may end at this machine
            for problem in run_directory.collect(self._path).problems:
                self._warn_once(f"{self._path}: could not remove what an earlier save left: {problem}", where)
        commits = run_directory.commits_of(self._path)
        self._check_continues(step, commits)
        replaces = any(each.step == step for each in commits)
        return run_directory.new_save_id(max((each.number for each in commits), default=0) + 1), replaces

    def _write(self, step: int, save_id: str, where: Caller, write: Callable[[], Any]) -> None:
        """Save with torch, note the checkpoint, and remove old ones."""
        try:
            self._call_torch(write)
        except BaseException as error:
            _log.info("%s: step %d is not saved: %s", self._path, step, error)
            self._note_committed(step, save_id)
            folder = self._path / step_name(step)
            if isinstance(error, FileNotFoundError) and not folder.is_dir():
                raise exception_of(
                    "system",
                    errno.ENOENT,
                    f"{folder} was moved or removed while it was written: step {step} is not saved. Earlier "
                    f"checkpoints are where {self._path} is now, and can be loaded from there",
                    str(folder),
                ) from error
            raise
        if self._ranks.rank == 0:
            try:
                self._end(step, where)
            except (OSError, ValueError) as error:  # the checkpoint is durable: it must not seem to fail
                text = f"{self._path}: could not remove old checkpoints after step {step}: {error}"
                warn_without_failing(text, where)

    def _note_committed(self, step: int, save_id: str) -> None:
        """After an error: it may have come when the checkpoint was complete."""
        if self._ranks.rank == 0:
            with contextlib.suppress(OSError):
                committed = run_directory.commit_of(self._path, step)
                if committed is not None and committed.number == run_directory.number_in(save_id):
                    self._known.add(committed)

    def _check_continues(self, step: int, commits: Sequence[Commit]) -> None:
        others = sorted(each.step for each in commits if each.step >= step and each not in self._known)
        if not others:
            return
        shown = f"step{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:8]))}"
        shown += f" and {len(others) - 8} more" if len(others) > 8 else ""
        why = "this run has neither loaded nor saved: another run saves there, or they were moved in"
        if not self._known:
            why = (
                "this run did not load. To continue the earlier run, call load() before saving; to start "
                "over, use another directory"
            )
        raise exception_of(
            "system",
            errno.EEXIST,
            f"cannot save step {step} into {self._path}: it already holds {shown}, which {why}",
            str(self._path),
        )

    def _end(self, step: int, where: Caller) -> None:
        """Remove old checkpoints."""
        saved = run_directory.commit_of(self._path, step)
        if saved is None:
            return
        self._known.add(saved)
        self._saved.add(saved)
        if self._keep is None:
            return
        commits = run_directory.commits_of(self._path, even_damaged=True)
        for each in run_directory.superseded(commits, self._known, saved, self._keep):
            self._remove(each, where)
        strangers = {each for each in commits if each not in self._known}
        if len(commits) > self._keep and not strangers <= self._reported:
            self._reported |= strangers
            shown = ", ".join(str(each) for each in sorted(each.step for each in strangers))
            warn_without_failing(
                f"{self._path}: keep={self._keep} does not count or remove steps {shown}, which this "
                "Checkpointer has not loaded or saved; delete() removes them",
                where,
            )

    def _remove(self, old: Commit, where: Caller) -> None:
        try:
            if old not in self._saved:
                run_directory.check_readable(self._path, old.step)
            run_directory.remove_step(self._path, old.step)
        except OSError as error:
            self._warn_once(f"{self._path}: could not remove step {old.step}: {error}", where)

    def _warn_of_ignored(self) -> None:
        """Warn of folders that look like steps but do not count, such as links to a missing disk."""
        for name, text in run_directory.ignored_in(self._path).items():
            self._warn_once(f"{self._path}: {name} is ignored: {text}", caller())

    def _warn_once(self, text: str, where: Caller) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn_without_failing(text, where)

    def _call_torch(self, act: Callable[[], Any]) -> Any:
        """Call torch, and raise the error of this rank, or RankError for that of another one.

        Torch raises CheckpointException, which no `except Exception` catches.
        """
        try:
            return act()
        except CheckpointException as failed:
            raise self._own_error(failed) from None

    def _own_error(self, failed: CheckpointException) -> BaseException:
        """Return the error of this rank that torch has raised, or RankError for that of another one."""
        own = failed.failures.get(self._ranks.rank)
        if own is not None:
            return own[0]
        rank, (error, _) = next(iter(failed.failures.items()))
        return rank_error(rank, f"rank {rank} failed: {error}")


_checkpointers: "weakref.WeakSet[Checkpointer]" = weakref.WeakSet()


def _forget_parent() -> None:
    """In a forked child: a thread that the child does not have may hold the turn."""
    for checkpointer in list(_checkpointers):
        checkpointer._turn.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)


def _state_argument(value: Any, hint: str = "") -> Any:
    """Return an argument that must be a state. Raises TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"state_dict: must be a dict, not {type(value).__name__}{hint}")
    return value


def _state_of_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with that of objects in their place, as torch does it."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
