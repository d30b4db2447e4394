"""The calls that ranks make, recorded in the store so that other ranks know which call each is in."""

import itertools
import json
import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import methodcaller
from typing import Any

from trunkline.checkpoint.ranks.store import RankStore, value_of

# A rank keeps more of its records than others look at: none may vanish while it is being read.
_KEPT = 16
_LOOKED_AT = 4


@dataclass
class Attempt:
    """One call of one rank. number: 0 until it is begun.

    failure: why it failed, if that is news to ranks that have not met this one in it. other: what the rank
    that made a different call was in. collectives: how many collective operations this rank had begun before
    it; None where nobody counts.
    """

    number: int
    call: str
    over: bool = False
    failure: dict[str, Any] | None = None
    other: str | None = None
    collectives: int | None = None

    def is_before(self, collectives: int | None) -> bool:
        """Whether a rank that has begun so many collective operations is further on than this call."""
        return self.collectives is not None and collectives is not None and self.collectives < collectives


class Attempts:
    """The calls of some ranks. Thread-safe, but for pending() and consume() of the same rank.

    Each rank numbers its own calls, from 1. A call is recorded when it begins, and again when it ends; those
    of one rank can overlap. What one rank reads of another it consumes: that call does not matter any more.
    """

    def __init__(self, store: RankStore, rank: int, size: int) -> None:
        """`store`: with no keys of others."""
        self._store = store
        self._rank = rank
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._beats: dict[int, int] = {}  # of each call under way: its signs of life
        self._begun: deque[Attempt] = deque()  # not recorded yet
        self._ended: deque[Attempt] = deque()  # likewise: the store did not answer
        self._recorded: deque[int] = deque()
        self._newest = 0
        self._under_way: dict[int, str] = {}
        self._next = [1] * size  # of each rank: the first that is not consumed

    def begin(self, attempt: Attempt) -> None:
        """Number a call; record() records it. Only where its end is certain: others wait for that.

        Takes no lock, which a signal handler that raises just then could leave locked.
        """
        attempt.number = next(self._numbers)
        if not attempt.over:
            self._under_way[attempt.number] = attempt.call
        self._begun.append(attempt)

    def record(self) -> None:
        """Record the calls that have ended, and those that have begun in their order."""
        with self._lock:
            while self._ended:
                self._set(self._ended[0])
                self._ended.popleft()
            while self._begun:
                attempt = self._begun[0]
                self._set(attempt)
                self._newest = max(self._newest, attempt.number)  # two threads may begin one each
                self._store.do(methodcaller("set", f"at/{self._rank}", str(self._newest)))
                self._begun.popleft()
                self._recorded.append(attempt.number)
                if len(self._recorded) > _KEPT:
                    old = self._recorded.popleft()
                    for key in (self._key(self._rank, old), f"answer/{self._rank}/{old}"):
                        with suppress(NotImplementedError):
                            self._store.do(methodcaller("delete_key", key))

    def end(self, attempt: Attempt) -> None:
        """Record that a call is over: now, or with the next one if the store does not answer."""
        attempt.over = True
        self._under_way.pop(attempt.number, None)
        self._beats.pop(attempt.number, None)
        self._ended.append(attempt)
        self.record()

    def is_under_way(self, call: str, after: int) -> bool:
        """Whether this rank is in such a call that has begun after the one of number `after`."""
        return any(number > after and each == call for number, each in list(self._under_way.items()))

    def beat(self, attempt: Attempt) -> None:
        """Give a sign of life in a call."""
        if attempt.number > 0:
            self._beats[attempt.number] = self._beats.get(attempt.number, 0) + 1
        # Of all calls: none hides the signs of another.
        text = json.dumps(dict(self._beats))
        self._store.do(methodcaller("set", f"alive/{self._rank}", text))

    def last_beat(self, rank: int, number: int | None = None) -> "dict[str, int] | int | None":
        """Return what differs from one sign of life of a rank to the next: in this call, or in any."""
        text = self._store.do(lambda store: value_of(store, f"alive/{rank}"))
        beats: dict[str, int] | None = None if text is None else json.loads(text)
        return beats if number is None or beats is None else beats.get(str(number))

    def look(self, rank: int, number: int) -> Attempt | None:
        """Return a call of a rank; None where it has not begun."""
        text, newest = self._store.do(
            lambda store: (value_of(store, self._key(rank, number)), value_of(store, f"at/{rank}"))
        )
        if text is not None:
            return Attempt(**json.loads(text))
        return Attempt(number, "", over=True) if int(newest or 0) > number else None

    def pending(self, rank: int) -> list[Attempt]:
        """Return the calls of a rank that are not consumed, oldest first."""

        def read(store: Any) -> tuple[list[bytes | None], int]:
            newest = int(value_of(store, f"at/{rank}") or 0)
            first = max(self._next[rank], newest + 1 - _LOOKED_AT)
            texts = [value_of(store, self._key(rank, number)) for number in range(first, newest + 1)]
            # Last: a call of rank 0 that is over has marked all that it has seen.
            return texts, int((texts and rank == 0 and value_of(store, f"seen/{self._rank}")) or 0)

        texts, seen = self._store.do(read)
        attempts = [Attempt(**json.loads(text)) for text in texts if text is not None]
        return [attempt for attempt in attempts if attempt.number > seen]

    def mark_seen(self, rank: int, number: int) -> None:
        """Rank 0: note that its call has seen one of a rank, whose next call then has another counterpart."""
        self._store.do(methodcaller("set", f"seen/{rank}", str(number)))

    def consume(self, rank: int, number: int) -> None:
        """Forget the calls of a rank up to this one."""
        self._next[rank] = max(self._next[rank], number + 1)

    def last_call(self, rank: int) -> str | None:
        """Return the last call of a rank; None when it has made none."""
        newest = self._store.do(lambda store: value_of(store, f"at/{rank}"))
        attempt = None if newest is None else self.look(rank, int(newest))
        return None if attempt is None else attempt.call

    def answer(self, rank: int, number: int, value: dict[str, Any]) -> None:
        """Rank 0: tell a rank what its call has led to."""
        self._store.do(methodcaller("set", f"answer/{rank}/{number}", json.dumps(value)))

    def take_answer(self, number: int) -> dict[str, Any] | None:
        """Return what rank 0 has answered to a call of this rank, once."""
        key = f"answer/{self._rank}/{number}"

        def take(store: Any) -> bytes | None:
            value = value_of(store, key)
            if value is not None:
                with suppress(NotImplementedError):
                    store.delete_key(key)
            return value

        text = self._store.do(take)
        return None if text is None else dict(json.loads(text))

    def _set(self, attempt: Attempt) -> None:
        text = json.dumps(asdict(attempt))
        self._store.do(methodcaller("set", self._key(self._rank, attempt.number), text))

    def _key(self, rank: int, number: int) -> str:
        return f"call/{rank}/{number}"
