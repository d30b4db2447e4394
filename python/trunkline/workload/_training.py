"""An emulated training on one rank: epochs, and the evaluations between them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline.data import Index
from trunkline.workload._data_files import PartName, part_of
from trunkline.workload._phase import Phase, Rank, order_of
from trunkline.workload._samples import open_part, units_of
from trunkline.workload._spec import Evaluation, Workload

_TICK_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """What every rank does."""

    workload: Workload
    directories: tuple[Path, ...] | None  # None: the null device
    step_limit: int | None = None  # less than the workload has
    order_seed: int = 0
    device_gb_s: float | None = None  # of the null device, for all ranks together; None: takes no time


def make_phase(job: Job, name: PartName, rank: Rank) -> Phase:
    """Prepare a phase. Raises ValueError if the data set is not there, or not complete."""
    workload = job.workload
    dataset, reader, train = workload.dataset, workload.reader, workload.train
    assert reader is not None
    assert train is not None
    index: Index | None = None
    if job.directories is not None:
        index = open_part(workload, name, job.directories)
    units = units_of(dataset, part_of(dataset, name).files)
    evaluation = workload.evaluation
    compute = train.compute_seconds
    batch_size = reader.batch_size
    if name == "valid":
        assert evaluation is not None
        compute, batch_size = evaluation.compute_seconds, reader.batch_size_eval
    samples = part_of(dataset, name).files * dataset.samples_per_file
    return Phase(
        name,
        index,
        units,
        batch_size,
        reader.batches_ahead,
        compute,
        order_of(dataset, reader, units, job.order_seed),
        rank,
        workload.skipped_steps,
        workload.seed,
        samples,
        units.samples * dataset.read_bytes,
        None if job.device_gb_s is None else job.device_gb_s / rank.count,
    )


def check_size(workload: Workload, ranks: int) -> None:
    """Raise ValueError if an epoch, or an evaluation, has no step."""
    dataset, reader = workload.dataset, workload.reader
    assert reader is not None
    needs: dict[PartName, tuple[str, int]] = {"train": ("batch_size", reader.batch_size)}
    if workload.evaluation is not None:
        needs["valid"] = ("batch_size_eval", reader.batch_size_eval)
    for name, (key, batch_size) in needs.items():
        samples = part_of(dataset, name).files * dataset.samples_per_file
        if samples < batch_size * ranks:
            raise ValueError(
                f"{workload.name} has {samples} samples in {name}, and a step needs "
                f"{batch_size} for each of {ranks} ranks; make the data set larger, or set a "
                f"smaller reader.{key} with --set"
            )


def steps_of(workload: Workload, steps_per_epoch: int, limit: int | None) -> list[int]:
    """Return the steps of each epoch."""
    assert workload.train is not None
    bounds = [bound for bound in (workload.train.total_steps, limit) if bound is not None]
    left = min([steps_per_epoch * workload.train.epochs, *bounds])
    steps = []
    while left > 0:
        steps.append(min(left, steps_per_epoch))
        left -= steps[-1]
    return steps


def is_evaluated(evaluation: Evaluation | None, epoch: int) -> bool:
    """Whether an evaluation follows this epoch, which counts from 1."""
    if evaluation is None or epoch < evaluation.after_epoch:
        return False
    return (epoch - evaluation.after_epoch) % evaluation.every_epochs == 0


def train(job: Job, rank: Rank, report: Callable[[int], object]) -> dict[str, Any]:
    """Run the training; return the counts of its phases. `report` gets the number of steps now and then.

    Raises OSError if data cannot be read, Cancelled if another rank ended.
    """
    evaluation = job.workload.evaluation
    phases: list[Phase] = []
    begin = time.monotonic()
    try:
        training = make_phase(job, "train", rank)
        phases.append(training)
        if evaluation is not None:
            phases.append(make_phase(job, "valid", rank))
        ready = time.monotonic()
        ticker = _Ticker(training, report)
        for number, steps in enumerate(steps_of(job.workload, training.steps_per_epoch, job.step_limit)):
            training.run_epoch(steps, ticker)
            if is_evaluated(evaluation, number + 1) and job.step_limit is None:
                training.pause()
                phases[1].run_epoch(phases[1].steps_per_epoch, ticker)
                phases[1].pause()
        return {
            "train": training.stats(),
            "evaluation": phases[1].stats() if evaluation is not None else None,
            "open_seconds": ready - begin,
            "wall_seconds": time.monotonic() - ready,
        }
    finally:
        for phase in phases:
            phase.close()


class _Ticker:
    """Reports the steps of a phase, not too often."""

    def __init__(self, phase: Phase, report: Callable[[int], object]) -> None:
        self._phase = phase
        self._report = report
        self._last = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last >= _TICK_SECONDS:
            self._last = now
            self._report(self._phase.steps())
