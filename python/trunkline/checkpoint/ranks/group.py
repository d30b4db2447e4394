"""Messages between ranks that save together: JSON values in a key-value store, with heartbeats.

Collectives hang when a rank dies, or fail without naming it. So ranks exchange messages through the store of
the process group. Every rank that takes part in an exchange increments its own key meanwhile; if the counter
of a rank stops, a rank that waits for it fails with an error that names it.

An exchange begins with a meeting (meeting.py): rank 0 waits until all ranks are in the same call.
"""

import itertools
import json
import threading
import time
import weakref
from contextlib import suppress
from operator import methodcaller
from types import TracebackType
from typing import Any

from trunkline._errors import Error, RankError
from trunkline._tensor_io.background import Claim, start_thread
from trunkline._tensor_io.flag import Flag
from trunkline._waits import Wait
from trunkline.checkpoint.ranks.attempts import Attempt, Attempts
from trunkline.checkpoint.ranks.meeting import Failures, Meeting, check_stopped, silent, waiting_for
from trunkline.checkpoint.ranks.store import RankStore, rank_error, value_of

__all__ = ["Exchange", "GroupRanks", "Ranks", "rank_error"]

_BEAT_SECONDS = 0.25  # at most: several in a timeout
_POLL_SECONDS = (0.0005, 0.02)  # the first pause, and the longest with a few ranks
_POLL_SECONDS_PER_RANK = 0.0001  # so that thousands do not keep the store busy with waiting
_LEAVE_SECONDS = 10.0
_SILENCE_SECONDS = 1.0
_PART_CHARACTERS = 4 << 20  # TCPStore accepts at most 8 MiB
# Of messages of other ranks, which rank 0 removes, also if it fails before it asks for them; besides those of
# other topics that it has asked for.
_TOPICS = (
    "options",
    "found",
    "written",
    "entries",
    "volumes",
    "located",
    "whole",
    "ready",
    "read",
    "node",
    "prepared",
    "marked",
    "plans",
    "items",
)
_STEPS = {  # by topic, what a rank that waits for it waits for
    "placed": "it has to lock the directory",
    "written": "it has to write its share",
    "committed": "it has to commit the checkpoint, once all ranks have written",
}


def _part_of(key: str, number: int) -> str:
    """Return the key of part `number`, from 1, of the message `key`, which is part 0."""
    return f"{key}/{number}"


