"""What a workload comes to: bytes, steps, and the bandwidth that its accelerators need."""

from dataclasses import dataclass
from typing import Any

from trunkline.workload._spec import Part, Workload


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


def scaled_files(workload: Workload, scale_bytes: int) -> int:
    """The number of files with which the training set has about that size, at least 1.

    Raises ValueError if a single file is larger.
    """
    each = mean_file_bytes(workload)
    if scale_bytes < each:
        raise ValueError(
            f"--scale: one file of {workload.name} has {each / 1e9:.3g} GB, and sizes of samples are kept; "
            "choose a larger size"
        )
    return int(scale_bytes // each)


def part_samples(workload: Workload, part: Part) -> int:
    """Samples in the files of a part."""
    return part.files * workload.dataset.samples_per_file
