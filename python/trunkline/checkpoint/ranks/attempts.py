"""Records the calls of ranks in the store, so that other ranks know which call each one is in."""

import itertools
import json
import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import methodcaller
from typing import Any

from trunkline.checkpoint.ranks.store import RankStore, value_of

# A rank keeps more records than others read: no record may be removed while it is being read.
_KEPT = 16
_READ = 4


@dataclass
class Attempt:
    """One call of one rank. number: 0 until it begins.

    failure: why it failed, if ranks that have not joined the call need to know. other: the different call
    that another rank was in. collectives: how many collective operations this rank had begun before the call;
    None if they are not counted.
    """

    number: int
    call: str
    over: bool = False
    failure: dict[str, Any] | None = None
    other: str | None = None
    collectives: int | None = None

    def is_before(self, collectives: int | None) -> bool:
        """Whether a rank that has begun so many collective operations is past this call."""
        return self.collectives is not None and collectives is not None and self.collectives < collectives


class Attempts:
    """The calls of some ranks. Thread-safe, but for pending() and consume() of the same rank.

    Each rank numbers its own calls, from 1. A call is recorded when it begins, and again when it ends; calls
    of one rank can overlap. A rank consumes the calls of another that it has handled: it ignores them later.
    """

    def __init__(self, store: RankStore, rank: int, size: int) -> None:
        """`store`: holds only keys of this class."""
        self._store = store
        self._rank = rank
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._beats: dict[int, int] = {}  # of each running call: its heartbeats
        self._begun: deque[Attempt] = deque()  # to be recorded
        self._ended: deque[Attempt] = deque()  # to be recorded: the store did not answer
        self._recorded: deque[int] = deque()
        self._newest = 0
        self._under_way: dict[int, str] = {}
        self._next = [1] * size  # of each rank: the first call that is not consumed

    def begin(self, attempt: Attempt) -> None:
        """Number a call; record() records it. end() must follow: other ranks wait for it.

        Takes no lock, which a signal handler that raises at that moment could leave locked.
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
        """Whether this rank is in such a call that began after the call numbered `after`."""
        return any(number > after and each == call for number, each in list(self._under_way.items()))

    def beat(self, attempt: Attempt) -> None:
        """Send a heartbeat for a call."""
        if attempt.number > 0:
            self._beats[attempt.number] = self._beats.get(attempt.number, 0) + 1
        # Of all calls: none hides the heartbeats of another.
        text = json.dumps(dict(self._beats))
        self._store.do(methodcaller("set", f"alive/{self._rank}", text))

    def last_beat(self, rank: int, number: int | None = None) -> "dict[str, int] | int | None":
        """Return a value that changes with each heartbeat of a rank: for this call, or for any."""
        text = self._store.do(lambda store: value_of(store, f"alive/{rank}"))
        beats: dict[str, int] | None = None if text is None else json.loads(text)
        return beats if number is None or beats is None else beats.get(str(number))

    def look(self, rank: int, number: int) -> Attempt | None:
        """Return a call of a rank; None if it has not begun."""
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
            first = max(self._next[rank], newest + 1 - _READ)
            texts = [value_of(store, self._key(rank, number)) for number in range(first, newest + 1)]
            # Read last: a call of rank 0 has marked all calls that it saw before it ended.
            return texts, int((texts and rank == 0 and value_of(store, f"seen/{self._rank}")) or 0)

        texts, seen = self._store.do(read)
        attempts = [Attempt(**json.loads(text)) for text in texts if text is not None]
        return [attempt for attempt in attempts if attempt.number > seen]

    def mark_seen(self, rank: int, number: int) -> None:
        """Rank 0: record that its call has seen this one of a rank; the rank's next call matches another."""
        self._store.do(methodcaller("set", f"seen/{rank}", str(number)))

    def consume(self, rank: int, number: int) -> None:
        """Ignore the calls of a rank up to this one."""
        self._next[rank] = max(self._next[rank], number + 1)

    def last_call(self, rank: int) -> str | None:
        """Return the last call of a rank; None if it has made none."""
        newest = self._store.do(lambda store: value_of(store, f"at/{rank}"))
        attempt = None if newest is None else self.look(rank, int(newest))
        return None if attempt is None else attempt.call

    def answer(self, rank: int, number: int, value: dict[str, Any]) -> None:
        """Rank 0: answer a call of a rank."""
        self._store.do(methodcaller("set", f"answer/{rank}/{number}", json.dumps(value)))

    def take_answer(self, number: int) -> dict[str, Any] | None:
        """Return the answer of rank 0 to a call of this rank, once; None if there is none."""
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
