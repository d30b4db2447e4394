"""What a workload comes to: bytes, steps, and the bandwidth that its accelerators need."""

from dataclasses import dataclass, replace
from typing import Any

from trunkline._sizes import size
from trunkline.workload._spec import Workload


@dataclass(frozen=True)
class Totals:
    """Sums and rates that follow from a workload file alone."""

    files: int
    samples: int
    bytes: int  # stored, without headers of formats
    steps_per_epoch: int  # each gives every rank a batch; a last one without all its samples is left out
    steps: int
    compute_seconds: float  # of all steps, on each accelerator
    read_bytes: int  # by all ranks, in all epochs
    gb_s_per_accelerator: float  # needed for full utilization

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return dict(self.__dict__)


def totals_of(workload: Workload, ranks: int = 1) -> Totals:
    """Compute the totals of the training; without one, those of the data set alone."""
    dataset, reader, train = workload.dataset, workload.reader, workload.train
    files = dataset.train.files
    samples = files * dataset.samples_per_file
    stored = round(samples * dataset.record_bytes.mean)
    if reader is None or train is None:
        return Totals(files, samples, stored, 0, 0, 0.0, 0, 0.0)
    in_epoch = samples // (reader.batch_size * ranks)
    steps = in_epoch * train.epochs
    if train.total_steps is not None:
        steps = min(steps, train.total_steps)
    seconds = train.compute_seconds.mean
    batch_bytes = reader.batch_size * dataset.read_bytes
    return Totals(
        files,
        samples,
        stored,
        in_epoch,
        steps,
        steps * seconds,
        round(steps * ranks * batch_bytes),
        batch_bytes / seconds / 1e9 if seconds else float("inf"),
    )


def mean_file_bytes(workload: Workload) -> float:
    """Bytes of a file, on average, without headers."""
    return workload.dataset.samples_per_file * workload.dataset.record_bytes.mean


def expected_utilization(workload: Workload, gb_s: float, ranks: int = 1) -> float:
    """The utilization of the accelerators on storage that delivers `gb_s` to all of them together."""
    needed = totals_of(workload, ranks).gb_s_per_accelerator * ranks
    return min(1.0, gb_s / needed) if needed else 1.0


def scaled(workload: Workload, scale_bytes: int) -> Workload:
    """Return the workload with as many files as fit into that size, and samples as they are.

    The files to evaluate with are fewer in the same proportion. Raises ValueError if one file is larger,
    or there is no data set.
    """
    dataset = workload.dataset
    if not workload.has_dataset:
        raise ValueError(f"scale_bytes: {workload.name} has no data set; scale its checkpoints with `run`")
    each = mean_file_bytes(workload)
    files = int(scale_bytes // each)
    if files < 1:
        raise ValueError(
            f"scale_bytes: one file of {workload.name} has {size(each)}, and samples keep their sizes; "
            "choose a larger size"
        )
    valid = dataset.valid.files
    if valid:
        valid = max(1, round(valid * files / dataset.train.files))
    return with_files(workload, files, valid)


def with_files(workload: Workload, train: int, valid: int) -> Workload:
    """Return the workload with these numbers of files."""
    dataset = workload.dataset
    dataset = replace(
        dataset, train=replace(dataset.train, files=train), valid=replace(dataset.valid, files=valid)
    )
    return replace(workload, dataset=dataset)
