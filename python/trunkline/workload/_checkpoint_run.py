"""Runs a workload of checkpoints: saves and restores, on as many ranks as fit this machine."""

import errno
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from trunkline._errors import exception_of
from trunkline._flock import DirectoryLock
from trunkline._progress import Progress
from trunkline.workload._batch_memory import require_memory
from trunkline.workload._checkpoint_folder import (
    CheckpointFolder,
    check_owner,
    check_room,
    model_of,
    only_complete,
    reserve,
    restorable,
)
from trunkline.workload._checkpoint_rank import CheckpointJob, CheckpointPlan
from trunkline.workload._checkpoint_results import model_document, transfer_results
from trunkline.workload._launcher import Launcher
from trunkline.workload._model_shape import ModelShape, rank_bytes, scaled_shape
from trunkline.workload._require_torch import require_torch
from trunkline.workload._spec import Checkpoint, Workload

_PROCESS_BYTES = 300_000_000  # of a rank beside its tensors: torch, and staging memory


def ranked_shape(checkpoint: Checkpoint, ranks: int | None, scale_bytes: int | None) -> ModelShape:
    """Return the shape for so many ranks, with its widths scaled down if that is wanted.

    More ranks than declared hold more copies of the model; fewer are the first ranks of it, as declared.
    Raises ValueError if more ranks are not a multiple of those of one copy.
    """
    shape = checkpoint.shape
    parallelism = shape.parallelism
    if ranks is not None and ranks > parallelism.ranks:
        if ranks % parallelism.model_ranks:
            raise ValueError(
                f"ranks: {ranks} is not a multiple of {parallelism.model_ranks}, the ranks of a copy of "
                "the model (model.parallelism.tensor x pipeline)"
            )
        parallelism = replace(parallelism, data=ranks // parallelism.model_ranks)
        shape = replace(shape, parallelism=parallelism)
    return shape if scale_bytes is None else scaled_shape(shape, scale_bytes)


def run_checkpoints(
    launcher: Launcher,
    workload: Workload,
    folder: CheckpointFolder,
    directories: Sequence[Path],
    ranks: int | None,
    scale_bytes: int | None,
    remove: bool,
) -> dict[str, Any]:
    """Save and restore as the workload says. Returns the document of the run.

    A run that ends early leaves the checkpoints that it completed, and nothing of the others. `remove`: also
    removes those that it completed, at the end. `directories`: for the document.
    """
    checkpoint = workload.checkpoint
    assert checkpoint is not None
    shape = ranked_shape(checkpoint, ranks, scale_bytes)
    count = ranks or shape.parallelism.ranks
    check_memory(workload, shape, launcher.per_machine(count))
    with saving(launcher, workload, shape, count, folder, checkpoint.saves, remove) as saves:
        sources = saves.numbers or restorable(saves.plan.folder, saves.model, count)
        restores = islice(cycle(sources), checkpoint.restores)
        job = CheckpointJob(saves.plan, saves.numbers, tuple(restores), checkpoint.pause_seconds)
        results = _run(launcher, workload.name, job, count)
    nbytes = [each["bytes"] for each in results]
    return {
        "workload": workload.name,
        "source": workload.source,
        "directories": [str(each) for each in directories],
        "ranks": count,
        **checkpoint_document(checkpoint, shape, count, saves),
        "save": transfer_results(nbytes, [each["saves"] for each in results]),
        "restore": transfer_results(nbytes, [each["restores"] for each in results]),
    }


@dataclass(frozen=True)
class Saves:
    """The checkpoints that a run will save."""

    plan: CheckpointPlan
    model: dict[str, Any]
    numbers: tuple[int, ...]
    incomplete: tuple[str, ...]  # of earlier runs
    remove: bool


@contextmanager
def saving(
    launcher: Launcher,
    workload: Workload,
    shape: ModelShape,
    ranks: int,
    folder: CheckpointFolder,
    count: int,
    remove: bool,
) -> Iterator[Saves]:
    """Prepare the folder for so many new checkpoints; at the end, remove what is not complete.

    Raises FileExistsError if the folder has files of others, OSError if there is not enough room.
    """
    assert workload.checkpoint is not None
    require_torch("checkpoints")
    with ExitStack() as held:
        made = hold(folder, held)
        try:
            check_owner(folder)
            existing = folder.numbers()
            incomplete = tuple(folder.path(each).name for each in existing if not folder.is_complete(each))
            check_room(folder, count * sum(sum(rank_bytes(shape, rank)) for rank in range(ranks)))
            first = max(existing, default=0) + 1
            numbers = tuple(range(first, first + count))
            model = model_of(workload.name, shape, workload.seed)
            reserve(folder, model, ranks, numbers)
            meeting = held.enter_context(tempfile.TemporaryDirectory(prefix="trunkline-checkpoints-"))
            plan = CheckpointPlan(
                shape, workload.seed, workload.checkpoint.durable, folder, launcher.meeting(meeting)
            )
            with only_complete(folder, numbers, remove):
                yield Saves(plan, model, numbers, incomplete, remove)
        finally:
            folder.remove_if_empty(made)


def checkpoint_document(
    checkpoint: Checkpoint, shape: ModelShape, ranks: int, saves: Saves
) -> dict[str, Any]:
    """Return what the documents of all runs with checkpoints say of them."""
    declared = replace(checkpoint.shape, parallelism=shape.parallelism)
    return {
        "folder": str(saves.plan.folder.places[0]),
        "model": model_document(declared, shape, ranks),
        "durable": checkpoint.durable,
        "removed": saves.remove,
        "incomplete": list(saves.incomplete),
    }


def hold(folder: CheckpointFolder, held: ExitStack) -> list[Path]:
    """Make the folders, and lock them until `held` is closed; return those that did not exist."""
    made = folder.make()
    for place in folder.places:  # another run may share one of them only
        lock = held.enter_context(DirectoryLock(place))
        if not lock.try_lock():
            raise exception_of(
                "system",
                errno.EBUSY,
                f"another process saves checkpoints in {lock.directory}",
                str(lock.directory),
            )
    return made


def check_memory(workload: Workload, shape: ModelShape, ranks: int) -> None:
    """Raise OutOfBudget unless the tensors of so many ranks fit into the memory of this machine."""
    needed = sum(sum(rank_bytes(shape, rank)) + _PROCESS_BYTES for rank in range(ranks))
    require_memory(
        needed,
        f"the tensors of {ranks} rank{'s' if ranks > 1 else ''} of {workload.name}",
        "run fewer ranks, or a smaller model (scale_bytes=)",
    )


def _run(launcher: Launcher, name: str, job: CheckpointJob, ranks: int) -> list[dict[str, Any]]:
    progress = Progress(f"running {name}", len(job.saves) + len(job.restores), "checkpoints")
    return launcher.run(job, ranks, progress)