class Ranks:
    """The ranks that save together; this class: only this process."""

    rank = 0
    size = 1
    nodes: tuple[int, ...] = (0,)  # of each rank: the index of its machine
    timeout: float | None = None  # seconds without signs of life until a rank is dead

    def exchange(self, call: str, collectives: int | None = None) -> "Exchange | None":
        """Begin the exchange of a call, such as "save(5)"; None if there are no other ranks.

        `collectives`: how many collective operations this rank has begun, counted alike on all ranks.
        """
        return None

    def collectives(self) -> int | None:
        """Return how many collective operations this rank has begun; None if they are not counted.

        Ranks at the same point of a training have begun equally many.
        """
        return None

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. A collective operation of the process group."""
        return [value]

    def await_end(self) -> None:
        """Wait, a few seconds at most, until exchanges that have ended here have ended on all ranks."""


class GroupRanks(Ranks):
    """The ranks of a torch.distributed process group. Making one is a collective operation."""

    def __init__(self, group: Any, timeout: float, subject: str) -> None:
        """`group`: None for the default one; `timeout`: seconds without heartbeats until a rank is dead.

        `subject`: what is opened, for messages. Raises Error if the ranks cannot reach each other.
        """
        import os
        import secrets
        import socket

        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        from trunkline.checkpoint.ranks.presence import await_ranks

        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("process_group: this process is not one of its ranks")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "process_group: must be a torch.distributed.ProcessGroup of which this process is a rank, "
                f"None for the default group, or False for this process alone; not {group!r}"
            )
        # Weakly: a reference to a group would keep its store alive, see Exchanges.
        self._group = None if group is None else weakref.ref(group)
        self.timeout = timeout
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("process_group: this process is not one of its ranks")
        mine = (secrets.token_hex(8), socket.gethostname(), os.environ.get("GROUP_RANK", ""))
        every: list[Any] = [None] * self.size
        try:
            await_ranks(dist.group.WORLD if group is None else group, f"Checkpointer({subject})")
            dist.all_gather_object(every, mine, group=group)
        except RankError as error:
            raise rank_error(error.rank or 0, self._cannot_open(subject, str(error))) from error
        except RuntimeError as error:  # of any backend, after the timeout of the group
            raise Error(None, self._cannot_open(subject, f"The process group's error: {error}")) from error
        machines = list(dict.fromkeys(each[1:] for each in every))
        self.nodes = tuple(machines.index(each[1:]) for each in every)
        store = default = _get_default_store()
        if hasattr(store, "clone"):
            with suppress(NotImplementedError, RuntimeError):
                store = store.clone()  # a separate connection, which other waits do not block
        self._exchanges = Exchanges(
            PrefixStore(f"trunkline/{every[0][0]}", store), self.rank, self.size, timeout, default
        )

    def _cannot_open(self, subject: str, cause: str) -> str:
        return (
            f"cannot open {subject} on rank {self.rank}: the ranks of the process group could not reach each "
            "other; not all opened a Checkpointer (is it inside `if rank == 0:`?), or one died. Open it on "
            f"all ranks, or pass process_group=False if one rank saves alone. {cause}"
        )

    def exchange(self, call: str, collectives: int | None = None) -> "Exchange | None":
        """Begin the exchange of a call, such as "save(5)"."""
        return None if self.size == 1 else self._exchanges.begin(call, collectives)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Raises RuntimeError if the group is gone, or one does not come."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group())
        return values

    def process_group(self) -> Any:
        """Return the process group. Raises RuntimeError if it was destroyed."""
        import torch.distributed as dist

        group = dist.group.WORLD if self._group is None else self._group()
        if group is None:
            raise RuntimeError("the process group is destroyed")
        return group

    def await_end(self) -> None:
        """Wait for other ranks, after which destroy_process_group() may end the store."""
        self._exchanges.await_end()

    def collectives(self) -> int | None:
        """Return how many collective operations of the group this rank has begun."""
        from torch.distributed import group

        counted = group.WORLD if self._group is None else self._group()
        try:
            return int(counted._get_sequence_number_for_group())  # type: ignore[union-attr]
        except (AttributeError, RuntimeError):  # the group is destroyed, or its backend does not count
            return None


class Exchanges:
    """All exchanges of some ranks. Thread-safe."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, server: Any = None) -> None:
        """`store`: of torch.distributed, with only our keys; `timeout`: for heartbeats of a rank, in seconds.

        `server`: the object that the store's server may belong to. Each exchange keeps it alive until it has
        ended on all ranks, so that the server outlives destroy_process_group(). Nothing keeps it longer: the
        next init_process_group() in this process would connect to it, and find the addresses of the ranks of
        the previous group.
        """
        self._server = None if server is None else weakref.ref(server)
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.store = RankStore(store, timeout)
        self.attempts = Attempts(self.store, rank, size)
        self.failures = Failures(size)
        self._lock = threading.Lock()
        self._cleaning = threading.Lock()
        self._leaving: dict[Flag, None] = {}  # each is set when its leave() has returned
        # Exchanges with keys: how many ranks, messages (by the key of the first part), and other keys.
        self._over: dict[int, tuple[int, list[str], list[str]]] = {}

    def begin(self, call: str = "call", collectives: int | None = None) -> "Exchange":
        """Begin the exchange of a call. Raises RankError if the store was destroyed with the group."""
        server = None if self._server is None else self._server()
        if server is None and self._server is not None:  # the group is gone; an agent may serve the store
            try:
                self.store.do(lambda store: value_of(store, "alive/0"))
            except RankError as error:
                raise rank_error(
                    self.rank,
                    f"{call} failed: the process group that this Checkpointer was opened with is destroyed "
                    "(destroy_process_group), and so is its store; open a new Checkpointer, with a process "
                    "group or with process_group=False",
                ) from error
        return Exchange(self, call, collectives, server)

    def start_leaving(
        self, number: int, ranks: int, messages: list[str], keys: list[str], silent: int, held: list[Any]
    ) -> None:
        """Call leave() in a thread, then clear `held`. The interpreter's exit waits for it."""
        left = Flag()

        def leave() -> None:
            try:
                self.leave(number, ranks, messages, keys, silent)
            finally:
                held.clear()
                self._leaving.pop(left, None)
                left.set()

        self._leaving[left] = None
        try:
            start_thread(leave, Flag())
        except (RuntimeError, Error):  # no thread can be started, or the interpreter is exiting
            leave()
        except BaseException:
            self._leaving.pop(left, None)
            raise

    def await_end(self) -> None:
        """Rank 0: wait, a few seconds at most, until every leave() has returned."""
        until = time.monotonic() + _LEAVE_SECONDS
        for left in list(self._leaving):
            left.wait(max(0.0, until - time.monotonic()))

    def leave(self, number: int, ranks: int, messages: list[str], keys: list[str], silent: int) -> None:
        """Rank 0, when its exchange has ended: wait until others have read the messages, then remove them.

        Only the interpreter's exit waits for this: the store may be in this process. `silent`: how many ranks
        are not waited for, since they sent no heartbeats.
        """
        with self._lock:
            self._over[number] = ranks, messages, keys
        until = time.monotonic() + min(self.timeout, _LEAVE_SECONDS)
        pause, longest = _POLL_SECONDS
        with suppress(RankError):
            while self._clean(number) > silent and time.monotonic() < until:
                time.sleep(pause)
                pause = min(longest, pause * 2)
            with self._lock:
                older = list(self._over)
            for other in older:
                self._clean(other)

    def _clean(self, number: int) -> int:
        """Remove the keys of an exchange if it has ended on all ranks; return on how many it has not."""
        gone = f"{number}/gone"
        with self._cleaning:
            with self._lock:
                ranks, messages, keys = self._over.get(number, (0, [], []))
            if not keys:
                return 0  # add() would create the key again
            left = ranks - int(self.store.do(lambda store: store.add(gone, 0)))
            if left > 0:
                return left
            with self._lock:
                del self._over[number]
            with suppress(NotImplementedError):
                for key in keys:
                    self.store.do(methodcaller("delete_key", key))
                for message in messages:
                    self._remove_message(message)
            return 0

    def _remove_message(self, key: str) -> None:
        """Remove all parts of a message: it may be unread, or its rank may have died while it posted."""
        self.store.do(methodcaller("delete_key", key))
        for number in itertools.count(1):
            part = _part_of(key, number)
            if not self.store.do(methodcaller("check", [part])):
                return
            self.store.do(methodcaller("delete_key", part))


