"""A directory of checkpoints, one a step: trunkline.Checkpointer."""

import errno
import hashlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from trunkline import _core
from trunkline._core import Engine, FileSet
from trunkline._errors import Corrupt, Error
from trunkline.checkpoint import _shards
from trunkline.checkpoint._ranks import Exchange, GroupRanks, RankError, Ranks, rank_error
from trunkline.checkpoint._save import SaveHandle, raise_unobserved
from trunkline.checkpoint._shares import divide, spread
from trunkline.checkpoint._state import flatten, restore, restore_into
from trunkline.checkpoint._transfer import read_images

# What says that checkpoints can be read here, and nothing else.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
# How long a save waits for another process that has the directory locked: for one that collects debris, not
# for one that saves.
_PATIENCE_SECONDS = 3.0
_POLL_SECONDS = 0.01

Writers = Literal["rank", "node"] | Sequence[int]


class Checkpointer:
    """Checkpoints of a training in one directory: crash-safe, verified, the last few kept.

    directory: made if it is not there; one directory a step in it, each with a manifest and shards, which are
    stock safetensors files. keep: how many checkpoints stay (None: all); older ones go once a new one is
    durable. volumes: directories, best one on each disk, over which the bytes are spread evenly; None: as the
    directory has them, in a new one none.

    process_group: the torch.distributed group whose ranks save together; None is the default group if there
    is one, False this process alone. Then making one, save() and load() are collective: the state is the same
    on all ranks, and each writer writes an equal share of its bytes. writers: "rank" (all), "node" (the first
    rank of each machine), or a list of ranks. A rank that fails or shows no sign of life for `timeout`
    seconds makes the save fail on all others, with an error that names it; earlier checkpoints stay intact.

    staging_bytes: memory for what is saved in the background (int or str; None: half of the engine's pinned
    budget); larger states are streamed through it. Thread-safe, but for the order of collective calls.
    """

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        *,
        keep: int | None = 3,
        volumes: "Sequence[str | os.PathLike[str]] | None" = None,
        process_group: Any = None,
        writers: Writers = "rank",
        timeout: float = 300.0,
        staging_bytes: "int | str | None" = None,
        engine: Engine | None = None,
    ) -> None:
        """Open the directory. Raises ValueError for bad arguments, Error where it cannot be made or read."""
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep: must be an int of at least 1, or None to keep all, not {keep!r}")
        if not timeout > 0:
            raise ValueError(f"timeout: must be more than 0 seconds, not {timeout!r}")
        self.directory = Path(directory)
        self._keep = keep
        self._staging_bytes = staging_bytes
        self._engine = engine
        self._ranks = _ranks_of(process_group, timeout)
        self._writers = _writers_of(writers, self._ranks)
        self._last: SaveHandle | None = None
        self._turn = threading.Lock()
        _checkpointers.add(self)
        names = None if volumes is None else [os.fspath(volume) for volume in volumes]
        self._store: _core.CheckpointStore = self._first(
            lambda: _core.CheckpointStore(os.fspath(directory), volumes=names)
        )
        if self._ranks.rank == 0:
            # What a crash left behind; nothing while another process saves here.
            try:
                self._store.collect()
            except Error as error:
                if error.errno not in _READ_ONLY:
                    raise

    def save(self, step: int, state: Any, *, block: bool = False) -> SaveHandle:
        """Save `state` as the checkpoint of `step` (0 .. 2^63 - 1), and return a handle to it.

        `state` is any nesting of dicts, lists, tuples, numbers, strings, None, CPU tensors and numpy arrays,
        state_dict() of modules and optimizers among them; nothing is pickled. The tensors are copied in the
        background: they may change once handle.wait_staged() returned. The checkpoint exists, for good, once
        handle.wait() returned. A step that is there already is replaced in one step.

        block: return only when it is durable; needs no staging memory for tensors that direct I/O takes.

        Waits for the save before, and raises its error if nobody has seen it. Raises Unsupported, which names
        the place in the state, for objects of other types.
        """
        with self._turn:
            # Before anything that can fail on one rank alone: all count the same exchanges, and hear of it.
            exchange = self._ranks.exchange()
            if exchange is not None:
                exchange.__enter__()
            try:
                handle = self._begin(step, state, block, exchange)
            except BaseException as error:
                if exchange is not None:
                    _give_up(exchange, error)
                raise
        if block:
            handle.wait_or_cancel()
        return handle

    def wait(self) -> None:
        """Wait for the save that is under way, if there is one, and raise its error."""
        last = self._under_way()
        if last is not None:
            last.wait()

    def load(self, step: int | None = None, into: Any = None, *, verify: bool = True) -> Any:
        """Return the state of `step`; None: of the checkpoint that was committed last.

        `into`: a state of the same structure, whose tensors are filled in place, so that no second copy is
        needed; what is returned holds them. verify: compare every byte with its checksum.

        Raises FileNotFoundError when there is no such checkpoint, Corrupt naming file, tensor and chunk,
        ValueError where `into` does not fit. Collective on a process group, whose ranks agree on the step;
        each reads for itself. Waits for a save that is under way.
        """
        last = self._under_way()
        if last is not None:
            last._done.wait()
        while True:
            chosen = self._agree(self.latest) if step is None else step
            if chosen is None:
                raise _not_found(f"{self.directory} has no checkpoint yet", os.fspath(self.directory))
            manifest = None
            try:
                manifest = self._store.read_manifest(chosen)
                return self._load(chosen, manifest, into, verify)
            except FileNotFoundError:
                if not self._gone(chosen, manifest, step is None):
                    raise

    def _gone(self, step: int, manifest: dict[str, Any] | None, any_step: bool) -> bool:
        """Whether another process replaced it, or removed it and there is another one to read."""
        try:
            now = self._store.read_manifest(step)
        except FileNotFoundError:
            return any_step and self._ranks.size == 1 and self.latest() not in (None, step)
        return manifest is None or bool(now["commit"] != manifest["commit"])

    def _load(self, step: int, manifest: dict[str, Any], into: Any, verify: bool) -> Any:
        paths = self._store.shard_paths(manifest)
        where = f"{self.directory}, step {step}"
        if into is None:
            state = None
            tensors = {each["name"]: _shards.empty_like(each, where) for each in manifest["tensors"]}
        else:
            state, tensors = restore_into(manifest["state"], into)
        images = _shards.targets(manifest, paths, tensors, verify=verify, fresh=into is None)
        try:
            read_images(images, engine=self._engine, verify=verify)
        except Corrupt as error:
            shard, chunk = getattr(error, "image", None), getattr(error, "sum", None)
            if shard is None or chunk is None:
                raise
            raise _shards.corrupt_chunk(manifest, paths, shard, chunk) from error
        return restore(manifest["state"], tensors) if into is None else state

    def latest(self) -> int | None:
        """Return the step of the checkpoint that was committed last; None when there is none."""
        return self._store.latest()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending."""
        return self._store.steps()

    def verify(self, step: int | None = None) -> None:
        """Compare every byte of a checkpoint (None: the last) with its checksum, without keeping any.

        Raises Corrupt, naming file, tensor and chunk, for the first that differs.
        """
        if step is None:
            step = self.latest()
            if step is None:
                raise _not_found(f"{self.directory} has no checkpoint yet", os.fspath(self.directory))
        found = self._store.verify(step, engine=self._engine)["mismatches"]
        if not found:
            return
        first, more = found[0], len(found) - 1
        error = Corrupt(None, first["message"] + (f"; and {more} more" if more else ""), first["path"])
        error.tensor, error.chunk = next(iter(first["tensors"]), None), first["chunk"]
        raise error

    def __repr__(self) -> str:
        return f"<trunkline.Checkpointer {str(self.directory)!r} keep={self._keep}>"

    def _begin(self, step: int, state: Any, block: bool, exchange: Exchange | None) -> SaveHandle:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
            raise ValueError(f"step: must be an int from 0 to 2^63 - 1, not {step!r}")
        last = self._under_way()
        if last is not None:
            last._done.wait()
            if not last._observed:
                last.wait()
        self._last = None
        raise_unobserved()
        job = _Save(step, state, self, not block, exchange)
        # Before it begins: else a signal handler that raises in between would hide it from the next save.
        self._last = handle = SaveHandle(f"saving step {step} to {self.directory}")
        handle.start(job)
        return handle

    def _under_way(self) -> SaveHandle | None:
        """Return the last save, which may be over, unless it never began."""
        return self._last if self._last is not None and self._last._started else None

    def _first(self, make: Callable[[], Any]) -> Any:
        """Let rank 0 make something on disk before the others look at it."""
        exchange = self._ranks.exchange()
        if exchange is None:
            return make()
        with exchange:
            if exchange.rank == 0:
                return _told(exchange, "made", make)
            _heard(exchange, "made")
            return make()

    def _agree(self, decide: Callable[[], Any]) -> Any:
        """Let rank 0 decide."""
        exchange = self._ranks.exchange()
        if exchange is None:
            return decide()
        with exchange:
            if exchange.rank == 0:
                return _told(exchange, "decided", lambda: {"this": decide()})["this"]
            return _heard(exchange, "decided")["this"]


class _Save:
    """One save of one rank.

    With several ranks (1 to 4 as in the durability protocol of src/checkpoint/store.cpp):
    a. rank 0 locks the directory, makes that of the step, and tells all where their shards go;
    b. each writer writes its shards and makes them durable, then tells what it wrote (1 to 3);
    c. rank 0 waits for all (4), commits the manifest, tells the others, and removes what is too old.
    """

    def __init__(
        self, step: int, state: Any, owner: Checkpointer, stage_all: bool, exchange: Exchange | None
    ) -> None:
        """`exchange`: begun; ended by commit() or abandon()."""
        self._step = step
        self._stage_all = stage_all
        self._owner = owner
        self._skeleton, tensors = flatten(state)
        self._described = [_shards.Described.of(name, tensor) for name, tensor in tensors.items()]
        self._tensors: list[torch.Tensor] = list(tensors.values())
        sizes = [about.nbytes for about in self._described]
        self._layout = spread(sum(sizes), len(owner._writers), max(1, len(owner._store.volumes)))
        self._parts = divide(sizes, self._layout.writers * self._layout.volumes) if sum(sizes) else []
        self._exchange = exchange
        self._placement: dict[str, Any] = {}
        self._mine: list[int] = []
        self._placed: dict[int, list[_shards.Placed]] = {}
        self._bytes: dict[int, int] = {}
        self._files: FileSet | None = None

    def begin(self) -> FileSet:
        """Step a, and the files of this rank."""
        if self._exchange is None:
            self._placement = self._begin()
        elif self._exchange.rank == 0:
            self._placement = _told(self._exchange, "placed", self._begin)
        else:
            self._placement = _heard(self._exchange, "placed")
            self._compare(self._exchange.rank)
        rank = self._owner._ranks.rank
        volumes = self._layout.volumes
        if rank in self._owner._writers[: self._layout.writers]:
            writer = self._owner._writers.index(rank)
            self._mine = [i for i in range(writer * volumes, (writer + 1) * volumes) if i < len(self._parts)]
        images = []
        for index in self._mine:
            image, self._placed[index] = _shards.lay_out(
                self._placement["paths"][index], self._tensors, self._described, self._parts[index]
            )
            self._bytes[index] = image.nbytes
            images.append(image)
        self._tensors = []
        owner = self._owner
        self._files = FileSet(
            images,
            engine=owner._engine,
            replace=False,
            stage_all=self._stage_all,
            staging_bytes=owner._staging_bytes if self._stage_all else None,
        )
        return self._files

    def commit(self) -> None:
        """Steps b and c, once the files of this rank are durable."""
        written = [self._written(number, index) for number, index in enumerate(self._mine)]
        exchange = self._exchange
        if exchange is None:
            self._commit(written)
        elif exchange.rank == 0:
            _told(exchange, "committed", lambda: self._commit(self._gather(exchange, written)))
        else:
            exchange.post("written", {"shards": written})
            _heard(exchange, "committed")
        if exchange is not None:
            self._exchange = None  # what fails from now on is not for the others
            exchange.__exit__(None, None, None)
        if self._owner._ranks.rank == 0:
            self._owner._store.retain(self._owner._keep)
            self._owner._store.release()

    def abandon(self, error: BaseException) -> BaseException:
        """Tell the others that this rank failed, and remove what was written."""
        try:
            if self._exchange is not None:
                error = _cause(self._exchange, error)
                _give_up(self._exchange, error)
            return error
        finally:
            if self._owner._ranks.rank == 0:
                self._owner._store.abandon()

    def _begin(self) -> Any:
        volumes = self._layout.volumes
        counts = [self._layout.writers] * volumes if self._parts else [0] * volumes
        counts += [0] * (max(1, len(self._owner._store.volumes)) - volumes)
        placement = self._lock(counts)
        # The shard of writer w on volume v is number w * volumes + v here.
        by_volume: dict[int, list[int]] = {}
        for index, shard in enumerate(placement["shards"]):
            by_volume.setdefault(shard["volume"], []).append(index)
        order = [
            by_volume[volume][writer]
            for writer in range(self._layout.writers)
            for volume in sorted(by_volume)
        ]
        return {
            "volumes": placement["volumes"],
            "shards": [
                {key: placement["shards"][index][key] for key in ("volume", "file")} for index in order
            ],
            "paths": [placement["shards"][index]["path"] for index in order],
            "digest": self._digest(),
        }

    def _lock(self, counts: list[int]) -> Any:
        """Begin in the store. Who opens the directory, maybe to read, has it locked while it collects."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self._owner._store.begin(self._step, counts)
            except Error as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def _written(self, number: int, index: int) -> dict[str, Any]:
        assert self._files is not None
        return {
            "index": index,
            "bytes": self._bytes[index],
            "crc32c": _shards.format_crc32c(self._files.sums(number)),
            "pieces": [[*placed.piece, placed.offset] for placed in self._placed[index]],
        }

    def _digest(self) -> dict[str, str]:
        about = [[each.name, each.dtype, each.shape] for each in self._described]
        same = {
            "step": self._step,
            "writers or volumes": [self._owner._writers, self._owner._store.volumes],
            "state of other names, shapes or values": [self._skeleton, about],
        }
        return {what: hashlib.sha256(json.dumps(value).encode()).hexdigest() for what, value in same.items()}

    def _compare(self, rank: int) -> None:
        """What must be the same on all ranks: nobody writes, and rank 0 hears of it, unless it is."""
        own = self._digest()
        other = [what for what, digest in self._placement["digest"].items() if own[what] != digest]
        if other:
            raise rank_error(
                rank,
                f"rank {rank} has another {other[0]} than rank 0; ranks that save together must have the "
                "same (keep what differs out of the state)",
            )

    def _gather(self, exchange: Exchange, written: list[dict[str, Any]]) -> list[dict[str, Any]]:
        shards = list(written)
        for rank in range(1, exchange.size):
            report = exchange.read("written", rank)
            if "error" in report:
                raise rank_error(rank, f"rank {rank} failed to save its share: {report['error']}")
            shards += report["shards"]
        return sorted(shards, key=lambda shard: int(shard["index"]))

    def _commit(self, written: list[dict[str, Any]]) -> None:
        tensors: list[dict[str, Any]] = [
            {"name": about.name, "dtype": about.dtype, "shape": list(about.shape), "pieces": []}
            for about in self._described
        ]
        shards = []
        for shard in written:  # in order, and so the pieces of each tensor
            index = shard["index"]
            shards.append(
                {**self._placement["shards"][index], "bytes": shard["bytes"], "crc32c": shard["crc32c"]}
            )
            for tensor, begin, end, offset in shard["pieces"]:
                tensors[tensor]["pieces"].append([index, offset, end - begin])
        self._owner._store.commit(
            {
                "step": self._step,
                "chunk_bytes": _shards.CHUNK_BYTES,
                "world_size": self._owner._ranks.size,
                "volumes": self._placement["volumes"],
                "shards": shards,
                "tensors": tensors,
                "state": self._skeleton,
            }
        )


