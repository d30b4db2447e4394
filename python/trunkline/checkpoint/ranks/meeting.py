"""How ranks find out that all of them are in the same call, or fail immediately if they are not.

Rank 0 reads the calls of every other rank, and answers the one that matches its own with the number of its
exchange; or, if a rank is in a different call, with an error. Calls are matched by what is called and by the
order of each rank, never by how many a rank has made, so that ranks which have skipped a call meet in the
next one. A call that the others did not join within the timeout is forgotten: all ranks may then try again.

They may also try again if one has failed before the others joined. The failure no longer matters to a rank
that has begun more collective operations since. If both have begun equally many, the rank that failed has a
moment to try again, before its failure counts as that of this call.
"""

import time
from collections.abc import Callable
from typing import Any

from trunkline._errors import Cancelled, RankError
from trunkline._logging import Log
from trunkline._waits import Wait
from trunkline.checkpoint.ranks.attempts import Attempt, Attempts
from trunkline.checkpoint.ranks.store import rank_error

_POLL_SECONDS = (0.0005, 0.02)  # the first pause, and the longest with a few ranks
_POLL_SECONDS_PER_RANK = 0.0001  # so that thousands do not keep the store busy with waiting
_KEPT = 16  # failures, of each rank
_MAX_NAMED = 8  # ranks in a message
# How long a failure may be one of an earlier call: the rank may be about to go on, or to try again.
_GRACE_SECONDS = 1.0
_ALIKE = (
    "all ranks must make the same calls in the same order (is one inside `if rank == 0:`, or in a call of "
    "another Checkpointer?)"
)
_INTACT = "The checkpoints that were there before are intact"

_log = Log("checkpoint")


def waiting_for(call: str, timeout: float) -> Wait:
    """Return a wait for other ranks in a call; a warning is logged once half of the timeout has passed."""
    return Wait(_log, "wait for other ranks", call, timeout / 2)


def names_of(ranks: list[int]) -> str:
    """Name the ranks, the first ones if there are many."""
    shown = ", ".join(str(rank) for rank in ranks[:_MAX_NAMED])
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def silent(rank: int, timeout: float) -> RankError:
    """Make the error for a rank that was in the call and sends no heartbeats any more."""
    return rank_error(
        rank,
        f"rank {rank} has sent no heartbeat for {timeout:g} s: it died, hangs or is stopped; the checkpoints "
        "that were there before are intact",
    )


def check_stopped(stopped: Callable[[], bool], call: str) -> None:
    """Raise Cancelled if this rank's call was cancelled while it waited for others."""
    if stopped():
        raise Cancelled(None, f"{call} was cancelled while it waited for other ranks")


class Failures:
    """Calls of rank 0 that failed before other ranks joined them."""

    def __init__(self, size: int) -> None:
        """No calls so far."""
        self._of_rank: list[dict[str, tuple[Attempt, dict[str, Any]]]] = [{} for _ in range(size)]

    def add(self, ranks: list[int], attempt: Attempt, failure: dict[str, Any]) -> None:
        """Note a call that these ranks have not joined."""
        for rank in ranks:
            of_rank = self._of_rank[rank]
            of_rank[attempt.call] = attempt, failure
            if len(of_rank) > _KEPT:
                del of_rank[next(iter(of_rank))]

    def take(self, rank: int, attempt: Attempt) -> dict[str, Any] | None:
        """Return the failure of the call that a rank has joined now, or None."""
        ours, failure = self._of_rank[rank].pop(attempt.call, (None, None))
        return None if ours is None or ours.is_before(attempt.collectives) else failure

    def clear(self, rank: int) -> None:
        """Forget the calls that a rank has not joined: it is now in the same call as rank 0."""
        self._of_rank[rank].clear()


