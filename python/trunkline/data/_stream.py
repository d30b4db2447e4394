"""The batches of a Loader, read and decoded ahead."""

import contextlib
import gc
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trunkline._core import BatchReader
from trunkline._errors import OutOfBudget
from trunkline._logging import Log
from trunkline.data._batch import Batch, batch_of
from trunkline.data._index import Index
from trunkline.data._sample_copies import Samples
from trunkline.data._state import Cursor

# How long next() waits for a buffer while all of them are held by batches that were yielded: another thread
# may be about to drop one.
HELD_TIMEOUT_SECONDS = 5.0
_TASKS_PER_WORKER = 2  # of each batch
_POLL_SECONDS = 0.1


@dataclass
class Item:
    """A batch, or what was made of it, and where the training is before and after it."""

    value: Any
    begin: Cursor
    end: Cursor


class RawBatches:
    """The batches of a native reader. close() is thread-safe."""

    def __init__(self, reader: BatchReader, index: Index, skipped: "Skipped") -> None:
        """`skipped`: counts and logs what was left out."""
        self._reader = reader
        self._index = index
        self._skipped = skipped

    def next(self, held_timeout: float | None = HELD_TIMEOUT_SECONDS) -> Item | None:
        """Return the next batch, None at the end."""
        try:
            parts = self._reader.next(held_timeout)
        except OutOfBudget:
            gc.collect()  # batches in reference cycles, of exceptions for example
            parts = self._reader.next(held_timeout)
        if parts is None:
            return None
        raw, begin, end = parts
        batch = batch_of(self._index, raw, begin[0])
        self._skipped.add(self._index, batch.skipped)
        return Item(batch, Cursor(*begin), Cursor(*end))

    def close(self, wait: bool = True) -> None:
        """Stop reading, and release memory that nobody holds."""
        self._reader.close()


class Skipped:
    """Counts samples that were left out, and logs each."""

    def __init__(self) -> None:
        """None at first."""
        self.count = 0
        self._log = Log("data")
        self._lock = threading.Lock()

    def add(self, index: Index, skipped: list[tuple[int, Exception]]) -> None:
        """Thread-safe."""
        for sample, error in skipped:
            with self._lock:
                self.count += 1
            self._log.warn("skipped sample %d of %s: %s", sample, index, error)


@dataclass(frozen=True)
class Decoding:
    """What is made of each batch."""

    decode: Callable[[Any], Any] | None
    collate: Callable[[list[Any]], Any] | None
    with_labels: bool
    skip_damaged: bool


class DecodedBatches:
    """Batches whose samples are decoded by `workers`, and collated by a thread, in their order."""

    def __init__(
        self,
        raw: RawBatches,
        index: Index,
        decoding: Decoding,
        workers: Executor | int,
        depth: int,
        skipped: Skipped,
    ) -> None:
        """`depth`: batches that are being decoded or wait to be taken, at most."""
        self._raw = raw
        self._index = index
        self._decoding = decoding
        self._skipped = skipped
        self._owned = ThreadPoolExecutor(workers, "trunkline-decode") if isinstance(workers, int) else None
        self._workers = workers if isinstance(workers, Executor) else self._owned
        self._task_count = _TASKS_PER_WORKER * (workers if isinstance(workers, int) else 4)
        self._collator = ThreadPoolExecutor(1, "trunkline-collate")
        self._ready: queue.Queue[Future[Item | None]] = queue.Queue(depth)
        self._is_awaited = threading.Event()  # next() waits, and nothing is being decoded
        self._closed = threading.Event()
        self._feeder = threading.Thread(target=self._feed, name="trunkline-feed", daemon=True)
        self._feeder.start()

    def next(self) -> Item | None:
        """Return the next batch, None at the end; raises what decoding or reading raised."""
        self._is_awaited.set()
        ready = self._ready.get()
        self._is_awaited.clear()
        return ready.result()

    def close(self, wait: bool = True) -> None:
        """End all threads. `wait`: until decoding has ended."""
        self._closed.set()
        self._raw.close()
        for executor in (self._owned, self._collator):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)
        if wait and threading.current_thread() is not self._feeder:
            self._feeder.join()
            self._drop_ready()
            for executor in (self._owned, self._collator):
                if executor is not None:
                    executor.shutdown(wait=True)

    def _drop_ready(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()

    def _feed(self) -> None:
        """Submits batches for decoding until the end, an error or close()."""
        while not self._closed.is_set():
            try:
                item = self._next_raw()
                ready = self._submit(item) if item is not None else _done(None)
            except BaseException as error:  # for the thread that takes the batches
                item, ready = None, Future()
                ready.set_exception(error)
            if not self._put(ready) or item is None:
                return
            del item, ready  # hold no buffer while the next batch is read

    def _next_raw(self) -> Item | None:
        while True:
            try:
                return self._raw.next()
            except OutOfBudget:  # noqa: PERF203
                # Buffers are held by what is being decoded or waits to be taken. Else by what was yielded;
                # that is an error only if the loop waits for another batch meanwhile.
                if self._is_awaited.is_set() or self._closed.is_set():
                    raise

    def _put(self, ready: "Future[Item | None]") -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(ready, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def _submit(self, item: Item) -> "Future[Item | None]":
        batch: Batch = item.value
        samples = batch.samples
        labels = batch.labels.tolist() if self._decoding.with_labels else None
        size = max(1, -(-len(samples) // self._task_count))
        tasks = []
        if self._decoding.decode is not None:
            for start in range(0, len(samples), size):
                part = samples[start : start + size]
                assert self._workers is not None
                tasks.append(self._workers.submit(_decode_all, self._decoding.decode, Samples(part)))
        return self._collator.submit(self._finish, item, tasks, labels)

    def _finish(self, item: Item, tasks: list[Any], labels: list[int] | None) -> Item:
        batch: Batch = item.value
        outcomes = [outcome for task in tasks for outcome in task.result()]
        if self._decoding.decode is None:
            outcomes = [(sample, None) for sample in batch.samples]
        kept, failed = [], []
        for place, (value, error) in enumerate(outcomes):
            if error is None:
                kept.append(value if labels is None else (value, labels[place]))
            else:
                failed.append((int(batch.indices[place]), error))
        if failed:
            self._handle(failed, len(kept))
        collate = self._decoding.collate
        return Item(collate(kept) if collate is not None else kept, item.begin, item.end)

    def _handle(self, failed: list[tuple[int, Exception]], kept: int) -> None:
        sample, error = failed[0]
        if not self._decoding.skip_damaged or kept == 0:
            _add_note(error, f"while decoding sample {sample} of {self._index}: {self._index_path(sample)}")
            raise error
        self._skipped.add(self._index, failed)

    def _index_path(self, sample: int) -> str:
        return self._index.paths[int(self._index._first_samples.searchsorted(sample, side="right")) - 1]


def _decode_all(decode: Callable[[Any], Any], samples: Samples) -> list[tuple[Any, Exception | None]]:
    return list(_decoded(decode, samples.values))


def _decoded(decode: Callable[[Any], Any], samples: list[Any]) -> Iterator[tuple[Any, Exception | None]]:
    for sample in samples:
        try:
            yield decode(sample), None
        except Exception as error:  # noqa: PERF203
            yield None, error


def _done(value: None) -> "Future[Item | None]":
    done: Future[Item | None] = Future()
    done.set_result(value)
    return done


def _add_note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
