"""One rank that answers queries: reads their samples, computes for the declared time, and logs."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy

from trunkline._core import DurationHistogram, SampleReader, sleep_until_ns
from trunkline.data import Index, Loader
from trunkline.data.native import has_tfrecord_framing, table_of
from trunkline.workload._inference_log import InferenceLog
from trunkline.workload._inference_model import check_model, load_model
from trunkline.workload._phase import Rank
from trunkline.workload._rank_progress import Report
from trunkline.workload._samples import open_part, units_of
from trunkline.workload._spec import Inference, Normal, Workload

_TICK_NS = 50_000_000  # between looks at the log and at whether to go on, while waiting
_PURPOSES = {"arrivals": 1, "samples": 2, "compute": 3}


@dataclass(frozen=True)
class InferenceJob:
    """What every rank does: load the model, then answer its queries."""

    workload: Workload
    directories: tuple[Path, ...]
    log_folder: Path | None

    end_seconds = 1.0  # for ranks to end when the run ends early: they do not wait for each other

    def run(self, rank: Rank, report: Report) -> dict[str, Any]:
        """Run it on one rank; `report` gets the number of queries now and then, and may raise."""
        inference = self.workload.inference
        assert inference is not None
        index = open_part(self.workload, "train", self.directories)
        load, model = self._load(inference)
        with ExitStack() as held:
            log = None
            if inference.logging is not None and self.log_folder is not None:
                path = self.log_folder / f"rank{rank.number:05d}.log"
                log = held.enter_context(closing(InferenceLog(inference.logging, path, self.workload.seed)))
            counter = _Counter(log, report)
            answer = _serve if inference.mode == "server" else _run_batches
            answer(self.workload, index, rank, counter)
            del model  # was in memory meanwhile
            return {**counter.counts(), "load": load, "log": None if log is None else log.finish()}

    def _load(self, inference: Inference) -> tuple[dict[str, Any] | None, object]:
        """Return how long it took, and the model."""
        if not inference.model_bytes:
            return None, None
        begin = time.monotonic_ns()
        loaded = load_model(self.directories[0], inference.model_bytes)
        taken = time.monotonic_ns() - begin
        check_model(loaded, self.directories[0], self.workload.seed)
        return {"bytes": inference.model_bytes, "ns": taken}, loaded


class _Counter:
    """Counts queries and their times, and waits."""

    def __init__(self, log: InferenceLog | None, report: Report) -> None:
        self._log = log
        self._report = report
        self._times = {
            name: DurationHistogram() for name in ("latency", "queue", "read", "log", "late_start")
        }
        self._sums = dict.fromkeys(("queries", "samples", "bytes", "compute_ns", "late_ns", "in_time"), 0)
        self.begin = time.monotonic_ns()
        self._end = self.begin

    def start(self) -> None:
        """Begin to count the running time."""
        self.begin = self._end = time.monotonic_ns()

    def wait_until(self, deadline: int) -> None:
        """Sleep until that time of the monotonic clock, in nanoseconds."""
        while (left := deadline - time.monotonic_ns()) > 0:
            sleep_until_ns(deadline - max(0, left - _TICK_NS))
            if left > _TICK_NS:
                self.tick()

    def tick(self) -> None:
        """Let the log look at its interval, and report."""
        if self._log is not None:
            self._log.tick()
        self._report(self._sums["queries"])

    def add_late(self, ns: int) -> None:
        """Count how late a query was begun, or a computation ended, because this process was."""
        self._times["late_start"].add_ns(ns)
        self._sums["late_ns"] += ns

    def append(self, records: int) -> None:
        """Log so many records."""
        if self._log is None:
            return
        begin = time.monotonic_ns()
        self._log.append(records)
        self._times["log"].add_ns(time.monotonic_ns() - begin)

    def add(self, arrived: int, begun: int, read: int, samples: int, nbytes: int, compute: int) -> int:
        """Count a query that has ended now; return its latency in nanoseconds. All are times of the clock."""
        self._end = time.monotonic_ns()
        latency = self._end - arrived
        self._times["latency"].add_ns(latency)
        self._times["queue"].add_ns(begun - arrived)
        self._times["read"].add_ns(read - begun)
        for name, value in (("queries", 1), ("samples", samples), ("bytes", nbytes), ("compute_ns", compute)):
            self._sums[name] += value
        return latency

    def count_in_time(self) -> None:
        """Count a query that has met its deadline."""
        self._sums["in_time"] += 1

    def counts(self) -> dict[str, Any]:
        """Return all that was counted."""
        times = {name: histogram.counts() for name, histogram in self._times.items()}
        return {**self._sums, "running_ns": self._end - self.begin, "times": times}


def arrival_times_ns(rate: float, queries: int, seed: int, rank: int) -> "list[int]":
    """Return when queries arrive, as a Poisson process: gaps are exponentially distributed."""
    uniform = _uniform(seed, rank, "arrivals", queries)
    times: list[int] = numpy.cumsum(-numpy.log1p(-uniform) / rate * 1e9).astype(numpy.int64).tolist()
    return times


def _serve(workload: Workload, index: Index, rank: Rank, counter: _Counter) -> None:
    """Answer queries one at a time, in the order of their arrival."""
    inference = workload.inference
    assert inference is not None
    assert inference.arrival_rate is not None
    reader = SampleReader(
        table_of(index),
        tfrecord=has_tfrecord_framing(index),
        skip_damaged=False,
        engine=None,
        volume=index._volume,
    )
    arrivals = arrival_times_ns(inference.arrival_rate, inference.queries, workload.seed, rank.number)
    samples = _samples(workload, len(index), rank)
    durations = _durations(inference.compute_seconds, workload.seed, rank.number, inference.queries)
    counter.start()
    ended = counter.begin
    for after, compute in zip(arrivals, durations, strict=True):
        arrived = counter.begin + after
        counter.wait_until(arrived)
        begun = time.monotonic_ns()
        counter.add_late(begun - max(arrived, ended))
        _, _, lengths, indices, _ = reader.read(next(samples))
        read = time.monotonic_ns()
        counter.wait_until(read + compute)
        counter.append(len(indices))
        latency = counter.add(arrived, begun, read, len(indices), int(lengths.sum()), compute)
        if inference.deadline_seconds is not None and latency <= inference.deadline_seconds * 1e9:
            counter.count_in_time()
        counter.tick()
        ended = time.monotonic_ns()


def _run_batches(workload: Workload, index: Index, rank: Rank, counter: _Counter) -> None:
    """Compute on batches, which are read ahead."""
    inference = workload.inference
    assert inference is not None
    loader = Loader(
        index,
        inference.batch_size,
        shuffle=inference.shuffle,
        seed=workload.seed,
        rank=rank.number,
        world_size=rank.count,
        drop_last=True,
        prefetch=inference.prefetch,
    )
    durations = _durations(inference.compute_seconds, workload.seed, rank.number, inference.queries)
    with loader:
        counter.start()
        ended = counter.begin
        for batch, compute in zip(islice(_epochs(loader), inference.queries), durations, strict=True):
            read = time.monotonic_ns()
            due = max(read, ended) + compute
            counter.wait_until(due)
            counter.add_late(time.monotonic_ns() - due)
            counter.append(len(batch))
            counter.add(ended, ended, read, len(batch), int(batch.lengths.sum()), compute)
            counter.tick()
            ended = time.monotonic_ns()
            del batch


def _epochs(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


def _samples(workload: Workload, count: int, rank: Rank) -> "Iterator[numpy.ndarray[Any, Any]]":
    """Yield the samples of each query: at random, or in their order."""
    inference = workload.inference
    assert inference is not None
    size, queries = inference.batch_size, inference.queries
    if inference.shuffle:
        chosen = _uniform(workload.seed, rank.number, "samples", queries * size)
        yield from (chosen * count).astype(numpy.int64).reshape(queries, size)
        return
    first = count * rank.number // rank.count
    for query in range(queries):
        yield (first + query * size + numpy.arange(size, dtype=numpy.int64)) % count


def _durations(compute: Normal, seed: int, rank: int, count: int) -> list[int]:
    """Return the nanoseconds of each computation."""
    if compute.stdev == 0:
        return [round(compute.mean * 1e9)] * count
    first, second = _uniform(seed, rank, "compute", 2 * count).reshape(2, -1)
    normal = numpy.sqrt(-2.0 * numpy.log1p(-first)) * numpy.cos(2.0 * numpy.pi * second)  # Box-Muller
    seconds = numpy.maximum(0.0, compute.mean + compute.stdev * normal)
    found: list[int] = (seconds * 1e9).astype(numpy.int64).tolist()
    return found


def _uniform(seed: int, rank: int, purpose: str, count: int) -> "numpy.ndarray[Any, Any]":
    """Numbers from 0 to below 1, the same for the same seed in all versions of numpy."""
    key = numpy.array([seed & (2**64 - 1), _PURPOSES[purpose] << 56 | rank], dtype=numpy.uint64)
    raw = numpy.random.Philox(key=key).random_raw(count)
    return (raw >> numpy.uint64(11)).astype(numpy.float64) / 2.0**53


def check_samples(workload: Workload, ranks: int) -> None:
    """Raise ValueError if there is no batch for every rank."""
    inference, dataset = workload.inference, workload.dataset
    assert inference is not None
    units = units_of(dataset, dataset.train.files).count
    needed = inference.batch_size * (ranks if inference.mode == "offline" else 1)
    if units < needed:
        raise ValueError(
            f"{workload.name} has {units} samples, and {needed} are needed for a batch of each of {ranks} "
            "ranks; make the data set larger, or set a smaller inference.batch_size (overrides=)"
        )
