"""A Checkpointer of torch.distributed.checkpoint whose directory lies on disks that one node each sees."""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, SupportsIndex

from trunkline._arguments import bool_argument
from trunkline._core import Engine, Volume
from trunkline._formats.checkpoint_names import step_name
from trunkline._paths import absolute_path, path_name
from trunkline._tensor_io.memory import CPU
from trunkline.checkpoint.directory.local_checkpointer import LocalCheckpointer as PlainCheckpointer
from trunkline.checkpoint.directory.local_export import Check, Write
from trunkline.checkpoint.directory.local_load import LocalLoading, OnProgress, no_progress
from trunkline.checkpoint.directory.local_save import LocalContext
from trunkline.checkpoint.directory.part import Wanted
from trunkline.checkpoint.directory.step_save import StepSave
from trunkline.checkpoint.nodes.agreement import Entry
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import NOT_SAVED, combine
from trunkline.checkpoint.tiers.drain import DrainStatus
from trunkline.checkpoint.tiers.tier import Tier
from trunkline.dcp import running_saves
from trunkline.dcp._checkpointer import Checkpointer
from trunkline.dcp._node_items import RankItems, collect
from trunkline.dcp._node_reader import NodeReader, SavedStep, load_items
from trunkline.dcp._node_save import ShardedSave
from trunkline.dcp._reader import StorageReader
from trunkline.dcp._run_ranks import RunRanks
from trunkline.dcp._task import Task
from trunkline.dcp._whole_state import WholePlanner, empty_state, nested_state

_BUT = "nothing was loaded"