def _ranks_of(process_group: Any, timeout: float) -> Ranks:
    if process_group is False:
        return Ranks()
    if process_group is None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError(
                    f"process_group: {os.environ['WORLD_SIZE']} processes were started together (WORLD_SIZE) "
                    "and do not know of each other; call torch.distributed.init_process_group first, or pass "
                    "process_group=False if each saves to a directory of its own"
                )
            return Ranks()
    return GroupRanks(process_group, timeout)


def _writers_of(writers: Writers, ranks: Ranks) -> list[int]:
    if writers == "rank":
        return list(range(ranks.size))
    if writers == "node":
        return sorted({node: rank for rank, node in reversed(list(enumerate(ranks.nodes)))}.values())
    chosen = [] if isinstance(writers, str) else sorted(set(writers))
    if not chosen or not all(isinstance(rank, int) and 0 <= rank < ranks.size for rank in chosen):
        raise ValueError(
            f'writers: must be "rank", "node" or a list of ranks from 0 to {ranks.size - 1}, not {writers!r}'
        )
    return chosen


def _told(exchange: Exchange, topic: str, make: Callable[[], Any]) -> Any:
    """Make something, and tell the others what came of it."""
    try:
        value = make()
    except BaseException as error:
        exchange.post(topic, _failure(exchange, error))
        raise
    exchange.post(topic, {"value": value if isinstance(value, dict) else None})
    return value


