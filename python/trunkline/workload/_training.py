"""An emulated training on one rank: epochs, and the evaluations between them."""

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline._core import ReadsInFlight
from trunkline.data import Index
from trunkline.workload._checkpoint_rank import CheckpointPlan, RankState
from trunkline.workload._data_files import PartName, part_of
from trunkline.workload._phase import Phase, Rank, order_of
from trunkline.workload._rank_progress import UNKNOWN, Report
from trunkline.workload._results import published_utilization
from trunkline.workload._samples import open_part, units_of
from trunkline.workload._spec import Checkpoint, Evaluation, Workload

_TICK_SECONDS = 0.2


@dataclass(frozen=True)
class TrainingSaves:
    """The checkpoints that a training saves."""

    plan: CheckpointPlan
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """What every rank does."""

    workload: Workload
    directories: tuple[Path, ...] | None  # None: the null device
    step_limit: int | None = None  # less than the workload has
    order_seed: int = 0
    device_gb_s: float | None = None  # of the null device, for all ranks together; None: takes no time
    saves: "TrainingSaves | None" = None

    end_seconds = 10.0  # for ranks to end when the run ends early: reads that are under way

    def run(self, rank: Rank, report: Report) -> dict[str, Any]:
        """Run the training on one rank; see train()."""
        return train(self, rank, report)


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
        order_of(dataset, reader, units, job.order_seed, rank.count, len(job.directories or (1,))),
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
                f"smaller reader.{key} (overrides=)"
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


def save_steps(checkpoint: Checkpoint | None, epoch: int, steps: int) -> list[int]:
    """Return after which steps of an epoch, which counts from 1, a checkpoint is saved."""
    if checkpoint is None:
        return []
    if checkpoint.every_steps is not None:
        return list(range(checkpoint.every_steps, steps + 1, checkpoint.every_steps))
    since = epoch - checkpoint.after_epoch
    return [steps] if since >= 0 and since % checkpoint.every_epochs == 0 else []


def total_saves(workload: Workload, steps_per_epoch: int) -> int:
    """Return how many checkpoints the training saves."""
    epochs = enumerate(steps_of(workload, steps_per_epoch, None), 1)
    return sum(len(save_steps(workload.checkpoint, epoch, steps)) for epoch, steps in epochs)


def train(job: Job, rank: Rank, report: Report) -> dict[str, Any]:
    """Run the training; return the counts of its phases. `report` gets the steps and the utilization so far.

    Raises OSError if data cannot be read, Cancelled if another rank ended.
    """
    begin = time.monotonic()
    reads = None if job.directories is None else ReadsInFlight()
    counts = _run_epochs(job, rank, report, begin)
    # After the readers are closed, so that reads still in flight at the end are counted.
    return {**counts, "reads_in_flight": None if reads is None else reads.take()}


def _run_epochs(job: Job, rank: Rank, report: Report, begin: float) -> dict[str, Any]:
    workload, evaluation = job.workload, job.workload.evaluation
    with ExitStack() as held:
        training = held.enter_context(closing(make_phase(job, "train", rank)))
        validation = None
        if evaluation is not None:
            validation = held.enter_context(closing(make_phase(job, "valid", rank)))
        saver = None if job.saves is None else held.enter_context(closing(_Saver(job.saves, rank)))
        ready = time.monotonic()
        ticker = _Ticker(training, report)
        for epoch, steps in enumerate(steps_of(workload, training.steps_per_epoch, job.step_limit), 1):
            if saver is None:
                training.run_epoch(steps, ticker)
            else:
                training.run_epoch(steps, ticker, save_steps(workload.checkpoint, epoch, steps), saver.save)
            if validation is not None and is_evaluated(evaluation, epoch) and job.step_limit is None:
                training.pause()
                validation.run_epoch(validation.steps_per_epoch, ticker)
                validation.pause()
        return {
            "train": training.stats(),
            "evaluation": None if validation is None else validation.stats(),
            "checkpoints": None if saver is None else saver.counts,
            "open_seconds": ready - begin,
            "wall_seconds": time.monotonic() - ready,
        }


class _Saver:
    """Saves the checkpoints of a training on one rank, while the training waits."""

    def __init__(self, saves: TrainingSaves, rank: Rank) -> None:
        self._state = RankState(saves.plan, rank)
        self._numbers = iter(saves.numbers)
        self.counts: dict[str, Any] = {"bytes": self._state.nbytes, "saves": [], "spans": []}

    def save(self) -> None:
        """Save the next one."""
        number = next(self._numbers)
        took, own = self._state.save(number)
        end = time.monotonic_ns()  # of the same clock as time lines
        self.counts["saves"].append((number, took, own))
        self.counts["spans"].append((end - took, end))

    def close(self) -> None:
        """Leave the other ranks."""
        self._state.close()


class _Ticker:
    """Reports the steps of a phase, not too often."""

    def __init__(self, phase: Phase, report: Report) -> None:
        self._phase = phase
        self._report = report
        self._last = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last >= _TICK_SECONDS:
            self._last = now
            utilization = published_utilization(self._phase.stats())
            self._report(self._phase.steps(), UNKNOWN if utilization is None else utilization)
