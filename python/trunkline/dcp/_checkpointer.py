"""The checkpoints of a run that saves with torch.distributed.checkpoint: trunkline.dcp.Checkpointer."""

import contextlib
import dataclasses
import errno
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, SupportsIndex

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from trunkline._arguments import bool_argument, check_engine, keep_argument, step_argument
from trunkline._core import Engine, Volume, is_on_local_filesystem
from trunkline._errors import exception_of
from trunkline._exit_hook import check_threads_run
from trunkline._formats.checkpoint_names import step_name, step_of
from trunkline._logging import Log
from trunkline._paths import absolute_path, path_name
from trunkline._trace import span
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory.turn import Turn
from trunkline.checkpoint.ranks.store import rank_error
from trunkline.dcp import _directory, run_directory, running_saves
from trunkline.dcp._reader import StorageReader
from trunkline.dcp._run_ranks import RunRanks
from trunkline.dcp._writer import StorageWriter
from trunkline.dcp.run_directory import Commit

_log = Log("checkpoint")


class _StepWriter(StorageWriter):
    """Writes one step, whose manifest has the number of the commit."""

    def __init__(self, path: Path, save_id: str, ranks: RunRanks, **options: Any) -> None:
        super().__init__(path, **options)
        self._save_id = save_id
        self._ranks = ranks

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state for a save in the background, or raise on all ranks if one of them cannot."""
        copied: dict[str, Any] = self._ranks.together(
            "async_save()", functools.partial(super().stage, state_dict)
        )
        return copied

    def storage_meta(self) -> StorageMeta | None:
        """Return the entry of the metadata that identifies this save."""
        meta = super().storage_meta()
        assert meta is not None
        return dataclasses.replace(meta, save_id=self._save_id)


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
    operations of the training. The constructor talks to nobody; save(), async_save(), load(), wait() and
    delete() are collective: all ranks make the same calls in the same order, and see the directory under the
    same absolute path.
    """

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        *,
        keep: SupportsIndex | None = 3,
        volumes: "Sequence[str | os.PathLike[str]] | Volume | None" = None,
        process_group: Any = None,
        durable: bool = True,
        engine: Engine | None = None,
    ) -> None:
        """Open the directory, which need not exist.

        Raises TypeError or ValueError, which names the argument, for invalid ones; Error with ENOTDIR or
        ENOTEMPTY for a path that cannot hold the steps of a run.
        """
        self.directory = Path(path_name(directory, "directory"))
        self._path = Path(absolute_path(directory, "directory"))
        self._keep = keep_argument(keep)
        check_engine(engine)
        self._options = {"volumes": volumes, "durable": bool_argument(durable, "durable"), "engine": engine}
        StorageWriter(self._path, **self._options)  # type: ignore[arg-type]  # checks the arguments
        self._engine = engine
        self._ranks = RunRanks(process_group)
        run_directory.check_usable(self._path)
        self._turn = Turn()
        self._known: set[Commit] = set()  # rank 0 alone needs it
        self._reported: set[Commit] = set()
        self._pending: Future[None] | None = None
        self._saving_process = 0  # in which that runs

    def save(self, step: SupportsIndex, state_dict: dict[str, Any], *, planner: Any = None) -> None:
        """Save `state_dict` as the checkpoint of `step`, durably, as torch.distributed.checkpoint.save does.

        Waits for an async_save() before, and raises its error; then nothing is saved. Raises FileExistsError,
        having written nothing, for checkpoints of this step or later ones that this Checkpointer has neither
        loaded nor saved; Error (EBUSY) if another process saves into the directory; the error of this rank's
        part; RankError, which names the rank, if another one failed. Earlier checkpoints stay intact. An
        existing checkpoint of the step is replaced atomically.
        """
        number = step_argument(step, "; the order is save(step, state_dict)")
        check_threads_run(f"save step {number} to {self._path}")
        with self._my_turn(f"save({number})"), span("checkpoint", "dcp.Checkpointer.save", str(self._path)):
            self._join()
            begun = self._begin(number, f"save({number})")
            with begun.until_ended:
                _call(
                    lambda: save(
                        state_dict, storage_writer=begun.writer, planner=planner, **self._ranks.how()
                    ),
                    self,
                )
                self._end(begun)

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
        check_threads_run(f"save step {number} to {self._path}")
        with self._my_turn(f"async_save({number})"):
            self._join()
            begun = self._begin(number, f"async_save({number})")
            done = running_saves.SaveFuture()
            done.set_running_or_notify_cancel()
            try:
                running = _call(
                    lambda: async_save(
                        state_dict, storage_writer=begun.writer, planner=planner, **self._ranks.how()
                    ),
                    self,
                )
            except BaseException:
                begun.until_ended.close()
                raise
            self._pending, self._saving_process = done, os.getpid()
            running_saves.begin(done, self._path, f"saving step {number} to {self._path}")
            running.add_done_callback(lambda future: self._finish(begun, future, done))
        return done

    def load(
        self, state_dict: dict[str, Any], step: SupportsIndex | None = None, *, planner: Any = None
    ) -> int:
        """Fill `state_dict` in place from `step` (None: what was committed last), and return the step.

        As torch.distributed.checkpoint.load does, for any number of ranks that saved. Waits for a running
        async_save(). Raises FileNotFoundError if there is no such checkpoint; Corrupt, naming file, chunk and
        tensor, if it is damaged: never start over because of that. RankError names another rank that failed.
        """
        wanted = None if step is None else step_argument(step)
        with self._my_turn("load()"), span("checkpoint", "dcp.Checkpointer.load", str(self._path)):
            self._join()

            def choose() -> tuple[int | None, list[Commit]]:
                commits = run_directory.commits_of(self._path, even_damaged=wanted is not None)
                folder = run_directory.step_directory(self._path, wanted)
                intact = [each for each in commits if each.number != run_directory.DAMAGED]
                return step_of(folder.name), intact

            call = f"load({'' if wanted is None else wanted})"
            chosen, commits = self._ranks.agree(call, choose)
            reader = StorageReader(self._path / step_name(chosen), engine=self._engine)
            _call(lambda: load(state_dict, storage_reader=reader, planner=planner, **self._ranks.how()), self)
            self._known.update(commits)
            _log.info("%s: step %d is loaded", self._path, chosen)
            return int(chosen)

    def latest(self) -> int | None:
        """Return the step that was committed last; None if there is no checkpoint. Not collective.

        Before it returns None, it waits for saves of this process into the directory. Raises Corrupt for a
        step whose manifest is damaged: it may be the latest.
        """
        found = run_directory.latest_of(self._path)
        if found is None:
            running_saves.await_others(self._path)
            found = run_directory.latest_of(self._path)
        return found

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending. Not collective."""
        return run_directory.steps_of(self._path)

    def wait(self) -> None:
        """Wait for the running async_save(), if there is one, and raise its error."""
        with self._my_turn("wait()"):
            self._join()

    def delete(self, step: SupportsIndex) -> None:
        """Remove the checkpoint of `step`, durably, with its shards on volumes.

        Waits for a running save. Raises FileNotFoundError if there is no such checkpoint; Error (EBUSY) while
        another process saves.
        """
        number = step_argument(step)
        with self._my_turn(f"delete({number})"):
            self._join()

            def remove() -> None:
                run_directory.step_directory(self._path, number)
                with run_directory.locked(self._path):
                    run_directory.remove_step(self._path, number)

            self._ranks.agree(f"delete({number})", remove)

    def __repr__(self) -> str:
        return f"<trunkline.dcp.Checkpointer {str(self.directory)!r} keep={self._keep}>"

    @contextlib.contextmanager
    def _my_turn(self, call: str) -> Any:
        """Reject calls of signal handlers that interrupt another call."""
        self._turn.check(call, self._path)
        with self._turn.lock:
            self._turn.begin(call)
            try:
                yield
            finally:
                self._turn.end()

    def _join(self) -> None:
        """Wait for the async_save before, and those of others of this process into the directory."""
        pending = self._pending
        error = None
        if pending is not None and self._saving_process == os.getpid():  # else it runs in the parent
            error = pending.exception()
        self._pending = None  # only now: an interrupt may have ended the wait
        if error is not None:
            raise error
        running_saves.await_others(self._path)

    def _begin(self, step: int, call: str) -> "_Save":
        """Lock the directory on rank 0, and check that the run continues."""
        until_ended = contextlib.ExitStack()

        def begin() -> tuple[str, bool]:
            if not self._path.exists():
                _directory.make_directory(self._path, durable=True)
            run_directory.check_usable(self._path)
            until_ended.enter_context(run_directory.locked(self._path))
            run_directory.check_no_link(self._path, step)
            if is_on_local_filesystem(self._path):  # elsewhere the lock may end at this machine
                run_directory.collect(self._path)
            commits = run_directory.commits_of(self._path)
            self._check_continues(step, commits)
            replaces = any(each.step == step for each in commits)
            return run_directory.new_save_id(max((each.number for each in commits), default=0) + 1), replaces

        try:
            save_id, replaces = self._ranks.agree(call, begin)
            folder = self._path / step_name(step)
            writer = _StepWriter(folder, save_id, self._ranks, overwrite=replaces, **self._options)
        except BaseException:
            until_ended.close()
            raise
        return _Save(step, writer, until_ended)

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

    def _end(self, save: "_Save") -> None:
        """Remove old checkpoints. The new one is durable: errors here do not make the save fail."""
        if self._ranks.rank != 0:
            return
        saved = run_directory.commit_of(self._path, save.step)
        if saved is None:
            return
        self._known.add(saved)
        if self._keep is None:
            return
        commits = run_directory.commits_of(self._path)
        for each in run_directory.superseded(commits, self._known, saved, self._keep):
            self._remove(each.step)
        strangers = {each for each in commits if each not in self._known}
        if len(commits) > self._keep and not strangers <= self._reported:
            self._reported |= strangers
            shown = ", ".join(str(each) for each in sorted(each.step for each in strangers))
            warn_without_failing(
                f"{self._path}: keep={self._keep} does not count or remove steps {shown}, which this "
                "Checkpointer has not loaded or saved; delete() removes them",
                caller(),
            )

    def _remove(self, step: int) -> None:
        try:
            run_directory.remove_step(self._path, step)
        except OSError as error:
            warn_without_failing(f"{self._path}: could not remove step {step}: {error}", caller())

    def _finish(self, save: "_Save", running: Any, done: "Future[None]") -> None:
        """End a save in the background, in its thread."""
        try:
            with save.until_ended:
                _call(running.result, self)
                self._end(save)
        except BaseException as error:
            _log.info("%s: step %d is not saved: %s", self._path, save.step, error)
            done.set_exception(error)
            running_saves.end(done, failed=True)
        else:
            done.set_result(None)
            running_saves.end(done, failed=False)


@dataclasses.dataclass
class _Save:
    """A save that has begun. `until_ended` holds the lock, on rank 0."""

    step: int
    writer: _StepWriter
    until_ended: contextlib.ExitStack


def _call(act: Callable[[], Any], checkpointer: Checkpointer) -> Any:
    """Call torch, and raise the error of this rank, or RankError for that of another one.

    Torch raises CheckpointException, which no `except Exception` catches.
    """
    try:
        return act()
    except CheckpointException as failed:
        own = failed.failures.get(checkpointer._ranks.rank)
        if own is not None:
            raise own[0] from None
        rank, (error, _) = next(iter(failed.failures.items()))
        raise rank_error(rank, f"rank {rank} failed: {error}") from None
