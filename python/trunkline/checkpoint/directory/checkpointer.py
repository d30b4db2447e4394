"""A directory of checkpoints, one for each step: trunkline.Checkpointer."""

import errno
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from trunkline._arguments import (
    bool_argument,
    check_engine,
    check_staging_bytes,
    seconds_argument,
    shown_step,
    step_argument,
)
from trunkline._core import CheckpointManifest, Engine
from trunkline._errors import Corrupt, Error, Format, Unsupported, add_note, exception_of, reword
from trunkline._exit_hook import check_threads_run
from trunkline._formats.checkpoint_names import dangling_steps, misnamed_steps, step_name
from trunkline._formats.selection import Keys, Selection
from trunkline._formats.tensor_reader import TensorReader
from trunkline._logging import Log
from trunkline._paths import about_missing_disks, absolute_path, path_name
from trunkline._tensor_io.memory import Device, device_argument
from trunkline._trace import span
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory import shards
from trunkline.checkpoint.directory.agreement import agree, open_store
from trunkline.checkpoint.directory.arguments import Writers, names_of, ranks_of, writers_of
from trunkline.checkpoint.directory.part import Verify, Wanted
from trunkline.checkpoint.directory.retention import KeepBest, Metrics, Rules, metrics_argument
from trunkline.checkpoint.directory.running_saves import await_saves_into
from trunkline.checkpoint.directory.step_increment import IncrementRules
from trunkline.checkpoint.directory.step_load import load_state
from trunkline.checkpoint.directory.step_save import SaveContext, StepSave, retry_while_locked, warnings_of
from trunkline.checkpoint.directory.step_source import StepSource
from trunkline.checkpoint.directory.turn import Turn
from trunkline.checkpoint.ranks.group import Exchange, rank_error
from trunkline.checkpoint.ranks.outcomes import (
    give_up,
    mark_earlier,
)
from trunkline.checkpoint.save import SaveHandle, raise_unobserved, take_failures

if TYPE_CHECKING:
    from typing_extensions import Self

# Errors that only mean that this user or filesystem cannot write: opening for reading ignores them.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

_log = Log("checkpoint")

# How often ranks try to agree on a checkpoint while another process saves; the pauses double.
_MAX_AGREEMENTS = 8
_FIRST_PAUSE_SECONDS = 0.005


def _of_the_save_before(error: Error, step: int, more: str) -> Error:
    """Make the error of a save that was not started because the one before it failed with `error`.

    more: other failures to mention, so that these need not make the next save fail.
    """
    text = f"step {step} was not saved, because the one before it failed; call save() again. The failure: "
    text += f"{error}; besides, {more}" if more else str(error)
    made = type(error)(error.errno, text, error.filename)
    vars(made).update(vars(error))
    return made


