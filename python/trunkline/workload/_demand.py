"""What accelerators read per second: bandwidth, samples and reads."""

from dataclasses import dataclass

from trunkline.workload._spec import Dataset, Workload

READ_BYTES = 4 << 20  # what the engine reads at most at a time, unless it is tuned


@dataclass(frozen=True)
class Demand:
    """What some accelerators need from storage, all together."""

    gb_s: float  # 10^9 bytes per second
    samples_per_second: float
    reads_per_second: float  # each of at most READ_BYTES

    def times(self, factor: float) -> "Demand":
        """Return the demand of so many times as much work."""
        return Demand(self.gb_s * factor, self.samples_per_second * factor, self.reads_per_second * factor)


def demand_of(workload: Workload) -> Demand:
    """Return what one accelerator needs to compute all the time: a batch in the time of a computation.

    Raises ValueError if the workload has no training, or its computation takes no time.
    """
    reader, train = workload.reader, workload.train
    if reader is None or train is None:
        raise ValueError(
            f"{workload.name} has no training: workflow.train is false in {workload.source}; choose another "
            "workload (trunkline workload list)"
        )
    seconds = train.compute_seconds.mean
    if seconds <= 0:
        raise ValueError(
            f"{workload.name}: train.computation_time is 0, so no bandwidth is enough; set it (overrides=)"
        )
    samples = reader.batch_size / seconds
    dataset = workload.dataset
    return Demand(samples * dataset.read_bytes / 1e9, samples, samples * _reads_per_sample(dataset))


def _reads_per_sample(dataset: Dataset) -> float:
    """Return the reads for a sample; of Parquet, its part of those for a row group."""
    if dataset.format != "parquet":
        return _reads(dataset.record_bytes.mean)
    rows = min(dataset.rows_per_group, dataset.samples_per_file)
    if not dataset.columns:
        return _reads(rows * dataset.record_bytes.mean) / rows
    reads, adjacent = 0, 0
    for column in dataset.columns:  # columns beside each other are read at once
        if column.is_read:
            adjacent += rows * column.sample_bytes
        elif adjacent:
            reads, adjacent = reads + _reads(adjacent), 0
    return (reads + (_reads(adjacent) if adjacent else 0)) / rows


def _reads(nbytes: float) -> int:
    return max(1, -(-round(nbytes) // READ_BYTES))