def _failure(exchange: Exchange, error: BaseException) -> dict[str, Any]:
    about = str(error) or type(error).__name__
    return {"error": about, "rank": getattr(error, "rank", None) or exchange.rank}


def _cause(exchange: Exchange, error: BaseException) -> BaseException:
    """What made this rank fail: files that rank 0 removed from under it failed because it gave up before."""
    if exchange.rank == 0 or isinstance(error, RankError):
        return error
    try:
        told = exchange.look("committed", 0)
    except Error:
        return error
    return error if told is None or "error" not in told else _failed_elsewhere(told)


def _give_up(exchange: Exchange, error: BaseException) -> None:
    """Tell the others that this rank failed, and end the exchange."""
    try:
        for topic in ("placed", "committed") if exchange.rank == 0 else ("written",):
            exchange.post(topic, _failure(exchange, error))
    except Error:
        pass  # the connection is lost: the others find that out for themselves
    finally:
        exchange.__exit__(None, None, None)


def _heard(exchange: Exchange, topic: str) -> Any:
    """Wait for what came of it at rank 0."""
    told = exchange.read(topic, 0)
    if "error" in told:
        raise _failed_elsewhere(told)
    return told["value"]


def _failed_elsewhere(told: dict[str, Any]) -> Error:
    rank = told["rank"]
    return rank_error(rank, f"the checkpoint was not saved: rank {rank}: {told['error']}")


def _not_found(message: str, path: str) -> Exception:
    from trunkline._errors import exception_of

    return exception_of("system", errno.ENOENT, message, path)


_checkpointers: "weakref.WeakSet[Checkpointer]" = weakref.WeakSet()


def _forget_parent() -> None:
    for checkpointer in list(_checkpointers):
        checkpointer._turn = threading.Lock()  # a thread that the child does not have may hold the old one


os.register_at_fork(after_in_child=_forget_parent)
