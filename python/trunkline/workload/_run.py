"""Runs a workload. Of a training, first a proof of the emulator, then the workload."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline._numbers import check_positive
from trunkline._progress import Progress
from trunkline.workload._batch_memory import check_memory as check_batch_memory
from trunkline.workload._checkpoint_folder import CheckpointFolder
from trunkline.workload._checkpoint_results import saved_results
from trunkline.workload._checkpoint_run import (
    check_memory,
    checkpoint_document,
    ranked_shape,
    run_checkpoints,
    saving,
)
from trunkline.workload._data_files import directories_of
from trunkline.workload._inference_run import run_inference
from trunkline.workload._launcher import Launcher, LocalLauncher
from trunkline.workload._phase import Rank
from trunkline.workload._results import document_of, phase_results
from trunkline.workload._samples import found_workload
from trunkline.workload._spec import Workload, check_workload
from trunkline.workload._training import Job, TrainingSaves, check_size, make_phase, steps_of, total_saves

if TYPE_CHECKING:
    from trunkline._types import Path as AnyPath

_PROOF_SECONDS = 1.0
_PROOF_STEPS = (3, 2000)  # at least, at most


def run(
    workload: Workload,
    directories: "Iterable[AnyPath] | None",
    ranks: int | None = None,
    *,
    device_gb_s: float | None = None,
    scale_bytes: int | None = None,
    remove: bool = False,
    checkpoint_directory: "AnyPath | None" = None,
) -> dict[str, Any]:
    """Emulate a workload with the data set in the directories; None: on the null device.

    ranks: accelerators; None: 1, or for a workload of checkpoints all ranks of its model. If they are fewer
    than the model has, they save and restore their part of it.
    device_gb_s: the null device takes as long as a device of so many 10^9 bytes per second would, which all
    ranks share; None: it takes no time.
    scale_bytes: the size of a checkpoint of all ranks; a larger model is made smaller.
    remove: at the end, remove the checkpoints and logs that this run has written.
    checkpoint_directory: where checkpoints are saved; None: in `checkpoints` of each of the directories. A
    workload of checkpoints alone has no data set, so it is passed instead of `directories`.

    Returns the document that `trunkline workload run --json` prints. Raises ValueError if the workload has
    nothing to run, the data set is another one or not complete, or an argument is out of its range;
    NotADirectoryError if checkpoint_directory is a file; FileExistsError if the directory for checkpoints has
    files that no workload has saved; OSError if reading or writing fails or a rank ends.
    """
    return run_with(
        LocalLauncher(),
        workload,
        directories,
        ranks,
        device_gb_s=device_gb_s,
        scale_bytes=scale_bytes,
        remove=remove,
        checkpoint_directory=checkpoint_directory,
    )


def run_with(
    launcher: Launcher,
    workload: Workload,
    directories: "Iterable[AnyPath] | None",
    ranks: int | None,
    *,
    device_gb_s: float | None,
    scale_bytes: int | None,
    remove: bool,
    checkpoint_directory: "AnyPath | None" = None,
) -> dict[str, Any]:
    """As run(), on the ranks of the launcher."""
    check_workload(workload)
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks: must be at least 1, not {ranks}")
    if device_gb_s is not None:
        check_positive("device_gb_s", device_gb_s)
        if directories is not None:
            raise ValueError("device_gb_s: only for the null device; pass None as directories")
    _check_options(workload, scale_bytes, remove, checkpoint_directory is not None)
    places = None if directories is None else directories_of(directories)
    folder = _checkpoint_folder(workload, places, checkpoint_directory)
    if workload.inference is not None:
        if places is None:
            raise ValueError(
                f"{workload.name} runs inference, which needs its data set; pass its directories="
            )
        return run_inference(launcher, workload, places, ranks or 1, remove)
    if workload.train is None and workload.checkpoint is not None:
        if folder is None:
            raise ValueError(f"{workload.name} saves checkpoints, which needs a directory; pass directories=")
        used = list(folder.places) if places is None else places
        return run_checkpoints(launcher, workload, folder, used, ranks, scale_bytes, remove)
    if workload.train is None:
        raise ValueError(
            f"{workload.name} has no training: workflow.train is false in {workload.source}; choose another "
            "workload (trunkline workload list)"
        )
    return _run_training(launcher, workload, places, folder, ranks or 1, device_gb_s, scale_bytes, remove)


def _checkpoint_folder(
    workload: Workload, places: list[Path] | None, checkpoint_directory: "AnyPath | None"
) -> CheckpointFolder | None:
    """Return where checkpoints are saved, None if they are not."""
    if checkpoint_directory is None:
        return None if places is None else CheckpointFolder.below(places)
    if workload.train is None and places is not None:
        raise ValueError(
            f"checkpoint_directory: {workload.name} has no data set, and only saves checkpoints; pass either "
            "checkpoint_directory= or directories="
        )
    if workload.train is not None and places is None:
        raise ValueError(
            "checkpoint_directory: on the null device nothing is saved; pass the directories= of a data set"
        )
    return CheckpointFolder.at(checkpoint_directory, places or [])


def _check_options(workload: Workload, scale_bytes: int | None, remove: bool, has_folder: bool) -> None:
    if workload.checkpoint is None and scale_bytes is not None:
        raise ValueError(
            f"scale_bytes: {workload.name} saves no checkpoints; scale data sets with `generate`"
        )
    if workload.checkpoint is None and has_folder:
        raise ValueError(f"checkpoint_directory: {workload.name} saves no checkpoints")
    if workload.checkpoint is None and workload.inference is None and remove:
        raise ValueError(f"remove: {workload.name} saves no checkpoints, and has no logs")


def _run_training(
    launcher: Launcher,
    workload: Workload,
    places: list[Path] | None,
    folder: CheckpointFolder | None,
    ranks: int,
    device_gb_s: float | None,
    scale_bytes: int | None,
    remove: bool,
) -> dict[str, Any]:
    if places is not None:
        workload = found_workload(workload, places)
    check_size(workload, ranks)
    seed = workload.seed
    reader = workload.reader
    if reader is not None and "random" in (reader.sample_shuffle, reader.file_shuffle):
        seed = int.from_bytes(os.urandom(7), "little")
    job = Job(workload, None if places is None else tuple(places), None, seed, device_gb_s)
    if places is None and device_gb_s is None:
        return document_of(workload, _run(launcher, job, ranks), None, None)
    if places is not None:
        check_batch_memory(workload, launcher.per_machine(ranks))
        # Finds what is missing, and makes the index for all ranks.
        make_phase(job, "train", Rank(0, 1)).close()
    proof = phase_results([each["train"] for each in _run(launcher, _proof(job), ranks)])
    count = total_saves(workload, _steps_per_epoch(workload, ranks))
    if places is None or folder is None or workload.checkpoint is None or count == 0:
        names = None if places is None else [str(each) for each in places]
        return document_of(workload, _run(launcher, job, ranks), proof, names, device_gb_s)
    shape = ranked_shape(workload.checkpoint, ranks, scale_bytes)
    check_memory(workload, shape, launcher.per_machine(ranks))
    with saving(launcher, workload, shape, ranks, folder, count, remove) as saves:
        counts = _run(launcher, replace(job, saves=TrainingSaves(saves.plan, saves.numbers)), ranks)
    return {
        **document_of(workload, counts, proof, [str(each) for each in places]),
        "checkpoints": {
            **checkpoint_document(workload.checkpoint, shape, ranks, saves),
            "save": saved_results(counts),
        },
    }


def _proof(job: Job) -> Job:
    """Return a short run of the same loop on the null device."""
    assert job.workload.train is not None
    seconds = job.workload.train.compute_seconds.mean
    least, most = _PROOF_STEPS
    steps = most if seconds * most <= _PROOF_SECONDS else max(least, int(_PROOF_SECONDS / seconds))
    return Job(job.workload, None, steps, job.order_seed)


def _run(launcher: Launcher, job: Job, ranks: int) -> list[dict[str, Any]]:
    total = sum(steps_of(job.workload, _steps_per_epoch(job.workload, ranks), job.step_limit))
    return launcher.run(job, ranks, Progress(f"running {job.workload.name}", total, "steps"))


def _steps_per_epoch(workload: Workload, ranks: int) -> int:
    assert workload.reader is not None
    dataset = workload.dataset
    return dataset.train.files * dataset.samples_per_file // (workload.reader.batch_size * ranks)