class Meeting:
    """The beginning of one exchange, on one rank."""

    def __init__(
        self,
        attempts: Attempts,
        failures: Failures,
        attempt: Attempt,
        timeout: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """`attempt`: of this rank; `failures`: of rank 0's earlier calls; `stopped`: whether to stop."""
        self._attempts = attempts
        self._failures = failures
        self._attempt = attempt
        self._call = attempt.call
        self._timeout = timeout
        self._stopped = stopped
        self.joined: dict[int, int] = {}  # rank 0: ranks that have joined, and the numbers of their calls
        self.resolved: set[int] = set()  # rank 0: those, and ranks that failed or are in another call
        self.other: str | None = None  # rank 0: a different call that another rank is in

    def gather(self, size: int, check_seconds: float) -> None:
        """Rank 0: wait for all ranks. Raises RankError, and Cancelled once stopped."""
        with waiting_for(self._call, self._timeout) as wait:
            self._gather(wait, size, check_seconds)

    def _gather(self, wait: Wait, size: int, check_seconds: float) -> None:
        waiting = dict.fromkeys(range(1, size), time.monotonic())  # since when
        pause, longest = _POLL_SECONDS[0], max(_POLL_SECONDS[1], size * _POLL_SECONDS_PER_RANK)
        while waiting:
            check_stopped(self._stopped, self._call)
            failed: RankError | None = None
            for rank in list(waiting):
                try:
                    if self._admit(rank, waiting):
                        del waiting[rank]
                except RankError as error:  # noqa: PERF203 - the ranks after it are answered as well
                    del waiting[rank]
                    failed = failed or error
            if failed is not None:
                raise failed
            if waiting and time.monotonic() - min(waiting.values()) > self._timeout:
                raise self._absent(list(waiting))
            if waiting:
                wait.check(lambda: f"{names_of(list(waiting))}, to call {self._call} as rank 0 has")
                time.sleep(min(pause, check_seconds))
                pause = min(longest, pause * 2)

    def _admit(self, rank: int, waiting: dict[int, float]) -> bool:
        """Rank 0: whether a rank has joined. Raises RankError if it failed, or is in another call."""
        pending = self._pending(rank)
        same = [each for each in pending if each.call == self._call]
        current = next((each for each in same if not each.over), None)
        different = next((each for each in pending if not each.over and each is not current), None)
        if current is not None:
            if different is not None and different.number < current.number:
                self._reject(rank, different)
            self._attempts.answer(rank, current.number, {"exchange": self._attempt.number})
            self._consume(rank, current)
            self.joined[rank] = current.number
            return True
        if same and same[-1].failure is not None:
            if different is None and not self._is_due(waiting[rank]):
                return False  # it may try again
            self._consume(rank, same[-1])
            raise _failed(rank, same[-1].failure)
        if different is None:
            if pending and pending[-1].failure is not None and self._is_due(waiting[rank]):
                self._consume(rank, pending[-1])
                raise rank_error(rank, self._failed_differently(rank, pending[-1]))
            return False
        if same:
            # It may be on its way to the next call of this rank: it is not rejected there.
            self._consume(rank, same[-1])
            raise rank_error(
                rank,
                f"rank {rank} left {self._call} before rank 0 joined it, and now calls {different.call}; "
                f"{_ALIKE}",
            )
        missed = self._failures.take(rank, different)
        if missed is not None:  # the rank is late, and joins this call next
            why = f"rank 0 left {different.call} before rank {rank} joined it: {missed['error']}"
            answer = {"failure": {**missed, "error": why, "rank": 0}, "number": self._attempt.number - 1}
            self._attempts.answer(rank, different.number, answer)
            self._attempts.consume(rank, different.number)
            waiting[rank] = time.monotonic()
            return False
        self.other = different.call
        if not self._attempts.is_under_way(different.call, after=self._attempt.number):
            self._reject(rank, different)
            self._consume(rank, different)
        raise rank_error(rank, _differs(rank, different.call, 0, self._call))

    def _pending(self, rank: int) -> list[Attempt]:
        """Return the calls of a rank that may match this one."""
        before = self._attempt.collectives
        pending = self._attempts.pending(rank)
        return [each for each in pending if not (each.over and each.is_before(before))]

    def _is_due(self, since: float) -> bool:
        return time.monotonic() - since > min(_GRACE_SECONDS, self._timeout / 4)

    def _failed_differently(self, rank: int, attempt: Attempt) -> str:
        why = "" if attempt.failure is None else attempt.failure["error"]
        return f"rank {rank} called {attempt.call} while another rank calls {self._call}, and failed: {why}"

    def _consume(self, rank: int, attempt: Attempt) -> None:
        self._attempts.consume(rank, attempt.number)
        self._attempts.mark_seen(rank, self._attempt.number)
        self._failures.clear(rank)
        self.resolved.add(rank)

    def _reject(self, rank: int, attempt: Attempt) -> None:
        why = _differs(0, self._call, rank, attempt.call)
        answer = {"error": why, "rank": 0, "number": self._attempt.number}
        self._attempts.answer(rank, attempt.number, answer)

    def _absent(self, ranks: list[int]) -> RankError:
        """Make the error for ranks that have not joined this call within the timeout."""
        absent = []
        for rank in ranks[:4]:
            call = self._attempts.last_call(rank)
            earlier = "an earlier " if call == self._call else ""
            last = "it has made no call yet" if call is None else f"its last call was {earlier}{call}"
            absent.append(f"rank {rank} ({last})")
        shown = ", ".join(absent) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
        one = len(ranks) == 1
        where = "it has exited, hangs, or is" if one else "they have exited, hang, or are"
        error = rank_error(
            ranks[0],
            f"{shown} {'has' if one else 'have'} not called {self._call} within {self._timeout:g} "
            f"s: {where} executing other code; {_ALIKE}. {_INTACT}",
        )
        error.is_absence = True  # type: ignore[attr-defined]
        return error

    def join(self, check_seconds: float) -> tuple[int, dict[str, Any] | None]:
        """Another rank: wait for rank 0, and return the number of its exchange, or how rank 0 failed.

        Raises RankError if rank 0 is in another call, or has sent no heartbeat in any call for `timeout`
        seconds; Cancelled once stopped.
        """
        with waiting_for(self._call, self._timeout) as wait:
            return self._join(wait, check_seconds)

    def _join(self, wait: Wait, check_seconds: float) -> tuple[int, dict[str, Any] | None]:
        pause, longest = _POLL_SECONDS
        begun = last_beat_at = time.monotonic()
        last_checked = 0.0
        beat = self._attempts.last_beat(0)
        while True:
            check_stopped(self._stopped, self._call)
            answer = self._attempts.take_answer(self._attempt.number)
            if answer is not None:
                return self._follow(answer)
            now = time.monotonic()
            if now - last_checked > check_seconds:
                last_checked = now
                found = self._counterpart(begun)
                failed = found is not None and found.over and found.failure is not None
                if found is not None and failed and self._is_due(begun):  # until then it may try again
                    answer = self._attempts.take_answer(self._attempt.number)  # may have come in between
                    if answer is not None:
                        return self._follow(answer)
                    self._attempts.consume(0, found.number)
                    if found.call != self._call and found.other != self._call:
                        raise rank_error(0, self._failed_differently(0, found))
                    return 0, found.failure
                latest = self._attempts.last_beat(0)
                if latest != beat:
                    beat, last_beat_at = latest, now
                if now - last_beat_at > self._timeout:
                    raise self._absent([0]) if found is None or found.over else silent(0, self._timeout)
            wait.check(lambda: f"all ranks to call {self._call}, which rank 0 reports")
            time.sleep(min(pause, check_seconds))
            pause = min(longest, pause * 2)

    def _follow(self, answer: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
        if "exchange" in answer:
            self._attempts.consume(0, answer["exchange"])
            return answer["exchange"], None
        self._attempts.consume(0, answer["number"])
        if "failure" in answer:
            return 0, answer["failure"]
        raise rank_error(answer["rank"], answer["error"])

    def _counterpart(self, begun: float) -> Attempt | None:
        """Find the call of rank 0 that matches this one: the last, if it has tried several times."""
        pending = self._pending(0)
        for each in reversed(pending):
            if each.call == self._call or (each.over and each.other == self._call):
                return each
        return pending[-1] if pending and pending[-1].over and self._is_due(begun) else None


def _failed(rank: int, failure: dict[str, Any]) -> RankError:
    error = rank_error(rank, f"rank {rank} failed: {failure['error']}")
    error.earlier = failure["earlier"]  # type: ignore[attr-defined]
    error.is_cancellation = failure["cancelled"]
    return error


def _differs(rank: int, call: str, other: int, other_call: str) -> str:
    return f"rank {rank} calls {call} while rank {other} calls {other_call}; {_ALIKE}. {_INTACT}"