class LocalCheckpointer(Checkpointer):
    """Checkpoints of a sharded training whose nodes have disks of their own; see Checkpointer."""

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        *,
        local: bool = True,
        keep: SupportsIndex | None = 3,
        volumes: "Sequence[str | os.PathLike[str]] | Volume | None" = None,
        copies: SupportsIndex = 1,
        domain: str | None = None,
        fresh: bool = False,
        timeout: float = 300.0,
        tiers: "Sequence[Tier] | None" = None,
        process_group: Any = None,
        durable: bool = True,
        engine: Engine | None = None,
    ) -> None:
        """Open the directory of this node. Collective. Raises the errors of Checkpointer."""
        assert bool_argument(local, "local")
        if not bool_argument(durable, "durable"):
            raise ValueError("durable: must be True with local=True: nodes agree on what is durable")
        self.directory = Path(path_name(directory, "directory"))
        self._path = Path(absolute_path(directory, "directory"))
        ranks = RunRanks(process_group)
        if isinstance(volumes, Volume):
            volumes = [str(each) for each in volumes.directories]
        self._nodes = _ItemCheckpointer(
            directory,
            ranks=ranks,
            keep=keep,
            volumes=volumes,
            copies=copies,
            domain=domain,
            fresh=fresh,
            timeout=timeout,
            tiers=tiers,
            process_group=process_group,
            engine=engine,
        )
        self._begin_calls(ranks, engine, self._nodes.keep)

    def _staged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state itself: the save copies it, and async_save() waits for that."""
        return state

    def _save_task(self, step: int, call: str, prepared: Callable[[], dict[str, Any]], planner: Any) -> Task:
        def act(task: Task) -> None:
            running_saves.begin(task.future, self._path, f"saving step {step} to {self._path}")
            handle = self._nodes.save(step, self._nodes.collect(call, prepared, planner))
            task.cancellation.watch(handle)
            try:
                handle.wait_staged()
                task.begin()
            finally:
                handle.wait()  # also after an error: the task must not end before the save

        return Task(act)

    def _load(self, state: dict[str, Any], wanted: int | None, planner: Any) -> int:
        return self._nodes.load_into(state, wanted, planner)

    def wait(self) -> None:
        """Wait for the running async_save(), and raise its error, or that of a copy to a tier."""
        super().wait()
        self._nodes.wait()

    def wait_drained(self, timeout: float | None = None) -> None:
        """As Checkpointer.wait_drained()."""
        super().wait()
        self._nodes.wait_drained(timeout)

    def drains(self) -> list[DrainStatus]:
        """As Checkpointer.drains()."""
        return self._nodes.drains()

    def locations(self) -> dict[int, list[str]]:
        """As Checkpointer.locations()."""
        running_saves.await_saves_into(self._path)
        return self._nodes.locations()

    def latest(self) -> int | None:
        """Return the step that load() returns; None if there is none. Collective. Waits for running saves."""
        running_saves.await_saves_into(self._path)
        return self._nodes.latest()

    def steps(self) -> list[int]:
        """Return the steps that can be loaded, ascending. Collective. Waits for running saves."""
        running_saves.await_saves_into(self._path)
        return self._nodes.steps()

    def _delete(self, step: int, call: str) -> None:
        self._nodes.delete(step)

    def restore_copies(self) -> list[int]:
        """As Checkpointer.restore_copies()."""
        running_saves.await_saves_into(self._path)
        return self._nodes.restore_copies()


def export(
    directory: str, step: int | None, key: str | None, check: Check, write: Write, on_progress: OnProgress
) -> dict[str, Any]:
    """Write what is below a key of a step on rank 0, as local_export.export(). Collective."""
    nodes = LocalCheckpointer(directory, keep=None)._nodes
    nodes.export_key = key
    return nodes.export(step, check, write, on_progress)


class _ItemCheckpointer(PlainCheckpointer):
    """The saves of all nodes, each of which has the items of its ranks.

    It does all that trunkline.Checkpointer does for nodes. It is called from the thread of a Task, which no
    signal handler interrupts, just as torch is for other directories. Another thread writes.
    """

    def __init__(self, directory: "str | os.PathLike[str]", *, ranks: RunRanks, **options: Any) -> None:
        self._run_ranks = ranks
        self.export_key: str | None = None
        super().__init__(directory, **options)

    @property
    def keep(self) -> int | None:
        """How many of the last checkpoints are kept; None: all."""
        return self._context.keep

    def collect(self, call: str, prepared: Callable[[], dict[str, Any]], planner: Any) -> RankItems:
        """Return what this rank saves of a state. Collective; raises RankError for errors of other ranks."""

        def work(exchange: Exchange | None) -> RankItems:
            in_memory = bool(self._context.kept_by)  # for sending copies
            return collect(exchange, prepared(), planner, in_memory=in_memory)

        collected: RankItems = self._collective(call, lambda: self._context.together(call, NOT_SAVED, work))
        return collected

    def load_into(self, state: dict[str, Any], step: int | None, planner: Any) -> int:
        """Fill a state from a step (None: the latest), and return the step. Collective."""
        call = f"load({'' if step is None else step})"
        wanted = Wanted(CPU, True, None)
        loaded, _ = self._collective(call, lambda: self._local.load(step, (state, planner), wanted))
        return loaded

    def _process_group(self) -> Any:
        return self._run_ranks.group()

    def _make_loading(self) -> LocalLoading:
        return _Loading(self._context, self._process_group, lambda: self.export_key)

    def _make_job(
        self, step: int, state: Any, metrics: dict[str, float], stage_all: bool, exchange: Exchange | None
    ) -> StepSave:
        assert isinstance(state, RankItems)
        self._has_saved = True
        return ShardedSave(self._run_ranks.group, step, state, metrics, self._context, stage_all, exchange)


class _Loading(LocalLoading):
    """Loads the items that each rank needs."""

    def __init__(
        self, context: LocalContext, group: Callable[[], Any], export_key: Callable[[], str | None]
    ) -> None:
        """`export_key`: returns below which key an export reads; None: all."""
        super().__init__(context, group)
        self._export_key = export_key

    def _read_copy(
        self, exchange: Exchange | None, found: dict[str, Any], save: Entry, into: Any, wanted: Wanted
    ) -> Any:
        """Fill the state from a step in a tier. Every rank reads by itself."""
        copy, _ = self.open_copy(found["tier"], save)
        reader = StorageReader(f"{copy.directory}/{step_name(save.step)}", engine=self._context.engine)
        load_items(reader, reader.read_metadata(), exchange, *into)
        combine(exchange, "loaded", None, lambda _: None, _BUT)
        return into[0]

    def _read_save(
        self,
        exchange: Exchange | None,
        save: Entry,
        there: Mapping[str, list[int]],
        into: Any,
        wanted: Wanted,
        on_progress: OnProgress = no_progress,
    ) -> Any:
        """Fill the state with what this rank needs. into: the state and torch's planner.

        None: return all of it on rank 0, and nothing on the others.
        """
        whole = self.whole_of(exchange, save, list(chain(*there.values())))
        reader = NodeReader(self._context, SavedStep(save, whole, there), exchange, self._group)
        metadata = reader.read_metadata()
        if into is not None:
            load_items(reader, metadata, exchange, *into)
            return into[0]
        where = f"step {save.step} of {self._context.directory}"
        is_first = self._context.ranks.rank == 0
        state = empty_state(metadata, self._export_key(), where) if is_first else {}
        load_items(reader, metadata, exchange, state, WholePlanner(where))
        return nested_state(metadata, state, where) if is_first else state
