"""One phase of an emulated training: training or evaluating, on one rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trunkline._core import StepBarrierMemory, TrainingLoop
from trunkline.data import Index
from trunkline.data.native import has_tfrecord_framing, table_of
from trunkline.workload._data_files import PartName
from trunkline.workload._samples import Units
from trunkline.workload._spec import Dataset, Normal, Reader
from trunkline.workload._step_reduction import StepReduction


@dataclass(frozen=True)
class Rank:
    """Which of several ranks this is, and where they meet: in training, and in evaluations."""

    number: int = 0
    count: int = 1
    barriers: Mapping[PartName, StepBarrierMemory | StepReduction] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """In which order units are read."""

    block: int  # units that stay together; 0: not shuffled
    seed: int
    files_at_a_time: int = 1
    chunk: int = 1  # units of a file that are read before the next file's turn


def order_of(
    dataset: Dataset, reader: Reader, units: Units, seed: int, ranks: int = 1, directories: int = 1
) -> Order:
    """Return the order that the shuffles of a workload come to: with the same seed, the same on all ranks.

    Without a shuffle, files are read in the order of their numbers: those of all directories in turns. Each
    thread that reads TFRecord files reads another one, as TensorFlow's readers do (num_parallel_reads).
    """
    # A file that is read as a whole is the same as its samples.
    if reader.sample_shuffle != "off" or (reader.file_shuffle != "off" and units.per_file == 1):
        return Order(1, seed)
    block = units.per_file if reader.file_shuffle != "off" else 0
    if dataset.format == "tfrecord":
        threads = max(1, reader.threads)
        chunk = max(1, reader.batch_size // threads)
        return Order(block, seed, max(threads * ranks, directories), chunk)
    if block:
        return Order(block, seed)
    return Order(block, seed, directories, units.per_file)


class Phase:
    """A loop over batches of one part of the data set."""

    def __init__(
        self,
        name: PartName,
        index: Index | None,
        units: Units,
        batch_size: int,
        batches_ahead: int,
        compute: Normal,
        order: Order,
        rank: Rank,
        skipped_steps: int,
        seed: int,
        samples: int,
        unit_bytes: float,
        device_gb_s: float | None,
    ) -> None:
        """`index`: None for the null device, or one of `device_gb_s`, which reads `unit_bytes` for a unit."""
        self.steps_per_epoch = samples // (batch_size * rank.count)
        slots, units_per_read = reads_of(batches_ahead, batch_size, units)
        self._loop = TrainingLoop(
            table_of(index) if index is not None else None,
            units=units.count,
            units_per_read=units_per_read,
            ranks=rank.count,
            rank=rank.number,
            block=order.block,
            order_seed=order.seed,
            files_at_a_time=order.files_at_a_time,
            chunk=order.chunk,
            slots=slots,
            tfrecord=index is not None and has_tfrecord_framing(index),
            batch_size=batch_size,
            samples_per_unit=units.samples,
            units_per_file=units.per_file,
            samples_of_last_unit=units.samples_of_last,
            compute_seconds=compute.mean,
            compute_stdev_seconds=compute.stdev,
            compute_seed=seed,  # the same on all ranks, whose steps end together
            skipped_steps=skipped_steps,
            barrier=rank.barriers.get(name),
            unit_bytes=unit_bytes,
            device_gb_s=device_gb_s,
        )

    def run_epoch(
        self,
        steps: int,
        progress: Callable[[], object],
        pauses: Sequence[int] = (),
        paused: Callable[[], object] = lambda: None,
    ) -> None:
        """Run the first `steps` steps of the next epoch. After those in `pauses`, stop for `paused`."""
        self._loop.begin_epoch()
        for stop in sorted({*pauses, steps}):
            while not self._loop.advance(stop):
                progress()
            if stop in pauses:
                self._loop.pause()
                paused()

    def pause(self) -> None:
        """Let what happens until the next epoch count nowhere."""
        self._loop.pause()

    def stats(self) -> dict[str, Any]:
        """Return what the loop counted."""
        return self._loop.stats()

    def steps(self) -> int:
        """Return how many steps have begun."""
        return self._loop.steps()

    def close(self) -> None:
        """End reading. Idempotent."""
        self._loop.close()


def reads_of(batches_ahead: int, batch_size: int, units: Units) -> tuple[int, int]:
    """Return how many reads exist at a time, and how many units each has.

    They are for the batch that computes, and those ahead of it.
    """
    units_per_read = max(1, batch_size // units.samples)
    samples = units_per_read * units.samples
    reads = -(-(batches_ahead + 1) * batch_size // samples)
    return max(2, reads + (1 if samples != batch_size else 0)), units_per_read
