"""What ranks tell each other while they save: short messages beside the collectives, with signs of life.

Collectives hang, or fail without saying on whose account, when a rank dies. So ranks exchange JSON values
through the key-value store of the process group, and every rank that takes part in an exchange counts up a
key of its own for as long as it does; who waits for a rank whose count stands still says so.
"""

import json
import threading
import time
from contextlib import suppress
from operator import methodcaller
from types import TracebackType
from typing import Any

from trunkline.checkpoint._background import start_thread
from trunkline.checkpoint._flag import Flag
from trunkline.checkpoint._rank_store import RankError, RankStore, rank_error

__all__ = ["Exchange", "GroupRanks", "RankError", "Ranks", "rank_error"]

_BEAT_SECONDS = 0.25  # at most: several in a timeout
_POLL_SECONDS = (0.0005, 0.02)  # first, and at most with a few ranks
_POLL_SECONDS_PER_RANK = 0.0001  # so that thousands do not keep the store busy with waiting
_LEAVE_SECONDS = 10.0
_SILENCE_SECONDS = 1.0
_PART_CHARACTERS = 4 << 20  # TCPStore takes 8 MiB at most


class Ranks:
    """The ranks that save together; here this process alone."""

    rank = 0
    size = 1
    nodes: tuple[int, ...] = (0,)  # of each rank: which machine it is on, counted from 0

    def exchange(self) -> "Exchange | None":
        """Begin an exchange, in the same order on all ranks; None where there is nobody to talk to."""
        return None


class GroupRanks(Ranks):
    """The ranks of a torch.distributed process group. Making one is a collective operation."""

    def __init__(self, group: Any, timeout: float) -> None:
        """`group`: None for the default one; `timeout`: seconds until a silent rank counts as dead."""
        import os
        import secrets
        import socket

        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("process_group: this process is not one of its ranks")
        mine = (secrets.token_hex(8), socket.gethostname(), os.environ.get("GROUP_RANK", ""))
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, mine, group=group)
        machines = list(dict.fromkeys(each[1:] for each in every))
        self.nodes = tuple(machines.index(each[1:]) for each in every)
        store = default = _get_default_store()
        if hasattr(store, "clone"):
            with suppress(NotImplementedError, RuntimeError):
                store = store.clone()  # a connection of our own: waits of others do not hold us up
        self._exchanges = Exchanges(
            PrefixStore(f"trunkline/{every[0][0]}", store), self.rank, self.size, timeout, default
        )

    def exchange(self) -> "Exchange | None":
        """Begin an exchange, in the same order on all ranks."""
        return None if self.size == 1 else self._exchanges.begin()


