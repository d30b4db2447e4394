"""A directory of checkpoints, one for each step: trunkline.Checkpointer."""

import errno
import inspect
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from trunkline._arguments import (
    bool_argument,
    seconds_argument,
    shown_step,
    step_argument,
)
from trunkline._core import CheckpointStore, Engine
from trunkline._errors import Corrupt, Error, Format, Unsupported, add_note
from trunkline._exit_hook import check_threads_run
from trunkline._formats.checkpoint_names import ignored_steps
from trunkline._formats.selection import Keys, Selection
from trunkline._formats.tensor_reader import TensorReader
from trunkline._logging import Log
from trunkline._paths import about_missing_disks, absolute_path, path_name
from trunkline._tensor_io.memory import Device, device_argument
from trunkline._trace import span
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory.agreement import agree, open_store
from trunkline.checkpoint.directory.arguments import Writers, checked_options, names_of, ranks_of, writers_of
from trunkline.checkpoint.directory.loading import Loading
from trunkline.checkpoint.directory.part import Verify, Wanted
from trunkline.checkpoint.directory.running_saves import await_saves_into
from trunkline.checkpoint.directory.step_increment import IncrementRules
from trunkline.checkpoint.directory.step_reader import StepReader
from trunkline.checkpoint.directory.step_save import SaveContext, StepSave, warnings_of
from trunkline.checkpoint.directory.turn import Turn
from trunkline.checkpoint.lock_wait import retry_while_locked
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import (
    give_up,
    mark_earlier,
)
from trunkline.checkpoint.retention import KeepBest, Metrics, Rules, metrics_argument
from trunkline.checkpoint.save import SaveHandle, raise_unobserved, take_failures
from trunkline.checkpoint.tiers.drain import DrainStatus
from trunkline.checkpoint.tiers.tier import Tier, tiers_argument
from trunkline.checkpoint.tiers.tiers import Tiers

if TYPE_CHECKING:
    from typing_extensions import Self

# Errors that only mean that this user or filesystem cannot write: opening for reading ignores them.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