class Checkpointer:
    """Checkpoints of a training in one directory: crash-safe, verified, with the last few kept.

    directory: created by the first save; it contains a directory for each step, with a manifest and shards,
    which are stock safetensors files. Opening creates nothing, and rejects a directory that holds other
    files.

    keep: how many of the checkpoints that it loaded or saved are kept (None: all). Once a new one is durable,
    checkpoints of later steps are removed first (the run went back to an earlier step), then the oldest.
    Checkpoints of other runs are never removed; a RuntimeWarning says so once. Others stay beside the last
    `keep`: with keep_every=1000 those whose step is a multiple of 1000; with keep_best=("loss", "min", 3) the
    three with the lowest "loss" among the metrics that save() got, with "max" those with the highest. A
    checkpoint goes only if none of the three keeps it. One that has no such metric, or NaN, is not among the
    best; of equal values the one that was saved first is better. Metrics are stored with the checkpoint.

    A Checkpointer continues from the checkpoints that it loaded or saved; load() of any step counts for all
    existing ones. If there are others of the same or later steps, save() raises FileExistsError.

    fresh: start over in this directory. The first save then moves the existing checkpoints into a separate
    folder, `directory`/aside-TIME, which Checkpointer can open, and deletes nothing. A load() before that
    continues the earlier run instead, and warns (RuntimeWarning) that fresh has no effect.

    volumes: directories, ideally one on each disk, over which the bytes are spread evenly; None: those of the
    existing directory, none for a new one.

    process_group: the torch.distributed group whose ranks save together; None is the default group if there
    is one, False this process alone. With a group, the constructor, save() and load() are collective, and
    each writer writes an equal share of the bytes. The state must be the same on all ranks: names, dtypes,
    shapes and values that are not tensors are compared, the values of tensors are not. writers: "rank" (all),
    "node" (the first rank of each machine), or a list of ranks. If a rank fails or sends no heartbeat for
    `timeout` seconds, the save fails on all others with an error that names it; earlier checkpoints stay
    intact. Ranks are counted within the process group, here and in errors.

    incremental: write only what changed since the last checkpoint of this directory, and link the rest (hard
    links): each step still loads alone, and removing one breaks no other. Pays for frozen weights, adapters,
    and embeddings; the state of an optimizer usually changes everywhere. full_every: bytes are written again
    once `full_every` - 1 checkpoints have shared them (None: never), which bounds what damage to one file can
    reach. Earlier versions of trunkline reject such checkpoints.

    staging_bytes: memory for background saves (int or str; None: half of the engine's pinned budget); larger
    states are streamed through it. Thread-safe, except for the order of collective calls.
    """

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        *,
        keep: SupportsIndex | None = 3,
        keep_every: SupportsIndex | None = None,
        keep_best: KeepBest | None = None,
        fresh: bool = False,
        volumes: "Sequence[str | os.PathLike[str]] | None" = None,
        process_group: Any = None,
        writers: Writers = "rank",
        timeout: float = 300.0,
        incremental: bool = False,
        full_every: SupportsIndex | None = None,
        staging_bytes: "int | str | None" = None,
        engine: Engine | None = None,
    ) -> None:
        """Open the directory, which need not exist: only the first save creates anything.

        Waits for saves into it that this process has begun with an earlier Checkpointer; their errors are not
        raised here.

        Raises TypeError or ValueError, which names the argument, for invalid ones; NotADirectoryError for a
        file; Error with ENOTEMPTY for a directory that holds other files and no checkpoints; Error if it
        cannot be read, or if only some ranks open it, after the process group's timeout. Warns
        (RuntimeWarning) of a copy whose shards on volumes belong to another directory, of steps whose folders
        are not named like step-00000300, and of files that could not be cleaned up.
        """
        rules = Rules.of(keep, keep_every, keep_best)
        increments = IncrementRules.of(incremental, full_every)
        fresh = bool_argument(fresh, "fresh")
        timeout = seconds_argument(timeout)
        if timeout <= 0:
            raise ValueError(f"timeout: must be more than 0 seconds, not {timeout!r}")
        check_staging_bytes(staging_bytes)
        check_engine(engine)
        self.directory = Path(path_name(directory, "directory"))
        self._engine = engine
        names = names_of(volumes)
        self._ranks = ranks_of(process_group, timeout, self.directory)
        chosen = writers_of(writers, self._ranks)
        self._last: SaveHandle | None = None
        self._turn = Turn()
        _checkpointers.add(self)
        self._wants_fresh = fresh  # the store decides whether the next save starts over
        self._ignored: set[str] = set()  # folders that a warning has named
        self._must_check_early = True  # save() checks for other checkpoints first; not after a load() or save
        self._absolute = absolute_path(directory, "directory")
        self._wait_for_others()
        store = open_store(self._ranks, self._absolute, names, chosen, rules, fresh, increments)
        self._context = SaveContext(store, self._ranks, chosen, rules, staging_bytes, engine, increments)
        self._context.rebase(self._ranks.collectives())
        if self._ranks.rank == 0:
            if (about_disks := about_missing_disks(names or ())) is not None:
                warn_without_failing(about_disks, caller())
            for text in _collect(store):
                warn_without_failing(text, caller())
            self._warn_of_ignored()

    def save(
        self, step: SupportsIndex, state: Any, *, block: bool = False, metrics: Metrics | None = None
    ) -> SaveHandle:
        """Save `state` as the checkpoint of `step` (0 .. 2^63 - 1), and return a handle to it.

        `state` is any nesting of dict, OrderedDict, Counter, list and tuple. It may hold None, bool, int,
        float, complex, str, bytes; set, frozenset and keys of these (or tuples of them); torch.Size,
        torch.dtype, torch.device; tensors of the CPU and of CUDA GPUs; arrays, scalars and dtypes of numpy.
        So state_dict() of modules and optimizers can be saved. Nothing is pickled. The tensors are copied in
        the background, those on GPUs ordered after the current stream: they may change once
        handle.wait_staged() has returned (the next forward pass changes buffers of BatchNorm). If a tensor
        changes earlier, the save fails; but changes of a small part of it, through `.data` or numpy, can go
        unnoticed, and the checkpoint is then a mixture of old and new values. The checkpoint is durable once
        handle.wait() has returned. An existing checkpoint of the step is replaced atomically. A
        RuntimeWarning names older checkpoints that are due for removal but cannot be removed, or cannot be
        read.

        Raises FileExistsError, having written nothing, if the directory holds checkpoints of this step or
        later ones that this Checkpointer has neither loaded nor saved: from the first save() itself, or from
        handle.wait() if another job has saved there meanwhile. handle.wait() also raises Error with ENOSPC or
        EDQUOT if there is no space, and RankError, which names the rank, if another rank fails, dies or makes
        another call. Earlier checkpoints stay intact.

        block: return only when it is durable; needs no staging memory for tensors that direct I/O can write.
        metrics: numbers by name, such as {"loss": 0.3}, which are stored with the checkpoint, for keep_best
        and metrics(). They must be the same on all ranks. With keep_best they must have its metric
        (ValueError); leave them out for a step that was not measured.

        Waits for the save before, and raises its error unless that was raised already: then nothing is saved,
        and the next call saves. Likewise for failed saves of a deleted Checkpointer into this directory;
        failures of other saves are not raised here. Raises Unsupported, which names the place in the state,
        for objects of other types. In a signal handler it raises Error immediately if the handler interrupted
        a call of this thread that has begun a save; while that call only waits for the save before, in one
        process, the handler's save comes first.
        """
        check_threads_run(f"save step {shown_step(step)} to {self._absolute}")
        self._turn.check(f"save step {shown_step(step)}", self._absolute)
        with self._turn.lock:
            self._turn.begin(f"save({shown_step(step)})")
            try:
                with span("checkpoint", "Checkpointer.save", f"step {shown_step(step)} to {self.directory}"):
                    handle = self._begin_together(step, state, block, metrics)
            finally:
                self._turn.end()
        if block:
            handle._wait_or_cancel()
        return handle

    def __enter__(self) -> "Self":
        """Return the Checkpointer: leaving the block waits for the running save, as wait() does."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the running save, and raise its error unless another one ends the block.

        Then the failure of the save is added to that as a note, and reported at exit.
        """
        if error is None:
            self.wait()
            return
        last = self._last_save()
        if last is not None and not self._turn.is_within_call():
            last._join()
            if last._error is not None and not last._was_cancelled():
                add_note(error, f"{last._what} failed as well: {last._why()}")

    def __reduce__(self) -> Any:
        """Raise TypeError: a Checkpointer refers to running saves, and to what this process has loaded."""
        raise TypeError(
            f"a Checkpointer cannot be pickled or copied; open the directory again instead: "
            f"Checkpointer({str(self.directory)!r})"
        )

    def wait(self) -> None:
        """Wait for the running save, if there is one, and raise its error.

        Does not raise for a cancelled save; its handle raises Cancelled.

        Raises Error immediately in a signal handler that interrupted a save() of this thread.
        """
        self._turn.check("wait", self._absolute, during="save")
        last = self._last_save()
        if last is not None:
            last._join()
            self._ranks.await_end()  # the next process group must not connect to the store of this one
            if not last._was_cancelled():
                last.wait()

    def load(
        self,
        step: SupportsIndex | None = None,
        into: Any = None,
        *,
        keys: Keys | None = None,
        device: Device = "cpu",
        verify: Verify = True,
    ) -> Any:
        """Return the state of `step`; None: of the checkpoint that was committed last.

        `into`: a state of the same structure, whose tensors are filled in place, on any device, so that no
        second copy is needed; the returned state holds them. If the state is a dict, `into` may have some of
        its keys: only what is under those is read and returned; below them nothing may be missing. keys:
        load, and read, only these parts: a name such as "model" or "optimizer.state.0", which selects
        everything below it, a list of names, or a function of the name of each tensor and value that returns
        whether to load it. The returned state is nested as the whole, {"model": ...}, without what is not
        selected; lists and tuples keep their length, with None in place of the rest. ValueError for a name
        that is not there. Checksums cover pieces of 1 MiB, which are read whole unless verify=False. device:
        where the tensors are without `into`: "cpu", or a GPU ("cuda", "cuda:1"). Tensors that shared memory
        when they were saved share memory again; those of `into` stay as they are. verify: compare every byte
        with its checksum.

        An `into` that does not match is rejected before any of its tensors changes. Checksums are verified as
        the bytes arrive in the tensors: after Corrupt, an I/O error or Ctrl-C these may be a mixture of
        former, loaded and damaged values, and must be loaded again before they are used; the error says so.
        verify="first" reads and verifies everything once before it reads into the tensors, which takes twice
        the time; without `into` it is the same as True.

        Raises FileNotFoundError if there is no such checkpoint; Corrupt, naming file, tensor and chunk, if it
        is damaged or lacks a file (also if its disk is not mounted): never start over because of that;
        ValueError for an `into` that does not match: it must have every key of the state. load() without a
        step is collective on a process group, whose ranks agree on the checkpoint; it raises RankError, which
        names the rank, if one fails, does not make the call or, after several attempts, still finds another
        checkpoint of that step because another process is saving. load(step) concerns this rank alone. Each
        rank reads by itself. Waits for running saves of this process into the directory.
        """
        if verify not in (True, False, "first"):
            raise ValueError(f'verify: must be True, False or "first", not {verify!r}')
        target = device_argument(device)
        self._turn.check("load", self._absolute, during="save" if self._ranks.size == 1 else "")
        with span("checkpoint", "Checkpointer.load", self._absolute):
            selection = None if keys is None else Selection(keys)
            return self._load_step(step, into, Wanted(target, verify, selection))

    def _load_step(self, step: SupportsIndex | None, into: Any, wanted: Wanted) -> Any:
        store = self._context.store
        self._wait_for_saves()
        if step is None and self._ranks.rank == 0:
            self._warn_of_ignored()
        together = step is None and self._ranks.size > 1
        is_text = isinstance(step, str)
        hint = "; leave it out for the last one" if is_text else "; pass a state to fill as into="
        chosen = None if step is None else step_argument(step, hint)
        if together:
            # Checkpoints that another process saves from now on are not loaded.
            chosen, position, manifest = self._open_same()
        begun = False
        while True:
            if not together:
                # Read the directory once for both: checkpoints that another job saves later are not this
                # run's.
                position, manifest = store.position(), None
                chosen = position[1] if step is None else chosen
            if chosen is None:
                raise self._nothing_yet()
            try:
                if not together:
                    manifest = self._open_manifest(chosen)
                if self._ranks.size > 1 and not begun:
                    self._context.begin_load(chosen)  # another rank may succeed
                    begun = True
                with self._naming_other_steps(chosen):
                    state = self._load(chosen, manifest, into, wanted)
                store.continue_from(position)
                if self._wants_fresh and self._must_check_early and self._ranks.rank == 0:
                    warn_without_failing(
                        f"{self._absolute}: fresh=True has no effect, since load() continues from step "
                        f"{chosen}; to start over, do not load; to continue, omit fresh=True",
                        caller(),
                    )
                self._must_check_early = False
                if self._ranks.size > 1:
                    self._context.complete_load(chosen, shards.identity(manifest))
                why = "the last one" if step is None else "as requested"
                _log.info("%s: step %d is loaded (%s)", self._absolute, chosen, why)
                return state
            except (FileNotFoundError, NotADirectoryError) as error:
                why = f"{error.filename} is missing ({errno.errorcode.get(error.errno or 0)})"
                _log.info("%s: step %d is read again unless it is damaged: %s", self._absolute, chosen, why)
                self._check_replaced(chosen, manifest, error.filename, why, step is None, together)
                if together:
                    raise self._differs_on(self._ranks.rank, chosen) from None

    def _check_replaced(
        self,
        step: int,
        manifest: CheckpointManifest | None,
        path: str,
        why: str,
        any_step: bool,
        together: bool = False,
    ) -> None:
        """After a file of `step` was not found: return if another process changed the step, to read again.

        any_step: the last step is read, which may be another one by now. together: all ranks read `step`, so
        this one cannot read another.

        Raises Corrupt if the step has not changed. FileNotFoundError tells callers that there is nothing to
        continue from, so it is raised only if the whole step is gone, and no other one will do.
        """
        try:
            now = self._open_manifest(step)
        except FileNotFoundError:
            if not any_step:
                raise
            if together:
                raise self._missing_on(self._ranks.rank, step) from None
            return  # another process removed it, since there is a later one
        if manifest is not None and _are_same(now, manifest):
            raise self._lacks_shard(step, manifest, path, why)

    def _missing_on(self, rank: int, step: int) -> Error:
        return rank_error(
            rank,
            f"{self._absolute}: step {step}, which the ranks load, does not exist on rank {rank}; check that "
            "the directory is mounted on its machine, and that no other process saves into it meanwhile",
        )

    def _differs_on(self, rank: int, step: int | None) -> Error:
        return rank_error(
            rank,
            f"{self._absolute}: rank {rank} finds a different checkpoint of step {step} than the ranks "
            "agreed to load; another process is saving into the directory, or it is a different directory on "
            "that rank's machine. Stop the other process, and load again on all ranks",
        )

    def _newer_than(self, step: int | None, commit: int) -> str | None:
        """Return why the last checkpoint of rank 0 (None: it finds none) is not the last one, or None."""
        while (newest := self.latest()) not in (None, step):
            assert newest is not None
            with suppress(FileNotFoundError):  # another process removed it: there is a later one, or none
                if self._context.store.open_manifest(newest).commit <= commit:
                    return None
                theirs = "no checkpoint" if step is None else f"step {step} as the last one"
                return (
                    f"{self.directory}: rank {self._ranks.rank} finds step {newest}, and rank 0 {theirs}; "
                    "check that the directory is mounted on the machine of rank 0 and is the same one on all "
                    "ranks, and that no other process saves into it meanwhile, then load again on all ranks"
                )
        return None

    def _open_same(self) -> tuple[int | None, Any, Any]:
        """Open the last checkpoint on all ranks, the same one: step, position, and manifest."""
        begun = self._ranks.collectives()
        for attempt in range(_MAX_AGREEMENTS):
            opened: list[Any] = []
            if attempt > 0 and self._ranks.rank == 0:
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)  # a network filesystem may be behind

            def decide(opened: list[Any] = opened) -> dict[str, Any]:
                while (step := (position := self._context.store.position())[1]) is not None:
                    with suppress(FileNotFoundError):
                        manifest = self._open_manifest(step)
                        opened[:] = step, position, manifest
                        return {
                            "step": step,
                            "identity": shards.identity(manifest),
                            "commit": manifest.commit,
                        }
                opened[:] = None, None, None
                return {"step": None, "identity": "", "commit": -1}

            def check(decided: dict[str, Any], opened: list[Any] = opened) -> str | None:
                step = decided["step"]
                opened[:] = step, None, None
                if step is None:
                    return self._newer_than(None, decided["commit"])
                position = self._context.store.position()
                try:
                    manifest = self._open_manifest(step)
                except FileNotFoundError:
                    return str(self._missing_on(self._ranks.rank, step))
                opened[:] = step, position, manifest
                if shards.identity(manifest) != decided["identity"]:
                    return str(self._differs_on(self._ranks.rank, step))
                return self._newer_than(step, decided["commit"])

            try:
                differs = self._agree(decide, check=check)
            except BaseException:
                if opened and opened[0] is not None:  # other ranks may know that all agree, and load it
                    self._context.begin_load(opened[0], begun)
                raise
            if differs is None:
                self._context.rebase(begun)
                step, position, manifest = opened
                return step, position, manifest
        raise rank_error(differs["rank"], differs["why"])

    def _lacks_shard(self, step: int, manifest: CheckpointManifest, path: str, why: str) -> Corrupt:
        """Make the error for a missing shard of a committed step."""
        owner = self._context.store.why_gone(path, step)
        why += f": {owner}" if owner else "; mount its disk if it is not mounted"
        why += self._other_steps(step)
        error = Corrupt(None, f"step {step} of {self._absolute} lacks a shard: {why}", path)
        paths = manifest.shard_paths()
        error.tensor = shards.first_tensor(manifest, paths.index(path)) if path in paths else None
        return error

    def _other_steps(self, step: int) -> str:
        """Return a text that names the other steps, for errors about a damaged one."""
        others = [str(each) for each in self.steps() if each != step]
        if len(others) > 6:
            others[3:-3] = ["..."]
        if not others:
            return "; there is no other step"
        named = f"step {others[0]}" if len(others) == 1 else f"steps {', '.join(others)}"
        return f"; {named} of this directory, not verified here, can be loaded with load(step)"

    @contextmanager
    def _naming_other_steps(self, step: int) -> Iterator[None]:
        try:
            yield
        except (Corrupt, Format) as error:
            others = ""
            with suppress(Error):
                others = self._other_steps(step)
            if others not in str(error):
                reword(error, f"{error}{others}")
            raise

    def _open_manifest(self, step: int) -> CheckpointManifest:
        with self._naming_other_steps(step):
            return self._context.store.open_manifest(step)

    def _load(self, step: int, manifest: CheckpointManifest, into: Any, wanted: Wanted) -> Any:
        where = f"{self._absolute}, step {step}"

        def verify_first() -> None:
            self.verify(step)
            if not _are_same(self._open_manifest(step), manifest):
                # The step that was verified is not the one to read.
                gone = manifest.shard_paths()[:1] or [where]
                raise exception_of("system", errno.ENOENT, f"{where} was replaced meanwhile", gone[0])

        return load_state(manifest, where, into, wanted, self._engine, verify_first)

    def open_tensors(
        self,
        step: SupportsIndex | None = None,
        *,
        device: Device = "cpu",
        verify: Literal["auto"] | bool = "auto",
    ) -> TensorReader:
        """Open a step (None: the last) to read single tensors and slices, as trunkline.open_tensors does.

        Concerns this rank alone, and does not count as loading. Raises FileNotFoundError if there is no such
        checkpoint. Waits for running saves of this process into the directory.
        """
        if verify not in ("auto", True, False):
            raise ValueError(f'verify: must be "auto", True or False, not {verify!r}')
        target = device_argument(device)
        self._turn.check("open_tensors", self._absolute, during="save")
        self._wait_for_saves()
        chosen = self._context.store.latest() if step is None else step_argument(step)
        if chosen is None:
            raise self._nothing_yet()
        source = StepSource(
            f"{self._absolute}/{step_name(chosen)}",
            self._open_manifest(chosen),
            device=target,
            engine=self._engine,
            verify=verify is not False,
        )
        return TensorReader(source, target, verifies_slices=verify is True)

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was committed last; None if there is none.

        Does not wait for a running save, so a training may log the result. To resume, call load() without a
        step, which waits for the saves of this process. Before it returns None, latest() waits for them too.
        """
        latest = self._context.store.latest()
        if latest is None:  # users decide by this to start over
            self._wait_for_saves()
            latest = self._context.store.latest()
        return latest

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending. Waits like latest() if there are none."""
        steps = self._context.store.steps()
        if not steps:
            self._wait_for_saves()
            steps = self._context.store.steps()
        return steps

    def metrics(self, step: SupportsIndex) -> dict[str, float]:
        """Return the metrics that the checkpoint of `step` was saved with; empty if there were none.

        Raises FileNotFoundError if there is no such checkpoint.
        """
        return self._open_manifest(step_argument(step)).metrics

    def best(self) -> int | None:
        """Return the step with the best value of the metric of keep_best; None if no step has one.

        Of all checkpoints in the directory; one that is damaged does not count. Raises ValueError without
        keep_best. Waits like latest() if there are no checkpoints.
        """
        rules = self._context.rules
        if rules.best is None:
            raise ValueError(
                'best(): needs keep_best=(metric, "min" or "max", how many), to know what is best'
            )
        found = []
        for step in self.steps():
            with suppress(FileNotFoundError, Corrupt, Format):  # removed meanwhile, or damaged
                manifest = self._context.store.open_manifest(step)
                found.append((manifest.commit, step, manifest.metrics))
        return rules.best_of(
            [(step, measured) for _, step, measured in sorted(found, key=lambda each: each[0])]
        )

    def verify(self, step: SupportsIndex | None = None) -> None:
        """Compare every byte of a checkpoint (None: the last) with its checksum, without keeping any.

        Raises Corrupt, naming file, tensor and chunk, for the first that differs, or for a missing file;
        FileNotFoundError if there is no such checkpoint; Error if a file cannot be read. Concerns this rank
        alone.
        """
        asked = None if step is None else step_argument(step)
        with span("checkpoint", "Checkpointer.verify", self._absolute):
            self._verify(asked)

    def _verify(self, asked: int | None) -> None:
        while True:
            chosen = self.latest() if asked is None else asked
            if chosen is None:
                raise self._nothing_yet()
            manifest = None
            missing: dict[str, Any] | None = None
            try:
                manifest = self._open_manifest(chosen)
                found = self._context.store.verify(chosen, engine=self._engine)["mismatches"]
                missing = next((each for each in found if each["kind"] == "missing"), None)
            except FileNotFoundError as gone:
                missing = {"path": gone.filename, "message": str(gone)}
            if missing is None:
                break
            self._check_replaced(chosen, manifest, missing["path"], missing["message"], asked is None)
        if not found:
            return
        # A file that cannot be read may be intact: Corrupt is raised only for a file that is not.
        first = next((each for each in found if each["kind"] != "unread"), found[0])
        message = first["message"] + (f"; and {len(found) - 1} more" if len(found) > 1 else "")
        error: Any
        if first["kind"] == "unread":
            error = exception_of("system", first["errno"] or errno.EIO, message, first["path"])
        else:
            error = Corrupt(None, message, first["path"])
        error.tensor, error.chunk = next(iter(first["tensors"]), None), first["chunk"]
        with self._naming_other_steps(chosen):
            raise error

    def delete(self, step: SupportsIndex) -> None:
        """Remove the checkpoint of `step`, durably: also the last one, and one that is damaged.

        Raises FileNotFoundError if there is no such checkpoint; Error with EBUSY while another process saves;
        Unsupported in a copy whose shards belong to the original. Collective on a process group: rank 0
        raises these errors, and the other ranks RankError with the error of rank 0; all raise RankError if a
        rank dies or makes another call. Waits for a running save.
        """
        chosen = step_argument(step)
        self._turn.check("delete", self._absolute, during="save" if self._ranks.size == 1 else "")
        last = self._last_save()
        if last is not None:
            last._join()
        store = self._context.store
        self._agree(lambda: retry_while_locked(lambda: store.remove(chosen)), f"delete({chosen})")

    def __repr__(self) -> str:
        return f"<trunkline.Checkpointer {str(self.directory)!r} {self._context.rules}>"

    def _begin_together(
        self, step: SupportsIndex, state: Any, block: bool, metrics: Metrics | None
    ) -> SaveHandle:
        # Before anything that can fail on one rank alone, so that the others learn of it.
        exchange = self._ranks.exchange(f"save({shown_step(step)})", self._context.collectives())
        before = self._last
        try:
            if exchange is not None:
                exchange.__enter__()
            return self._begin(step, state, block, metrics, exchange)
        except BaseException as error:
            # A save that has begun when a signal handler raises goes on, and ends its exchange itself.
            goes_on = self._last is not before and self._last_save() is not None
            if exchange is not None and not goes_on:
                give_up(exchange, error)
            raise

    def _begin(
        self,
        step: SupportsIndex,
        state: Any,
        block: bool,
        metrics: Metrics | None,
        exchange: Exchange | None,
    ) -> SaveHandle:
        step = step_argument(step, "; the order is save(step, state)")
        block = bool_argument(block, "block")
        measured = metrics_argument(metrics, self._context.rules)
        try:
            self._wait_for_last(step)
            raise_unobserved(self, self._absolute)
        except Exception as error:
            mark_earlier(error)
            raise
        if self._must_check_early and self._ranks.rank == 0:
            # Before the training goes on; the save itself checks again.
            self._context.store.check_continues(step)
        with span("checkpoint", "describe the state"):
            job = StepSave(step, state, measured, self._context, not block, exchange)
        # Before it begins: otherwise a signal handler that raises in between would hide it from the next
        # save.
        self._last = handle = SaveHandle(
            f"step {step} to {self.directory}",
            f"the checkpoints in {self.directory} are as they were before",
            f"step {step} to {self._absolute}",
            owner=self,
            directory=self._absolute,
        )
        try:
            handle._start(job)
        except BaseException:
            if handle._done.is_set() or not handle._started:
                self._last = None  # it has ended, and wait() need not report it
            raise
        self._must_check_early = False
        return handle

    def _wait_for_last(self, step: int) -> None:
        """Wait for the save before, and those of signal handlers meanwhile; raise unobserved errors."""
        while (last := self._last_save()) is not None:
            if self._ranks.size == 1:  # others would have to save in their handlers at the same point
                self._turn.pause()
            last._join()
            self._turn.begin(f"save({step})")
            if self._last is not last:
                continue
            if last._error is not None:
                self._must_check_early = True
            is_news = not getattr(last._error, "earlier", False) and not last._was_interrupted()
            if last._error is not None and not is_news and not last._observed:
                last._observed = True
                warn_without_failing(f"{last._what}: {last._why()}", caller())
            if not last._observed:
                try:
                    last.wait()
                except Error as error:
                    more, _ = take_failures(self, self._absolute)
                    raise _of_the_save_before(error, step, more) from error
            self._last = None

    def _nothing_yet(self) -> Exception:
        why = f"{self._absolute} has no checkpoint yet"
        if not Path(self._absolute).exists():
            why += ": the directory does not exist (is the path mistyped?)"
        elif aside := sorted(Path(self._absolute).glob("aside-*")):
            why += f": an earlier run was set aside in {aside[-1]}; open that directory to load it"
        return exception_of("system", errno.ENOENT, why, self._absolute)

    def _warn_of_ignored(self) -> None:
        """Warn once of each folder that is ignored: it has an unusual name, or is a dangling link."""
        why = {
            name: f"{name} is ignored: rename it to {right} to make it count"
            for name, right in misnamed_steps(self._absolute).items()
        }
        for name, target in dangling_steps(self._absolute).items():
            why[name] = (
                f"{name} is ignored: it is a symbolic link to {target}, which does not exist; mount that "
                "disk before you continue from an older step, or remove the link"
            )
        for name, text in sorted(why.items()):
            if name not in self._ignored:
                self._ignored.add(name)
                warn_without_failing(f"{self._absolute}: {text}", caller())

    def _start_over(self) -> None:
        """Forget what was loaded and saved: the existing checkpoints belong to an earlier run.

        With fresh=True the next save sets them aside, also after a load() or an earlier save.
        """
        last = self._last_save()
        if last is not None:
            last._join()
        if self._ranks.rank == 0:
            self._context.store.start_over(self._wants_fresh)
        self._must_check_early = True
        self._context.forget_loads()

    def _last_save(self) -> SaveHandle | None:
        """Return the save that was started last, which may have ended; None if there is none to wait for."""
        last = self._last  # read once: a signal handler or another thread may replace it
        return last if last is not None and last._started else None

    def _wait_for_saves(self) -> None:
        """Wait for saves of this process here, but not for a call that a signal handler interrupts."""
        last = self._last_save()
        if last is not None and not self._turn.is_within_call():
            last._join()
        self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Wait for saves of other Checkpointers of this process into the directory.

        For example after a notebook cell that makes the Checkpointer is run again: reading before these saves
        end would continue from an earlier step.
        """
        await_saves_into(self._absolute, but=self)

    def _agree(
        self,
        decide: Callable[[], Any],
        call: str = "load()",
        check: Callable[[Any], str | None] | None = None,
    ) -> Any:
        """Do what agree() says, in turn with other calls of this Checkpointer."""
        if self._ranks.size == 1:
            return decide()
        self._turn.check(call.partition("(")[0], self._absolute)
        with self._turn.lock:
            self._turn.begin(call)
            try:
                return agree(self._ranks, self._context.collectives(), decide, call, check)
            finally:
                self._turn.end()


def _collect(store: Any) -> list[str]:
    """Remove what a crash left behind, unless another process is saving. Return texts to warn with.

    Errors here do not make opening fail, since reading does not need this; save() raises errors that prevent
    saving. With several ranks, only rank 0 would fail, and the others would wait for it.
    """
    try:
        problems: list[OSError] = store.collect_if_used()["problems"]
    except Unsupported as error:  # a copy: the original may remove shards that it needs
        return [str(error)]
    except Error as error:  # no other OSError: a signal handler may raise TimeoutError
        problems = [] if error.errno in _READ_ONLY else [error]
    return warnings_of(problems, store.directory)


def _are_same(one: CheckpointManifest, other: CheckpointManifest) -> bool:
    # The number of a commit is reused once that checkpoint is deleted; names of shards are not.
    return one.commit == other.commit and one.shard_paths() == other.shard_paths()


_checkpointers: "weakref.WeakSet[Checkpointer]" = weakref.WeakSet()


def _forget_parent() -> None:
    for checkpointer in list(_checkpointers):
        checkpointer._turn.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)