class Exchange:
    """The messages of one call. A context manager: heartbeats are sent within the context.

    Used by one thread at a time, except for stop(). A save hands it over once: the thread that calls save()
    enters it, the thread of the save does the rest and ends it. If that thread never began, or has ended, the
    caller ends the exchange.

    Ranks other than 0 can post and read after meet(); rank 0 reads messages of ranks that it has met.
    """

    def __init__(self, exchanges: Exchanges, call: str, collectives: int | None, server: Any = None) -> None:
        """Other ranks see nothing before __enter__(); then call meet(). `server`: kept alive meanwhile."""
        self.rank = exchanges.rank
        self.size = exchanges.size
        self._exchanges = exchanges
        self._held = [server]
        self._asked: set[str] = set()  # topics
        self._store = exchanges.store
        self._attempts = exchanges.attempts
        self._attempt = Attempt(0, call, collectives=collectives)
        self._timeout = exchanges.timeout
        self._beat_seconds = min(_BEAT_SECONDS, self._timeout / 8)
        # Of rank 0, and that of the call of each rank that this one has met.
        self._number: int | None = None
        self._met: dict[int, int] = {}
        self._resolved: set[int] = set()  # rank 0: ranks that need not learn of a failure
        self._failure_is_known = False  # to other ranks
        self._posted: dict[str, None] = {}  # keys
        self._stopped = False  # by stop()
        self._silent_ranks: set[int] = set()  # without heartbeats
        self._ended = Flag()
        self._silent = Flag()
        self._claim = Claim()  # taken by the thread that sends heartbeats, or by __exit__() if there is none

    def __enter__(self) -> "Exchange":
        """Begin to send heartbeats. If this raises, __exit__() must be called."""
        start_thread(self._beat)
        self._attempts.begin(self._attempt)  # after that: the thread records the end
        if self.rank == 0:
            self._number = self._attempt.number
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the heartbeats, and end the exchange."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._claim.take():  # no thread was started
            self._end()
        self._silent.wait(_SILENCE_SECONDS)  # so that an exit of the process does not look like a death
        number = self._number
        if self.rank == 0 and number is not None:
            messages = [self._key(topic, rank) for topic in {*_TOPICS, *self._asked} for rank in self._met]
            keys = [*self._posted, f"{number}/gone"]
            exchanges, ranks, silent = self._exchanges, 1 + len(self._met), len(self._silent_ranks)
            held, self._held = self._held, []
            exchanges.start_leaving(number, ranks, messages, keys, silent, held)
        self._held = []

    def stop(self) -> None:
        """Stop waiting for other ranks soon: meet() and read() raise Cancelled. Thread-safe; never blocks.

        The other ranks are not notified: code that handles Cancelled does so.
        """
        self._stopped = True

    @property
    def is_over(self) -> bool:
        """Whether it has ended: the outcome is published."""
        return self._ended.is_set()

    @property
    def has_met(self) -> bool:
        """Whether this rank can post."""
        return self._number is not None

    def meet(self) -> dict[str, Any] | None:
        """Wait until all ranks are in this call.

        Rank 0 raises RankError if a rank is in another call, has failed in this one, or has not made a call
        for `timeout` seconds. The other ranks wait for rank 0: they raise RankError, or return the failure
        that rank 0 published by fail(). All raise Cancelled after stop().
        """
        meeting = Meeting(
            self._attempts, self._exchanges.failures, self._attempt, self._timeout, lambda: self._stopped
        )
        self._met, self._resolved = meeting.joined, meeting.resolved
        try:
            if self.rank == 0:
                meeting.gather(self.size, self._beat_seconds)
                return None
            number, failure = meeting.join(self._beat_seconds)
        except RankError as error:
            self._attempt.other = meeting.other
            self._failure_is_known = self.rank > 0 or getattr(error, "is_absence", False)
            raise
        if failure is None:
            self._number = number
            self._met = {0: number}
        self._failure_is_known = failure is not None
        return failure

    def fail(self, failure: dict[str, Any]) -> None:
        """Publish why the call of this rank failed, for ranks that join it later."""
        if not self._failure_is_known:
            self._attempt.failure = failure
        if self.rank == 0:
            absent = [rank for rank in range(1, self.size) if rank not in self._resolved]
            self._exchanges.failures.add(absent, self._attempt, failure)

    def post(self, topic: str, value: Any) -> None:
        """Publish a message of this rank; it replaces an earlier one of that topic."""
        key = self._key(topic, self.rank)
        text = json.dumps(value)
        parts = [text[at : at + _PART_CHARACTERS] for at in range(0, len(text), _PART_CHARACTERS)]
        values = {_part_of(key, number): part for number, part in enumerate(parts) if number > 0}
        values[key] = f"{len(parts)}:{parts[0]}"  # written last: once it exists, so do the others
        for name, part in values.items():
            self._posted[name] = None
            self._store.do(methodcaller("set", name, part))

    def read(self, topic: str, rank: int) -> Any:
        """Wait for the message of `rank`; return its failure if it failed without one.

        Raises RankError if it has sent no heartbeat for `timeout` seconds; Cancelled after stop().
        """
        self._asked.add(topic)
        with waiting_for(f"{self._attempt.call}: rank {rank}, {topic}", self._timeout) as wait:
            return self._read(wait, topic, rank)

    def _read(self, wait: Wait, topic: str, rank: int) -> Any:
        key = self._key(topic, rank)
        pause, longest = _POLL_SECONDS[0], max(_POLL_SECONDS[1], self.size * _POLL_SECONDS_PER_RANK)
        beat: Any = None
        last_beat_at = last_checked = time.monotonic()
        while True:
            first = self._get(key)
            if first is not None:
                return self._whole(key, first)
            check_stopped(lambda: self._stopped, self._attempt.call)
            now = time.monotonic()
            if now - last_checked > self._beat_seconds:
                last_checked = now
                attempt = self._attempts.look(rank, self._met[rank]) if rank in self._met else None
                if attempt is not None and attempt.over:
                    # It ended without this message, unless it was posted in between.
                    if self._get(key) is not None:
                        continue
                    if attempt.failure is not None:
                        return attempt.failure
                    raise rank_error(rank, f"rank {rank} failed without a reason; see its own error")
                # Of this call: heartbeats in another one would keep this rank waiting forever.
                latest = self._attempts.last_beat(rank, self._met.get(rank))
                if latest != beat:
                    beat, last_beat_at = latest, now
            if now - last_beat_at > self._timeout:
                self._silent_ranks.add(rank)
                raise silent(rank, self._timeout)
            wait.check(lambda: f"rank {rank} in {self._attempt.call} ({_STEPS.get(topic, topic)})")
            time.sleep(pause)
            pause = min(longest, pause * 2)

    def look(self, topic: str, rank: int) -> Any:
        """Return the message of `rank` if there is one; else None."""
        if not self.has_met:
            return None
        key = self._key(topic, rank)
        first = self._get(key)
        return None if first is None else self._whole(key, first)

    def gather(self, topic: str) -> list[Any]:
        """Wait for the messages of all ranks, in their order."""
        return [self.read(topic, rank) for rank in range(self.size)]

    def _get(self, key: str) -> bytes | None:
        return self._store.do(lambda store: value_of(store, key))

    def _whole(self, key: str, first: bytes) -> Any:
        count, _, text = first.partition(b":")
        more = (methodcaller("get", _part_of(key, number)) for number in range(1, int(count)))
        return json.loads(b"".join([text, *(bytes(self._store.do(get)) for get in more)]))

    def _beat(self) -> None:
        if not self._claim.take():
            return
        while not self._ended.is_set():
            with suppress(RankError):  # the next read or post reports it
                self._attempts.record()
                self._attempts.beat(self._attempt)
            self._ended.wait(self._beat_seconds)
        self._end()

    def _end(self) -> None:
        with suppress(RankError):
            if self._attempt.number == 0:  # it failed as it began, which other ranks must learn
                self._attempt.over = True
                self._attempts.begin(self._attempt)
            self._attempts.end(self._attempt)
            number = self._number
            if number is None:  # rank 0 may still wait for this rank in its exchange
                number = (self._attempts.take_answer(self._attempt.number) or {}).get("exchange")
            if number is not None:
                self._store.do(lambda store: store.add(f"{number}/gone", 1))
        self._silent.set()

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._number}/{topic}/{rank}"
