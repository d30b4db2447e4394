"""Batches of samples for training: tl.data.Loader."""

import errno
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, Literal

from trunkline._core import BatchReader, Engine
from trunkline._errors import Unsupported
from trunkline._processors import available_processors
from trunkline.data._index import Index
from trunkline.data._ranks import given_ranks, initialized_ranks, warn_of_missing_group
from trunkline.data._state import Cursor, cursor_of, state_of
from trunkline.data._stream import DecodedBatches, Decoding, Item, RawBatches, Skipped
from trunkline.data.native import has_tfrecord_framing, table_of


class Loader:
    """Reads the batches of a training ahead: shuffled, sharded among ranks, resumable.

    `for batch in loader` is one epoch; the next loop is the next epoch. All samples of a batch are in flight
    at once, and further batches are read while one is used.

    index: an Index, or paths for tl.data.index. batch_size: samples of each rank's batch. shuffle: True, each
    sample on its own; False, the order of the data; an int above 1: blocks of as many consecutive samples are
    shuffled, each read at once (for disks that need sequential reads). seed: chooses the order, together
    with the epoch. rank, world_size: None: those of torch.distributed if it is initialized when a loop
    begins, else one rank. drop_last: leave out the last step of an epoch if it has not batch_size samples for
    every rank; else its samples are divided evenly, and where there are fewer than ranks, those without one
    repeat the first of the epoch: all ranks always have the same number of batches.

    prefetch: buffers, the one of the batch that you hold among them (at least 2). They are pinned, and as
    large as the largest batch, so that memory is bounded by prefetch x batch. decode: called for each
    sample, on `workers`: a number of threads (None: one for each core, 8 at most) or an Executor, such as
    ProcessPoolExecutor. collate: called with the list of a batch's samples, or of what decode returned; its
    result is yielded. With labels=True, these are pairs of the sample and its class. Without both, Batch
    objects are yielded. device: "cuda" or "cuda:1": batches are copied there, ordered after the caller's
    stream; what collate returns is moved there. on_error: "skip" leaves out samples that are damaged or
    cannot be read or decoded, logs each and counts them in `skipped`; a batch without any sample left is an
    error.

    An exception in the loop, `break` and Ctrl-C end reading ahead: no thread stays, and no memory but that of
    batches that you hold. So does close(), or leaving `with loader:`. Not thread-safe; a forked child, and a
    process that it was pickled to, reads on its own.
    """

    def __init__(
        self,
        index: Index | Any,
        batch_size: int,
        *,
        shuffle: bool | int = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
        decode: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int | Executor | None = None,
        device: Any = "cpu",
        engine: Engine | None = None,
        labels: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        """Raises ValueError or TypeError for an invalid argument; begins to read when it is iterated over."""
        self._index = index if isinstance(index, Index) else _index_of(index)
        self._batch_size = _number(batch_size, "batch_size", 1)
        self._block = _block(shuffle)
        self._seed = _number(seed, "seed", 0) % 2**64
        given = given_ranks(
            None if rank is None else _number(rank, "rank", 0),
            None if world_size is None else _number(world_size, "world_size", 1),
        )
        self._follows_group = given is None
        self._rank, self._world_size = given or initialized_ranks() or (0, 1)
        self._drop_last = bool(drop_last)
        self._prefetch = max(2, _number(prefetch, "prefetch", 1))
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error: must be "raise" or "skip", not {on_error!r}')
        for name, call in (("decode", decode), ("collate", collate)):
            if call is not None and not callable(call):
                raise TypeError(f"{name}: must be callable, not {type(call).__name__}")
        if labels and not self._index.classes:
            raise ValueError(
                "labels: the index has no classes: its files are not in one folder for each class"
            )
        if labels and decode is None and collate is None:
            raise ValueError("labels: is for decode and collate; Batch has labels of its own")
        self._decoding = Decoding(decode, collate, bool(labels), on_error == "skip")
        self._workers = _workers(workers)
        self._device = _device(device)
        self._engine = engine
        self._check_steps()
        self._skipped = Skipped()
        self._cursor = Cursor()
        self._was_left = False  # the last loop ended before its epoch did
        self._is_at_end = False  # the last batch of an epoch was yielded, and its loop has not ended yet
        self._stream: RawBatches | DecodedBatches | None = None
        self._stream_cursor = Cursor()  # what the stream yields next
        self._stream_process = 0
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._iterations = 0

    def _check_steps(self) -> None:
        step = self._batch_size * self._world_size
        if len(self._index) == 0:
            raise ValueError(f"index: has no samples: {self._index}")
        if self._drop_last and len(self._index) < step:
            raise ValueError(
                f"drop_last: no batch is left: there are {len(self._index)} samples, fewer than the {step} "
                f"of a step (batch_size {self._batch_size} x {self._world_size} ranks)"
            )

    def _adopt_ranks(self) -> bool:
        """Take over the ranks of torch.distributed, unless others were given; return if it is initialized.

        It may have been initialized since the Loader was made, which may have come here from another process.
        """
        ranks = initialized_ranks() if self._follows_group else None
        if ranks is None:
            return False
        if ranks != (self._rank, self._world_size):
            self._rank, self._world_size = ranks
            self._check_steps()
            if not self._was_left:
                self._set_cursor(self._cursor)  # fewer samples than a step of all ranks may be left
        return True

    @property
    def index(self) -> Index:
        """Where the samples are."""
        return self._index

    @property
    def epoch(self) -> int:
        """The epoch of the batch that comes next, from 0."""
        return self._cursor.epoch

    @property
    def skipped(self) -> int:
        """How many samples on_error="skip" has left out so far, in this process."""
        return self._skipped.count

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same for every rank."""
        self._adopt_ranks()
        step = self._batch_size * self._world_size
        return len(self._index) // step if self._drop_last else -(-len(self._index) // step)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or what is left of the one that a state was loaded for."""
        return self._epoch(0, 1)

    def _epoch(self, share: int, shares: int) -> Iterator[Any]:
        """Iterate over number `share` of `shares` of a rank's batches."""
        if not self._adopt_ranks() and self._follows_group and share == 0:
            warn_of_missing_group()
        if self._was_left:
            self._set_cursor(Cursor(self._cursor.epoch + 1))
        if shares > 1:
            self.close()  # a stream of a share is of one epoch; the loop that it is of may not have ended
        self._iterations += 1
        return self._iterate(self._iterations, share, shares)

    def _iterate(self, iteration: int, share: int, shares: int) -> Iterator[Any]:
        epoch = self._cursor.epoch
        ended = False
        try:
            while True:
                self._check_iteration(iteration)
                if self._cursor.epoch != epoch:
                    break
                item = self._next(share, shares)
                if item is None:
                    assert shares > 1, "the reader ended within an epoch"
                    self._cursor = Cursor(epoch + 1)  # the others have the rest
                    break
                steps_of_others = None if shares == 1 else shares - 1
                self._cursor = Cursor(item.end.epoch, item.end.samples, steps_of_others)
                self._was_left = item.end.epoch == epoch
                if shares > 1 and item.end.epoch != epoch:
                    self._cursor = Cursor(item.end.epoch)
                self._is_at_end = item.end.epoch != epoch
                delivered = [self._delivered(item.value)]
                del item
                yield delivered.pop()  # the caller alone holds it
            ended = True
            self._was_left = False
        finally:
            self._is_at_end = self._is_at_end and not ended
            if (not ended or shares > 1) and iteration == self._iterations:
                self.close()

    def _check_iteration(self, iteration: int) -> None:
        if iteration != self._iterations:
            raise RuntimeError(
                "this loop over the Loader was ended: another one began, or a state was loaded"
            )

    def _next(self, share: int, shares: int) -> Item | None:
        if self._stream is None or self._stream_process != os.getpid() or self._stream_cursor != self._cursor:
            self._open(share, shares)
        assert self._stream is not None
        try:
            item = self._stream.next()
        except BaseException:
            self.close()  # the next loop goes on with the batch that failed
            self._was_left = False
            raise
        if item is not None:
            self._stream_cursor = item.end
        return item

    def _open(self, share: int, shares: int) -> None:
        self.close()
        others = self._cursor.steps_of_others
        if others is not None and others + 1 != shares:
            raise ValueError(
                f"state: was taken in one of {others + 1} workers of a DataLoader; load it in a DataLoader "
                "with as many, or load the state that StatefulDataLoader or a Loader without workers has"
            )
        _check_executor(self._workers)
        reader = BatchReader(
            table_of(self._index),
            batch_size=self._batch_size,
            ranks=self._world_size,
            rank=self._rank,
            block=self._block,
            seed=self._seed,
            drop_last=self._drop_last,
            epoch=self._cursor.epoch,
            position=self._cursor.samples,
            slots=self._prefetch,
            shares=shares,
            share=share if others is None else others,
            one_epoch=shares > 1,
            tfrecord=has_tfrecord_framing(self._index),
            skip_damaged=self._decoding.skip_damaged,
            cuda_ordinal=self._device.index if self._device is not None else None,
            engine=self._engine,
            volume=self._index._volume,
        )
        raw = RawBatches(reader, self._index, self._skipped)
        stream: RawBatches | DecodedBatches = raw
        if self._decoding.decode is not None or self._decoding.collate is not None:
            stream = DecodedBatches(
                raw, self._index, self._decoding, self._workers, max(1, self._prefetch - 1), self._skipped
            )
        self._stream = stream
        self._stream_cursor = self._cursor
        self._stream_process = os.getpid()
        self._finalizer = weakref.finalize(self, stream.close, False)

    def _delivered(self, value: Any) -> Any:
        if self._device is None:
            return value
        from trunkline.data._on_device import moved_to

        return moved_to(self._device, value)

    def close(self) -> None:
        """End reading ahead. Idempotent.

        Batches that you hold stay valid. Another loop begins to read again.
        """
        stream, self._stream = self._stream, None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if stream is not None and self._stream_process == os.getpid():
            stream.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the training is, as a dict of ints and strs that JSON can hold.

        Of the batches that were yielded, not of those that were read ahead; the same on all ranks after the
        same number of batches.
        """
        return state_of(self._cursor, self._seed, self._block, self._index.fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was taken, in constant time: the next loop is the rest of its epoch.

        The seed is that of the state. The number of ranks may be another one: the samples that come next are
        the same, divided among the ranks that there are now. Raises ValueError if it is a state of other
        data.
        """
        cursor, seed = cursor_of(state, self._block, self._index.fingerprint, len(self._index))
        self._seed = seed
        self._set_cursor(cursor)

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop that of this epoch, from its start."""
        self._set_cursor(Cursor(_number(epoch, "epoch", 0)))

    def _set_cursor(self, cursor: Cursor) -> None:
        self.close()
        self._iterations += 1
        samples = len(self._index)
        wanted = self._batch_size * self._world_size if self._drop_last else 1
        if samples - cursor.samples < wanted:
            cursor = Cursor(cursor.epoch + 1)
        self._cursor = cursor
        self._was_left = False
        self._is_at_end = False

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is not None:
            raise TypeError("a Loader with an engine of its own cannot be pickled; leave engine=None")
        idle = {"_stream": None, "_finalizer": None, "_stream_process": 0, "_skipped": None}
        return {**self.__dict__, **idle}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._skipped = Skipped()


def _index_of(paths: Any) -> Index:
    from trunkline.data import index

    return index(paths)


def _number(value: Any, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: must be an integer, not {type(value).__name__}") from None
    if number < least:
        raise ValueError(f"{name}: must be at least {least}, not {number}")
    return number


def _block(value: Any) -> int:
    """Return how many samples stay together: 0 for no shuffle."""
    if not hasattr(value, "__index__"):
        raise TypeError(
            "shuffle: must be True, False, or the number of samples that stay together, not "
            f"{type(value).__name__}"
        )
    return _number(value, "shuffle", 0)


def _check_executor(workers: int | Executor) -> None:
    """Raise Unsupported for an executor that was used before a fork: its threads do not exist here."""
    threads = [*getattr(workers, "_threads", ()), getattr(workers, "_executor_manager_thread", None)]
    started = [thread for thread in threads if thread is not None]
    if not started or any(thread.is_alive() for thread in started) or getattr(workers, "_shutdown", False):
        return
    raise Unsupported(
        errno.EOPNOTSUPP,
        "workers: this process was forked after the executor had been used, and the executor's threads exist "
        "only in the parent; pass the number of threads instead",
    )


def _workers(value: int | Executor | None) -> int | Executor:
    if value is None:
        return min(8, available_processors())
    if isinstance(value, Executor):
        return value
    if not hasattr(value, "__index__"):
        raise TypeError(
            f"workers: must be a number of threads, an Executor or None, not {type(value).__name__}"
        )
    return max(1, _number(value, "workers", 0))


def _device(value: Any) -> Any:
    """Return a torch.device of a GPU, None for the CPU."""
    if str(value) == "cpu":
        return None
    import torch

    from trunkline._tensor_io.memory import device_argument

    if isinstance(value, str | torch.device) and str(value).partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f'device: must be "cpu" or a CUDA device, not {value!r}')
    device = device_argument(value)
    if device.type == "cpu":
        return None
    return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
