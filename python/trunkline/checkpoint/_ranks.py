"""What ranks tell each other while they save: short messages beside the collectives, with signs of life.

Collectives hang, or fail without saying on whose account, when a rank dies. So ranks exchange JSON values
through the key-value store of the process group, and every rank that takes part in an exchange counts up a
key of its own for as long as it does; who waits for a rank whose count stands still says so.

Ranks meet by what they call, not by how many calls they have made: one that has skipped a call is missed in
that one alone. Each rank also leaves word of the call that it is in. A rank that waits for another, which is
in a call of its own meanwhile, fails at once, and leaves word for the other.
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
_ALIKE = "all ranks must make the same calls in the same order (is one inside `if rank == 0:`?)"


class Ranks:
    """The ranks that save together; here this process alone."""

    rank = 0
    size = 1
    nodes: tuple[int, ...] = (0,)  # of each rank: which machine it is on, counted from 0

    def exchange(self, call: str) -> "Exchange | None":
        """Begin the exchange of a call, as "save(5)"; None where there is nobody to talk to."""
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

    def exchange(self, call: str) -> "Exchange | None":
        """Begin the exchange of a call, as "save(5)"."""
        return None if self.size == 1 else self._exchanges.begin(call)


class Exchanges:
    """All exchanges of some ranks. Thread-safe."""

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
        self._announcing = threading.Lock()
        self._attempts = 0
        self._counts: dict[str, int] = {}  # how often each call was made
        self._latest: Exchange | None = None
        # What rank 0 says of itself, and the others take over: how many calls there were, and which of them
        # it has completed without waiting for the others.
        self.order = {"number": 0, "loads": 0}
        self._over: dict[str, list[str]] = {}  # exchanges whose keys are still there, and those keys

    def begin(self, call: str = "call") -> "Exchange":
        """Begin the next one of `call`, which ranks make alike."""
        with self._lock:
            self._attempts += 1
            self.order = {**self.order, "number": self.order["number"] + 1}
            if call == "load()":  # again after a failure: rank 0 may have decided for all
                count = self.order["loads"] + 1
            else:
                count = self._counts[call] = self._counts.get(call, 0) + 1
            self._latest = Exchange(self, call, f"{call}#{count}", self._attempts)
            return self._latest

    def adopt(self, number_shift: int, loads: int) -> None:
        """Count on as rank 0 does."""
        with self._lock:
            self.order = {"number": self.order["number"] + number_shift, "loads": loads}

    def announce(self, exchange: "Exchange", over: bool) -> None:
        """Leave word of the call that this rank is in, or was in last."""
        with self._announcing:
            if self._latest is not exchange:
                return
            text = json.dumps({**exchange.about, "over": over})
            self.store.do(methodcaller("set", f"at/{self.rank}", text))

    def call_of(self, rank: int) -> "dict[str, Any] | None":
        """Return what a rank has left word of."""
        key = f"at/{rank}"
        text = self.store.do(lambda store: bytes(store.get(key)) if store.check([key]) else None)
        return None if text is None else dict(json.loads(text))

    def leave(self, number: str, keys: list[str]) -> None:
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
                older = list(self._over)
            for other in older:
                self._clean(other)

    def _clean(self, number: str) -> bool:
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

    def __init__(self, exchanges: Exchanges, call: str, number: str, attempt: int) -> None:
        """`number`: the same on all ranks, another for each exchange; `attempt`: of this rank alone."""
        self.rank = exchanges.rank
        self.size = exchanges.size
        self.order = dict(exchanges.order)
        self.about = {"call": call, "id": number, "attempt": attempt, **self.order}
        self._exchanges = exchanges
        self._store = exchanges.store
        self._call = call
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
            keys = [self._key(topic, rank) for topic in ("alive", "call", "written") for rank in ranks]
            keys += [*self._keys, f"{self._number}/gone"]
            exchanges, number = self._exchanges, self._number
            start_thread(lambda: exchanges.leave(number, keys), Flag())  # the interpreter waits for it

    def fail(self, why: str) -> None:
        """Note what made the call of this rank fail: ranks that wait for it in another one hear of it."""
        self.about["error"] = why

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

    def meet(self) -> dict[str, int]:
        """Rank 0: wait until all ranks are in this call, and compare what they have done before.

        Returns what they then adopt().
        """
        for rank in range(1, self.size):
            theirs = self.read("call", rank)
            if theirs["loads"] != self.about["loads"]:
                error = rank_error(
                    rank,
                    f"rank {rank} has not made the same calls as rank 0: one of them has called load() and "
                    f"the other has not; {_ALIKE}. Ranks whose states may differ are not saved; the next "
                    f"{self._call.partition('(')[0]} is not affected",
                )
                error.order = self.order  # type: ignore[attr-defined]
                raise error
        return self.order

    def count_load(self) -> dict[str, int]:
        """Rank 0: count a load that is decided. Returns what the others then adopt()."""
        self.order["loads"] += 1
        self._exchanges.adopt(0, self.order["loads"])
        return self.order

    def adopt(self, order: dict[str, int]) -> None:
        """Go on from what rank 0 has counted."""
        self._exchanges.adopt(order["number"] - self.order["number"], order["loads"])
        self.order = dict(order)

    def read(self, topic: str, rank: int) -> Any:
        """Wait for the message of `rank`.

        Raises RankError when the rank is in another call, and when it has shown no sign of life in this one
        for `timeout` seconds: either since the last one, or since this began if there was none.
        """
        key = self._key(topic, rank)
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
                latest = self._get(self._key("alive", rank)) or b""
                if latest == b"end":
                    # It ended without this message, unless that came in between.
                    if self._get(key) is not None:
                        continue
                    raise rank_error(rank, f"rank {rank} gave up without saying why; see its own error")
                if latest == b"":
                    self._look_elsewhere(rank)
                if latest != count:
                    count, heard = latest, now
            if now - heard > self._timeout:
                if count:
                    raise rank_error(
                        rank,
                        f"rank {rank} is silent for {self._timeout:g} s: it died, hangs or is stopped; the "
                        "checkpoints that were there before are intact",
                    )
                raise self._missed(rank)
            time.sleep(pause)
            pause = min(longest, pause * 2)

    def _look_elsewhere(self, rank: int) -> None:
        """Raise RankError where a rank, or this one, is known to be in another call than the others."""
        attempt = self.about["attempt"]
        word = f"{self._number}/elsewhere/{self.rank}/{attempt}"
        told = self._get(word)
        if told is not None:
            with suppress(NotImplementedError):
                self._store.do(methodcaller("delete_key", word))
            other = json.loads(told)
            raise rank_error(other["rank"], self._differs(other["rank"], other["call"]))
        theirs = self._exchanges.call_of(rank)
        if theirs is None or theirs["id"] == self._number:
            return
        if theirs["number"] < self.about["number"]:
            return  # still in the call before
        if theirs["over"]:
            if "error" in theirs:
                why = f"rank {rank} called {theirs['call']} while rank {self.rank} calls {self._call}"
                raise rank_error(rank, f"{why}, and failed: {theirs['error']}")
            return
        if self._get(self._key("alive", rank)) is not None:
            return  # it has come and gone on meanwhile
        word = f"{theirs['id']}/elsewhere/{rank}/{theirs['attempt']}"
        text = json.dumps({"rank": self.rank, "call": self._call})
        self._store.do(methodcaller("set", word, text))
        raise rank_error(rank, self._differs(rank, theirs["call"]))

    def _differs(self, rank: int, call: str) -> str:
        return (
            f"rank {rank} calls {call} while rank {self.rank} calls {self._call}; {_ALIKE}. The checkpoints "
            "that were there before are intact"
        )

    def _missed(self, rank: int) -> RankError:
        """Make the error for ranks that have not come to this call, though there was time."""
        absent = []
        for other in range(self.size) if self.rank == 0 else (rank,):
            if other == rank or (other != self.rank and self._get(self._key("alive", other)) is None):
                theirs = self._exchanges.call_of(other)
                last = "it has made no call yet" if theirs is None else f"its last call was {theirs['call']}"
                absent.append(f"rank {other} ({last})")
        shown = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        what = "has" if len(absent) == 1 else "have"
        return rank_error(
            rank,
            f"{shown} {what} not come to {self._call} for {self._timeout:g} s: either dead, hanging or "
            f"stopped, or alive and elsewhere; {_ALIKE}. The checkpoints that were there before are intact",
        )

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
        with suppress(RankError):
            self.post("call", self.about)
            self._store.do(methodcaller("set", key, "0"))
            self._exchanges.announce(self, over=False)
        while not self._ended.is_set():
            count += 1
            with suppress(RankError):  # whoever reads or posts next reports it
                self._store.do(methodcaller("set", key, str(count)))
            self._ended.wait(self._beat_seconds)
        with suppress(RankError):
            self._store.do(lambda store: store.set(key, "end"))
            self._store.do(lambda store: store.add(f"{self._number}/gone", 1))
            self._exchanges.announce(self, over=True)
        self._silent.set()

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._number}/{topic}/{rank}"