class Exchanges:
    """All exchanges of some ranks, which begin them in the same order. Thread-safe."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, server: Any = None) -> None:
        """`store`: of torch.distributed, with no keys of others; `timeout`: of a silent rank, in seconds.

        `server`: what the store's server may live in, so that it outlives destroy_process_group(), and what
        else held it, until all exchanges are over.
        """
        self._server = server
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.store = RankStore(store, timeout)
        self._lock = threading.Lock()
        self._cleaning = threading.Lock()
        self._count = 0
        self._over: dict[int, list[str]] = {}  # exchanges whose keys are still there, and those keys

    def begin(self) -> "Exchange":
        """Begin the next one."""
        with self._lock:
            self._count += 1
            return Exchange(self, self._count)

    def leave(self, number: int, keys: list[str]) -> None:
        """Rank 0, once an exchange is over for it: wait for the others to read it, and remove what is left.

        It is not waited for but by the interpreter's exit: the store may be in this process.
        """
        with self._lock:
            self._over[number] = keys
        until = time.monotonic() + min(self.timeout, _LEAVE_SECONDS)
        pause, longest = _POLL_SECONDS
        with suppress(RankError):
            while not self._clean(number) and time.monotonic() < until:
                time.sleep(pause)
                pause = min(longest, pause * 2)
            with self._lock:
                older = sorted(self._over)
            for other in older:
                self._clean(other)

    def _clean(self, number: int) -> bool:
        """Remove the keys of an exchange, if it is over for all."""
        gone = f"{number}/gone"
        with self._cleaning:
            with self._lock:
                keys = self._over.get(number)
            if keys is None:
                return True  # asking for what is gone would make it anew
            if self.store.do(lambda store: store.add(gone, 0)) < self.size:
                return False
            with self._lock:
                del self._over[number]
            for key in keys:
                with suppress(NotImplementedError):
                    self.store.do(methodcaller("delete_key", key))
            return True


class Exchange:
    """Messages of one save. A context: signs of life begin and end with it. Used from one thread."""

    def __init__(self, exchanges: Exchanges, number: int) -> None:
        """`number`: the same on all ranks, another for each exchange."""
        self.rank = exchanges.rank
        self.size = exchanges.size
        self._exchanges = exchanges
        self._store = exchanges.store
        self._number = number
        self._timeout = exchanges.timeout
        self._beat_seconds = min(_BEAT_SECONDS, self._timeout / 8)
        self._keys: dict[str, None] = {}  # that this rank knows of
        self._ended = Flag()
        self._silent = Flag()

    def __enter__(self) -> "Exchange":
        """Begin to show signs of life."""
        start_thread(self._beat)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._silent.wait(_SILENCE_SECONDS)  # so that an exit of the process does not look like a death
        if self.rank == 0:
            ranks = range(self.size)
            keys = [self._key(topic, rank) for topic in ("alive", "written") for rank in ranks]
            keys += [*self._keys, f"{self._number}/gone"]
            exchanges, number = self._exchanges, self._number
            start_thread(lambda: exchanges.leave(number, keys), Flag())  # the interpreter waits for it

    def post(self, topic: str, value: Any) -> None:
        """Leave a message of this rank; instead of the one of that topic before."""
        key = self._key(topic, self.rank)
        text = json.dumps(value)
        parts = [text[at : at + _PART_CHARACTERS] for at in range(0, len(text), _PART_CHARACTERS)]
        values = {f"{key}/{number}": part for number, part in enumerate(parts) if number > 0}
        values[key] = f"{len(parts)}:{parts[0]}"  # last: who finds it finds the others
        for name, part in values.items():
            self._keys[name] = None
            self._store.do(methodcaller("set", name, part))

    def read(self, topic: str, rank: int) -> Any:
        """Wait for the message of `rank`.

        Raises RankError when the rank has shown no sign of life for `timeout` seconds: either since the last
        one, or since this began if there was none.
        """
        key, alive = self._key(topic, rank), self._key("alive", rank)
        pause, longest = _POLL_SECONDS[0], max(_POLL_SECONDS[1], self.size * _POLL_SECONDS_PER_RANK)
        count = b""
        heard = looked = time.monotonic()
        while True:
            first = self._get(key)
            if first is not None:
                return self._whole(key, first)
            now = time.monotonic()
            if now - looked > self._beat_seconds:
                looked = now
                latest = self._get(alive) or b""
                if latest == b"end":
                    # It ended without this message, unless that came in between.
                    if self._get(key) is not None:
                        continue
                    raise rank_error(rank, f"rank {rank} gave up without saying why; see its own error")
                if latest != count:
                    count, heard = latest, now
            if now - heard > self._timeout:
                what = "is silent" if count else "has not come to save"
                raise rank_error(
                    rank,
                    f"rank {rank} {what} for {self._timeout:g} s: it died, hangs or is stopped; the "
                    "checkpoints that were there before are intact",
                )
            time.sleep(pause)
            pause = min(longest, pause * 2)

    def look(self, topic: str, rank: int) -> Any:
        """Return the message of `rank` if it is there; else None."""
        key = self._key(topic, rank)
        first = self._get(key)
        return None if first is None else self._whole(key, first)

    def gather(self, topic: str) -> list[Any]:
        """Wait for the messages of all ranks, in their order."""
        return [self.read(topic, rank) for rank in range(self.size)]

    def _get(self, key: str) -> bytes | None:
        return self._store.do(lambda store: bytes(store.get(key)) if store.check([key]) else None)

    def _whole(self, key: str, first: bytes) -> Any:
        count, _, text = first.partition(b":")
        parts = [text]
        for number in range(1, int(count)):
            name = f"{key}/{number}"
            self._keys[name] = None
            parts.append(bytes(self._store.do(methodcaller("get", name))))
        return json.loads(b"".join(parts))

    def _beat(self) -> None:
        key = self._key("alive", self.rank)
        count = 0
        while not self._ended.is_set():
            count += 1
            with suppress(RankError):  # whoever reads or posts next reports it
                self._store.do(methodcaller("set", key, str(count)))
            self._ended.wait(self._beat_seconds)
        with suppress(RankError):
            self._store.do(lambda store: store.set(key, "end"))
            self._store.do(lambda store: store.add(f"{self._number}/gone", 1))
        self._silent.set()

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._number}/{topic}/{rank}"