_log = Log("checkpoint")


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

    local: `directory` and `volumes` are on disks of which each node sees only its own, such as local SSDs.
    Each node writes an equal share of the bytes to its disks, and its ranks divide that. load() reads each
    share on its node, and sends it to the others over the process group: so all nodes that have a share must
    be there, in any order, and others may be. A step counts once all nodes have committed it. Ranks that see
    the same directory are one node. All calls are collective but verify() and drains(): also load(step),
    latest() and steps(), metrics() and best(), locations() and wait_drained(). A process that has saved or
    loaded keeps the directory of its node locked until it ends. Does not support writers, incremental and
    open_tensors().

    copies, domain: with local=True. copies=2: a second node keeps each share as well, and writes it from its
    own memory; so a step survives the loss of any node, and with copies=3 that of any two. load() reads the
    copy where a share is missing or damaged; of damage it warns (RuntimeWarning). After a loss, the next save
    has all copies; restore_copies() restores those of earlier steps. domain: the name of what
    fails at once with this node, such as its rack; copies are kept in different ones. A RuntimeWarning says
    if there are too few nodes or domains for that.

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
    states are streamed through it.

    tiers: directories that some of the steps are copied to in the background, each with its own `keep`: see
    Tier. A step is removed here only when it is there. load(), latest() and steps() count what is in any of
    them. wait_drained() waits for the copies, drains() and locations() say how far they are. With local=True
    every node copies what it has, and load() takes a step of a tier, which may be an earlier one, where nodes
    with the bytes of the latest are missing; it warns of that (RuntimeWarning).

    Thread-safe, except for the order of collective calls.
    """

    def __new__(cls, directory: "str | os.PathLike[str]", *, local: bool = False, **options: Any) -> "Self":
        """Return a LocalCheckpointer if the directory is on a disk that one node alone sees."""
        if cls is Checkpointer and bool_argument(local, "local"):
            from trunkline.checkpoint.directory.local_checkpointer import LocalCheckpointer

            return super().__new__(LocalCheckpointer)  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        *,
        local: bool = False,
        copies: SupportsIndex = 1,
        domain: str | None = None,
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
        tiers: "Sequence[Tier] | None" = None,
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
        rules, fresh, timeout = checked_options(
            keep, keep_every, keep_best, fresh, timeout, staging_bytes, engine
        )
        for name, is_given in (("copies", copies != 1), ("domain", domain is not None)):
            if is_given:
                raise ValueError(f"{name}: needs local=True")
        increments = IncrementRules.of(incremental, full_every)
        self.directory = Path(path_name(directory, "directory"))
        self._engine = engine
        names = names_of(volumes)
        self._ranks = ranks_of(process_group, timeout, self.directory)
        chosen = writers_of(writers, self._ranks)
        self._last: SaveHandle | None = None
        self._turn = Turn()
        register(self)
        self._wants_fresh = fresh  # the store decides whether the next save starts over
        self._ignored: set[str] = set()  # folders that a warning has named
        self._must_check_early = True  # save() checks for other checkpoints first; not after a load() or save
        self._absolute = absolute_path(directory, "directory")
        copied_to = tiers_argument(tiers, self._absolute)
        self._wait_for_others()
        store = open_store(self._ranks, self._absolute, names, chosen, rules, fresh, increments, copied_to)
        self._tiers = Tiers(copied_to, store, fresh, engine)
        self._context = SaveContext(
            store, self._ranks, chosen, rules, staging_bytes, engine, self._tiers, increments
        )
        self._readers = self._make_readers()
        self._loading = Loading(self._absolute, self._context, self._readers)
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
        """Wait for the running save, if there is one, and raise its error, or that of a copy to a tier.

        Does not wait for copies to tiers: wait_drained() does. Does not raise for a cancelled save; its
        handle raises Cancelled.

        Raises Error immediately in a signal handler that interrupted a save() of this thread.
        """
        self._turn.check("wait", self._absolute, during="save")
        last = self._last_save()
        if last is not None:
            last._join()
            self._ranks.await_end()  # the next process group must not connect to the store of this one
            if not last._was_cancelled():
                last.wait()
        self._tiers.raise_failure()

    def wait_drained(self, timeout: float | None = None) -> None:
        """Wait for the running save, as wait() does, and until all that `tiers` are to get is there, durably.

        Begins with what an earlier run has left. Raises the error of the save, or of a copy that fails: the
        next call tries again. Raises Timeout after `timeout` seconds; the copies go on. With several ranks
        rank 0 copies: on the others, this is wait(). With local=True it is collective, and waits for all
        nodes.
        """
        self.wait()
        if self._ranks.rank == 0:
            self._tiers.wait(None if timeout is None else seconds_argument(timeout))

    def drains(self) -> list[DrainStatus]:
        """Return how far copying to each tier is: step, bytes, steps that wait, and the last error."""
        return self._tiers.status()

    def locations(self) -> dict[int, list[str]]:
        """Return the directories that have each step: the Checkpointer's own first, then those of tiers."""
        return self._tiers.locations()

    def load(
        self,
        step: SupportsIndex | None = None,
        into: Any = None,
        *,
        keys: Keys | None = None,
        device: Device = "cpu",
        verify: Verify = True,
    ) -> Any:
        """Return the state of `step`; None: of the checkpoint that was committed last, here or in a tier.

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
        self._turn.check("load", self._absolute, during="save" if self._ranks.size == 1 else "")
        with span("checkpoint", "Checkpointer.load", self._absolute):
            try:
                if verify not in (True, False, "first"):
                    raise ValueError(f'verify: must be True, False or "first", not {verify!r}')
                selection = None if keys is None else Selection(keys)
                wanted = Wanted(device_argument(device), verify, selection)
            except Exception as error:
                if call := self._load_call(step):
                    self._fail_together(call, error)
                raise
            return self._load_step(step, into, wanted)

    def _load_call(self, step: SupportsIndex | None) -> str | None:
        """Return what the first exchange of a load() is called; None: it concerns this rank alone."""
        return "load()" if step is None else None

    def _fail_together(self, call: str, error: BaseException) -> None:
        """Let the other ranks, which wait for this one in a collective call, learn of its error."""
        if self._ranks.size == 1:
            return
        with self._turn.lock:
            self._turn.begin(call)
            try:
                exchange = self._ranks.exchange(call, self._context.collectives())
                if exchange is not None:
                    exchange.__enter__()
                    give_up(exchange, error)
            finally:
                self._turn.end()

    def _load_step(self, step: SupportsIndex | None, into: Any, wanted: Wanted) -> Any:
        self._wait_for_saves()
        if step is None and self._ranks.rank == 0:
            self._warn_of_ignored()
        hint = (
            "; leave it out for the last one" if isinstance(step, str) else "; pass a state to fill as into="
        )
        chosen = None if step is None else step_argument(step, hint)
        loaded, state = self._loading.load(chosen, into, wanted, self._agree)
        if self._wants_fresh and self._must_check_early and self._ranks.rank == 0:
            warn_without_failing(
                f"{self._absolute}: fresh=True has no effect, since load() continues from step {loaded}; to "
                "start over, do not load; to continue, omit fresh=True",
                caller(),
            )
        self._must_check_early = False
        return state

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
        reader, chosen = self._find(None if step is None else step_argument(step))
        if chosen is None:
            raise reader.nothing_yet()
        source = reader.open_tensors(chosen, target, verify is not False)
        return TensorReader(source, target, verifies_slices=verify is True)

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was committed last; None if there is none.

        Does not wait for a running save, so a training may log the result. To resume, call load() without a
        step, which waits for the saves of this process. Before it returns None, latest() waits for them too.
        """
        _, latest = self._find(None)
        if latest is None:  # users decide by this to start over
            self._wait_for_saves()
            _, latest = self._find(None)
        return latest

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending. Waits like latest() if there are none.

        Those of the tiers are among them: locations() says which.
        """
        steps = self._steps()
        if not steps:
            self._wait_for_saves()
            steps = self._steps()
        return steps

    def _steps(self) -> list[int]:
        return self._tiers.steps() if self._tiers else self._context.store.steps()

    def _find(self, step: int | None) -> tuple[StepReader, int | None]:
        """Return what reads a step (None: the last), and its number; None: there is no checkpoint."""
        if not self._tiers:
            return self._readers[0], self._context.store.latest() if step is None else step
        if step is not None:
            return self._readers[self._tiers.source_of(step)], step
        newest = self._tiers.newest()
        return (self._readers[0], None) if newest is None else (self._readers[newest[0]], newest[1].step)

    def metrics(self, step: SupportsIndex) -> dict[str, float]:
        """Return the metrics that the checkpoint of `step` was saved with; empty if there were none.

        Raises FileNotFoundError if there is no such checkpoint.
        """
        chosen = step_argument(step)
        return self._find(chosen)[0].open_manifest(chosen).metrics

    def best(self) -> int | None:
        """Return the step with the best value of the metric of keep_best; None if no step has one.

        Of all checkpoints in the directory; one that is damaged does not count. Raises ValueError without
        keep_best. Waits like latest() if there are no checkpoints.
        """
        rules = self._rules_with_best()
        found = []
        for step in self.steps():
            with suppress(FileNotFoundError, Corrupt, Format):  # removed meanwhile, or damaged
                manifest = self._find(step)[0].store.open_manifest(step)
                found.append((manifest.commit, step, manifest.metrics))
        return rules.best_of(
            [(step, measured) for _, step, measured in sorted(found, key=lambda each: each[0])]
        )

    def _rules_with_best(self) -> Rules:
        rules = self._context.rules
        if rules.best is None:
            raise ValueError(
                'best(): needs keep_best=(metric, "min" or "max", how many), to know what is best'
            )
        return rules

    def verify(self, step: SupportsIndex | None = None) -> None:
        """Compare every byte of a checkpoint (None: the last) with its checksum, without keeping any.

        Raises Corrupt, naming file, tensor and chunk, for the first that differs, or for a missing file;
        FileNotFoundError if there is no such checkpoint; Error if a file cannot be read. Concerns this rank
        alone.
        """
        asked = None if step is None else step_argument(step)
        with span("checkpoint", "Checkpointer.verify", self._absolute):
            if asked is None:
                self.latest()  # waits if there is none
            reader, chosen = self._find(asked)
            reader.verify(chosen if self._tiers else asked)

    def delete(self, step: SupportsIndex) -> None:
        """Remove the checkpoint of `step`, durably: also the last one, and one that is damaged.

        Copies in tiers stay. Waits for one that is to be made, and raises the error if that fails: the next
        call then removes the step nevertheless.

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

        def remove() -> None:
            self._tiers.wait_for_step(chosen)
            retry_while_locked(lambda: store.remove(chosen))

        self._agree(remove, f"delete({chosen})")

    def restore_copies(self) -> list[int]:
        """With local=True: give nodes in the place of lost ones the copies that those had; return the steps.

        Collective. Of each step that can be loaded: a node that has nothing of it gets what a lost one had,
        read from the copies on others and verified by the checksums of the step. Needs load() or save()
        before. Waits for running saves, and until all is copied.

        Raises Corrupt if all copies of a share are damaged, and RankError with the error of another rank; the
        other steps have their copies then. Raises ValueError without local=True.
        """
        raise ValueError("restore_copies() needs local=True: other directories have no copies on other nodes")

    def __repr__(self) -> str:
        return f"<trunkline.Checkpointer {str(self.directory)!r} {self._context.rules}>"

    def _make_readers(self) -> list[StepReader]:
        """Return what reads the directory itself, and then each tier. It does not refer to this object."""
        context, tiers, engine = self._context, self._tiers, self._engine

        def copies_of(step: int) -> list[str]:
            return tiers.locations().get(step, [])[1:] if tiers else []

        def of_tier(store: CheckpointStore) -> StepReader:
            return StepReader(lambda: store, store.directory, engine)

        return [
            StepReader(lambda: context.store, self._absolute, engine, copies_of),
            *map(of_tier, tiers.stores()[1:]),
        ]

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
            self._raise_failed_copies("; this call saved nothing: call it again")
        except Exception as error:
            mark_earlier(error)
            raise
        if self._must_check_early and self._ranks.rank == 0:
            self._check_continues(step)  # before the training goes on; the save itself checks again
        with span("checkpoint", "describe the state"):
            job = self._make_job(step, state, measured, not block, exchange)
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

    def _raise_failed_copies(self, more: str) -> None:
        self._tiers.raise_failure(more)

    def _check_continues(self, step: int) -> None:
        self._context.store.check_continues(step)
        self._tiers.check_continues(step)

    def _make_job(
        self, step: int, state: Any, metrics: dict[str, float], stage_all: bool, exchange: Exchange | None
    ) -> StepSave:
        from trunkline.checkpoint.nodes.node_directory import check_not_of_node

        check_not_of_node(self._absolute, "save into")
        return StepSave(step, state, metrics, self._context, stage_all, exchange)

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

    def _warn_of_ignored(self) -> None:
        """Warn once of each folder that is ignored: it has an unusual name, or is a dangling link."""
        for name, why in ignored_steps(self._absolute).items():
            if name not in self._ignored:
                self._ignored.add(name)
                warn_without_failing(f"{self._absolute}: {name} is ignored: {why}", caller())

    def _start_over(self) -> None:
        """Forget what was loaded and saved: the existing checkpoints belong to an earlier run.

        With fresh=True the next save sets them aside, also after a load() or an earlier save.
        """
        last = self._last_save()
        if last is not None:
            last._join()
        if self._ranks.rank == 0:
            self._context.store.start_over(self._wants_fresh)
            self._tiers.start_over(self._wants_fresh)
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


_checkpointers: "weakref.WeakSet[Checkpointer]" = weakref.WeakSet()


# Not that of __new__(), which help() would show.
Checkpointer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    list(inspect.signature(Checkpointer.__init__).parameters.values())[1:]
)


def register(checkpointer: Checkpointer) -> None:
    """Let a Checkpointer know in forked children that it is the parent's."""
    _checkpointers.add(checkpointer)


def _forget_parent() -> None:
    for checkpointer in list(_checkpointers):
        checkpointer._turn.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)
