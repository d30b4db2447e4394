"""Runs an emulated training: first a proof of the emulator, then the workload."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trunkline._progress import Progress
from trunkline.workload._batch_memory import check_memory
from trunkline.workload._data_files import directories_of
from trunkline.workload._numbers import check_positive
from trunkline.workload._phase import Rank
from trunkline.workload._ranks import run_ranks
from trunkline.workload._results import document_of, phase_results
from trunkline.workload._samples import found_workload
from trunkline.workload._spec import Workload, check_workload
from trunkline.workload._training import Job, check_size, make_phase, steps_of, train

if TYPE_CHECKING:
    from trunkline._types import Path as AnyPath

_PROOF_SECONDS = 1.0
_PROOF_STEPS = (3, 2000)  # at least, at most


def run(
    workload: Workload,
    directories: "Iterable[AnyPath] | None",
    ranks: int = 1,
    *,
    device_gb_s: float | None = None,
) -> dict[str, Any]:
    """Emulate the training of a workload on the data set in the directories; None: on the null device.

    device_gb_s: the null device takes as long as a device of so many 10^9 bytes per second would, which all
    ranks share; None: it takes no time.

    Returns the document that `trunkline workload run --json` prints. Raises ValueError if the workload has no
    training, the data set is another one or not complete, or an argument is out of its range; OSError if
    reading fails or a rank ends.
    """
    check_workload(workload)
    if ranks < 1:
        raise ValueError(f"ranks: must be at least 1, not {ranks}")
    if device_gb_s is not None:
        check_positive("device_gb_s", device_gb_s)
        if directories is not None:
            raise ValueError("device_gb_s: only for the null device; pass None as directories")
    if workload.train is None:
        raise ValueError(f"{workload.name} has no training: workflow.train is false in {workload.source}")
    places = None if directories is None else directories_of(directories)
    if places is not None:
        workload = found_workload(workload, places)
    check_size(workload, ranks)
    seed = workload.seed
    reader = workload.reader
    if reader is not None and "random" in (reader.sample_shuffle, reader.file_shuffle):
        seed = int.from_bytes(os.urandom(7), "little")
    job = Job(workload, None if places is None else tuple(places), None, seed, device_gb_s)
    if places is None and device_gb_s is None:
        return document_of(workload, _run(job, ranks), None, None)
    if places is not None:
        check_memory(workload, ranks)
        # Finds what is missing, and makes the index for all ranks.
        make_phase(job, "train", Rank(0, 1)).close()
    proof = phase_results([each["train"] for each in _run(_proof(job), ranks)])
    found = None if places is None else [str(each) for each in places]
    return document_of(workload, _run(job, ranks), proof, found, device_gb_s)


def _proof(job: Job) -> Job:
    """Return a short run of the same loop on the null device."""
    assert job.workload.train is not None
    seconds = job.workload.train.compute_seconds.mean
    least, most = _PROOF_STEPS
    steps = most if seconds * most <= _PROOF_SECONDS else max(least, int(_PROOF_SECONDS / seconds))
    return Job(job.workload, None, steps, job.order_seed)


def _run(job: Job, ranks: int) -> list[dict[str, Any]]:
    assert job.workload.reader is not None
    dataset = job.workload.dataset
    per_epoch = dataset.train.files * dataset.samples_per_file // (job.workload.reader.batch_size * ranks)
    total = sum(steps_of(job.workload, per_epoch, job.step_limit))
    progress = Progress(f"running {job.workload.name}", total, "steps")
    shown = 0

    def report(steps: int) -> None:
        nonlocal shown
        progress.add(steps - shown)
        shown = steps

    try:
        return [train(job, Rank(), report)] if ranks == 1 else run_ranks(job, ranks)
    finally:
        progress.close()
