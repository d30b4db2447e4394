"""What ranks tell each other while they save: threads as ranks, over the stores of torch.distributed."""

import functools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from support_threads import await_saves
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import trunkline as tl
from trunkline._tensor_io.background import start_thread, unfinished
from trunkline.checkpoint.ranks import group as group_module
from trunkline.checkpoint.ranks import meeting as meeting_module
from trunkline.checkpoint.ranks.group import Exchange, Exchanges
from trunkline.checkpoint.ranks.outcomes import await_result, give_up, join, together
from trunkline.checkpoint.ranks.store import RankStore, value_of

TIMEOUT = 0.5  # of a rank that is silent
LONG = 60.0  # what may not happen at all

MakeStore = Callable[[], Any]


@pytest.fixture(params=["hash", "tcp", "file"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Connections to one store."""
    if request.param == "hash":
        shared = HashStore()
        return lambda: shared
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "store"), -1)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> Any:
        assert server.port  # the server lives as long as this function
        return TCPStore("127.0.0.1", server.port, is_master=False)

    return connect


def make_ranks(new_store: MakeStore, size: int, timeout: float = LONG) -> list[Exchanges]:
    return [Exchanges(PrefixStore("test", new_store()), rank, size, timeout) for rank in range(size)]


def met(zero: Exchange, *others: Exchange) -> None:
    """Let exchanges of all ranks, which have begun, meet."""
    with ThreadPoolExecutor(len(others) + 1) as pool:
        assert list(pool.map(Exchange.meet, (zero, *others))) == [None] * (len(others) + 1)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    await_saves()
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(LONG)
            assert not thread.is_alive(), thread


def test_messages_come_whole_and_as_they_were(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2)
    values = [None, 0, "", "text \udcff ä", [1, [2.5, {"a": None}]], {"error": "x"}]
    with zero.begin() as there, one.begin() as here:
        met(there, here)
        for number, value in enumerate(values):
            there.post(f"topic{number}", value)
        for number, value in reversed(list(enumerate(values))):
            assert here.read(f"topic{number}", 0) == value
            assert here.read(f"topic{number}", 0) == value


def test_the_last_message_of_a_topic_counts(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2)
    with zero.begin() as there, one.begin() as here:
        met(there, here)
        there.post("committed", "first")
        there.post("committed", "second")
        assert here.read("committed", 0) == "second"


def test_exchanges_do_not_mix(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2)
    with (
        zero.begin("save(1)") as there,
        one.begin("save(1)") as here,
        zero.begin("save(2)") as there_next,
        one.begin("save(2)") as here_next,
    ):
        met(there, here)
        met(there_next, here_next)
        there_next.post("placed", 2)
        there.post("placed", 1)
        assert here.read("placed", 0) == 1
        assert here_next.read("placed", 0) == 2


def test_large_messages(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2)
    text = "".join(map("{:08x}".format, range(2 << 20)))  # 16 MiB; TCPStore takes 8 at once
    with zero.begin() as there, one.begin() as here:
        met(there, here)
        here.post("written", {"crc32c": text})
        assert there.read("written", 1) == {"crc32c": text}
        here.post("written", "short")
        assert there.read("written", 1) == "short"


def test_all_messages_of_many_ranks(new_store: MakeStore) -> None:
    ranks = make_ranks(new_store, 4)

    def take_part(each: Exchanges) -> list[Any]:
        with each.begin() as exchange:
            exchange.meet()
            exchange.post("written", each.rank * 11)
            return exchange.gather("written")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(take_part, ranks)) == [[0, 11, 22, 33]] * 4


def test_a_rank_that_never_comes(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2, TIMEOUT)
    for each, other in ((zero, 1), (one, 0)):
        last = "it has made no call yet" if each is zero else "its last call was an earlier save(1)"
        with each.begin("save(1)") as here, pytest.raises(tl.RankError) as info:
            here.meet()
        assert f"rank {other} ({last}) has not called save(1) within 0.5 s" in str(info.value)
        assert info.value.rank == other
        assert isinstance(info.value, tl.Error)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_falls_silent(new_store: MakeStore, monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    ranks = make_ranks(new_store, 2, TIMEOUT)
    with ranks[0].begin() as there, ranks[1].begin() as here:
        met(there, here)
        # As the heart of a process that died: it has beaten for a while, and does no more.
        monkeypatch.setattr(ranks[odd].attempts, "beat", lambda attempt: None)
        with pytest.raises(tl.RankError, match=f"rank {odd} has sent no heartbeat for 0.5 s"):
            (here, there)[odd].read("written", odd)


def test_the_exit_waits_for_no_silent_rank_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the others, which may not have read yet what came of it."""
    monkeypatch.setattr(group_module, "_LEAVE_SECONDS", LONG)
    store = HashStore()
    ranks = make_ranks(lambda: store, 3, TIMEOUT)
    clean, left = ranks[0]._clean, []

    def watched(number: int) -> int:
        left.append(clean(number))
        return left[-1]

    monkeypatch.setattr(ranks[0], "_clean", watched)
    with ranks[1].begin() as one, ranks[2].begin() as two:
        with ranks[0].begin() as zero:
            met(zero, one, two)
            monkeypatch.setattr(ranks[2].attempts, "beat", lambda attempt: None)
            with pytest.raises(tl.RankError, match="rank 2 has sent no heartbeat"):
                zero.read("written", 2)
            zero.post("committed", 1)
            ranks[0].timeout = LONG
        while 2 not in left:
            time.sleep(0)
        assert unfinished
        assert one.read("committed", 0) == 1
        one.__exit__(None, None, None)
        begun = time.monotonic()
        await_saves()
        assert time.monotonic() - begun < LONG / 2
        assert left[-1] == 1


def test_rank_0_that_falls_silent_before_it_meets(
    new_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = make_ranks(new_store, 2, TIMEOUT)
    with zero.begin(), one.begin() as here:
        while zero.attempts.last_beat(0) is None:
            time.sleep(0)
        monkeypatch.setattr(zero.attempts, "beat", lambda attempt: None)
        with pytest.raises(tl.RankError, match="rank 0 has sent no heartbeat for 0.5 s"):
            here.meet()


def test_signs_of_life_count_for_their_call_alone(
    new_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = make_ranks(new_store, 2, TIMEOUT)
    with zero.begin("save(1)") as here, one.begin("save(1)") as there:
        met(here, there)
        beat, hung = one.attempts.beat, there._attempt
        monkeypatch.setattr(one.attempts, "beat", lambda attempt: None if attempt is hung else beat(attempt))
        with one.begin("save(2)"), pytest.raises(tl.RankError, match="rank 1 has sent no heartbeat"):
            here.read("written", 1)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("runs", [False, True])
def test_a_call_that_fails_as_it_begins(
    new_store: MakeStore, monkeypatch: pytest.MonkeyPatch, odd: int, runs: bool
) -> None:
    """No thread can be had, or a signal handler raises once there is one."""
    ranks = make_ranks(new_store, 2)

    def fail(run: Callable[[], object], *_: Any) -> None:
        if runs:
            start_thread(run)
        raise RuntimeError("can't start new thread")

    exchanges = [each.begin("load()") for each in ranks]
    with monkeypatch.context() as patch:
        patch.setattr(group_module, "start_thread", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            together(exchanges[odd], lambda: None)
    other = exchanges[1 - odd]
    with pytest.raises(tl.Error, match=f"rank {odd}.*can't start new thread"):
        together(other, lambda: join(other) if odd == 0 else other.meet())
    with ranks[0].begin("load()") as here, ranks[1].begin("load()") as there:
        met(here, there)


def fail_alone(each: Exchanges, call: str, collectives: int | None) -> None:
    """Make a call that fails before another rank joins it."""

    def fail() -> None:
        raise OSError(5, "injected")

    with pytest.raises(OSError, match="injected"):
        together(each.begin(call, collectives), fail)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exchanges], None]:
    """What waits until a rank has looked at the calls of another."""

    def await_looks(each: Exchanges) -> None:
        pending, begun, looked = each.attempts.pending, threading.Event(), threading.Event()

        def watched(rank: int) -> Any:
            if begun.is_set():
                looked.set()
            found = pending(rank)
            begun.set()  # a second look: what the first has found was not the end
            return found

        with monkeypatch.context() as patch:
            patch.setattr(each.attempts, "pending", watched)
            assert looked.wait(LONG)

    return await_looks


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("how", ["another call", "one of the same point", "one of an earlier point"])
@pytest.mark.parametrize("counts", [True, False])
def test_a_call_that_one_rank_made_alone_and_all_make_again(
    monkeypatch: pytest.MonkeyPatch,
    looks: Callable[[Exchanges], None],
    odd: int,
    how: str,
    counts: bool,
) -> None:
    """The others wait for the next attempt, also when they came before it."""
    is_over = how == "one of an earlier point" and counts  # no time is needed to see that
    monkeypatch.setattr(meeting_module, "_GRACE_SECONDS", 0.0 if is_over else LONG)
    store = HashStore()
    ranks = make_ranks(lambda: store, 2, 8 * LONG)
    for number in range(3):
        call = "load()" if how == "another call" else "save(2)"
        point = 10 * number + (5 if how == "one of an earlier point" else 6)
        fail_alone(ranks[odd], call, point if counts else None)
        now = 10 * number + 6 if counts else None
        other = ranks[1 - odd].begin("save(2)", now)
        with other, ThreadPoolExecutor(1) as pool:
            meeting = pool.submit(other.meet)
            looks(ranks[1 - odd])
            assert not meeting.done()
            with ranks[odd].begin("save(2)", now) as again:
                assert again.meet() is None
                assert meeting.result(LONG) is None


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("point", [5, 6, None])
def test_a_call_that_one_rank_made_alone_and_does_not_make_again(
    monkeypatch: pytest.MonkeyPatch, odd: int, point: int | None
) -> None:
    """The others do not wait for ever."""
    monkeypatch.setattr(meeting_module, "_GRACE_SECONDS", 0.1)
    store = HashStore()
    is_over = point == 5
    ranks = make_ranks(lambda: store, 2, TIMEOUT if is_over else LONG)
    fail_alone(ranks[odd], "save(2)", point)
    other = ranks[1 - odd].begin("save(2)", 6)
    why = f"rank {odd} .*not called save" if is_over else f"rank {odd}.*injected"
    with pytest.raises(tl.RankError, match=why):
        together(other, lambda: join(other) if odd == 0 else other.meet())


def test_a_rank_that_comes_to_a_call_of_an_earlier_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not late for what rank 0 gave up there: it is in another call."""
    store = HashStore()
    ranks = make_ranks(lambda: store, 2)
    fail_alone(ranks[0], "save(2)", 5)
    zero, one = ranks[0].begin("load()", 6), ranks[1].begin("save(2)", 6)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(together, one, lambda: join(one))
        with pytest.raises(tl.RankError, match=r"rank 1 calls save\(2\) while rank 0 calls load"):
            together(zero, zero.meet)
        with pytest.raises(tl.RankError, match=r"rank 0 calls load\(\) while rank 1 calls save"):
            joining.result(LONG)


def test_a_rank_that_leaves_without_its_message(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2)
    with zero.begin() as here:
        with one.begin() as there:
            met(here, there)
        with pytest.raises(tl.RankError, match="rank 1 failed without a reason"):
            here.read("written", 1)


def test_an_exchange_that_is_over_is_not_given_up(new_store: MakeStore) -> None:
    """As where a signal handler interrupts the caller of a save that has succeeded meanwhile."""
    zero, one = (exchanges.begin() for exchanges in make_ranks(new_store, 2))
    with zero, one:
        met(zero, one)
        zero.post("committed", {"value": None})
        zero.__exit__(None, None, None)
        give_up(zero, KeyboardInterrupt())
        assert one.read("committed", 0) == {"value": None}


def test_a_message_counts_also_when_its_rank_is_gone(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2, TIMEOUT)
    with zero.begin() as here:
        with one.begin() as there:
            met(here, there)
            there.post("written", 1)
        assert here.read("written", 1) == 1


def test_a_rank_that_is_alive_may_be_slow(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2, TIMEOUT)
    read: list[Any] = []
    with zero.begin() as here, one.begin() as there:
        met(here, there)
        reader = threading.Thread(target=lambda: read.append(here.read("written", 1)))
        reader.start()
        begun = time.monotonic()
        while time.monotonic() - begun < 4 * TIMEOUT:
            reader.join(TIMEOUT)
            assert reader.is_alive()  # it neither gave up
        there.post("written", "late")
        reader.join(LONG)
    assert read == ["late"]


def test_a_rank_that_is_late_still_reads_what_was_decided(new_store: MakeStore) -> None:
    """Rank 0 goes on from what it decides without waiting: what it has left behind may not vanish."""
    zero, one = make_ranks(new_store, 2, TIMEOUT)
    late = []
    for number in range(6):
        exchange = one.begin()
        late.append(exchange.__enter__())
        with zero.begin() as there:
            met(there, exchange)
            there.post("decided", number)
    for number, exchange in enumerate(late):
        assert exchange.read("decided", 0) == number
        exchange.__exit__(None, None, None)


class _WithoutCompareSet:
    """A store that cannot compare_set(). Another rank removes each key once it was seen."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def compare_set(self, *_: Any) -> Any:
        raise NotImplementedError

    def check(self, keys: list[str]) -> bool:
        found = bool(self._store.check(keys))
        for key in keys:
            self._store.delete_key(key)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_asking_for_a_key_never_waits_for_it(new_store: MakeStore) -> None:
    store = new_store()
    store.set_timeout(timedelta(seconds=TIMEOUT))
    for _ in range(2):
        assert value_of(store, "key") is None
        assert not store.check(["key"])
    for value in ("", "value", "x" * (4 << 20)):
        store.set("key", value)
        assert value_of(store, "key") == value.encode()
    store.delete_key("key")
    assert value_of(store, "key") is None


@pytest.mark.parametrize("is_removed", [False, True])
def test_asking_a_store_that_cannot_compare(new_store: MakeStore, is_removed: bool) -> None:
    """It waits for a key that is removed just then, but not without an end."""
    store = new_store()
    store.set_timeout(timedelta(seconds=TIMEOUT))
    asked = _WithoutCompareSet(store)
    if not is_removed:
        asked.check = store.check  # type: ignore[method-assign]
    assert value_of(asked, "key") is None
    store.set("key", "value")
    assert value_of(asked, "key") == (None if is_removed else b"value")


def test_a_store_that_waits_for_a_removed_key_is_not_waited_for() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=4 * TIMEOUT))  # its thread is there until then
    asked = RankStore(_WithoutCompareSet(store), TIMEOUT)
    store.set("key", "value")
    with pytest.raises(tl.RankError, match="has not answered for 0.5 s"):
        asked.do(lambda store: value_of(store, "key"))


def keys_left(store: Any) -> int:
    return int(store.num_keys())


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_keys_do_not_accumulate(kind: str) -> None:
    store: Any = (
        HashStore() if kind == "hash" else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    )
    ranks = make_ranks(lambda: store, 3)

    def save(each: Exchanges) -> None:
        for number in range(30):
            with each.begin() as exchange:
                exchange.meet()
                exchange.post("written", number)
                if each.rank == 0:
                    exchange.post("placed", number)
                    exchange.gather("written") if number % 3 else None
                    exchange.post("committed", "x" * 10 * number)
                else:
                    exchange.read("placed", 0)
                    exchange.read("committed", 0)

    left = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(save, ranks))
        await_saves()
        left.append(keys_left(store))
    assert len(set(left)) == 1


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), tl.Error(None, "the interpreter is exiting", None)]
)
def test_an_exchange_ends_where_no_thread_can_be_had(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What it was for is decided by then, and does not fail."""
    store = HashStore()
    ranks = make_ranks(lambda: store, 2)

    def start(run: Callable[[], object], done: Any = None) -> bool:
        if done is not None:
            raise error
        return start_thread(run)

    monkeypatch.setattr(group_module, "start_thread", start)
    left = []
    for _ in range(3):
        for number in range(20):
            zero, one = (each.begin() for each in ranks)
            with zero, one:
                met(zero, one)
                zero.post("committed", number)
                assert one.read("committed", 0) == number
        left.append(keys_left(store))
    assert len(set(left)) == 1


def test_messages_that_nobody_reads_go_with_all_their_parts(
    new_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a rank that dies while it posts: the first part comes last."""
    monkeypatch.setattr(group_module, "_PART_CHARACTERS", 10)
    ranks = make_ranks(new_store, 3)
    left = []
    for _ in range(3):
        for _ in range(20):
            exchanges = [each.begin() for each in ranks]
            with exchanges[0], exchanges[1], exchanges[2]:
                met(*exchanges)
                exchanges[1].post("written", "x" * 100)
                exchanges[2].post("written", "x" * 100)
                exchanges[2]._store.do(methodcaller("delete_key", exchanges[2]._key("written", 2)))
                exchanges[0].post("placed", {"error": "full"})
        await_saves()
        left.append(keys_left(new_store()))
    assert max(left) - min(left) < 20  # of the more than 400 that are posted each time


def test_keys_of_ranks_that_failed_go_as_well() -> None:
    store = HashStore()
    ranks = make_ranks(lambda: store, 3)
    left = []
    for _ in range(3):
        for _ in range(20):
            exchanges = [each.begin() for each in ranks]
            with exchanges[0], exchanges[1], exchanges[2]:
                met(*exchanges)
                exchanges[2].post("written", {"error": "full"})
                exchanges[0].post("placed", {"error": "full"})
        await_saves()
        left.append(keys_left(store))
    assert len(set(left)) == 1


def test_keys_of_calls_that_did_not_meet_go_as_well() -> None:
    store = HashStore()
    ranks = make_ranks(lambda: store, 3)

    def meet_and_hear(exchange: Exchange) -> None:
        join(exchange)
        if exchange.rank > 0:
            await_result(exchange, "placed")

    def call(each: Exchanges) -> None:
        for number in range(1, 21):
            all_are_back.wait(LONG)
            exchange = each.begin(f"save({number if each.rank < 2 else 0})")
            with pytest.raises(tl.RankError, match="calls save"):
                together(exchange, functools.partial(meet_and_hear, exchange))

    left = []
    all_are_back = threading.Barrier(3)
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(call, ranks))
        await_saves()
        left.append(keys_left(store))
    # Records of the last calls stay; there are not yet as many after the first round.
    assert left[1] <= left[0] + 3
    assert left[2] <= left[0] + 3


SERVER = """
import sys, threading
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[tuple["subprocess.Popen[str]", MakeStore]]:
    """A process with a store, and connections to that."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with process:
        port = int(process.stdout.readline())
        yield (
            process,
            lambda: TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LONG)),
        )
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_is_lost(server: tuple["subprocess.Popen[str]", MakeStore], how: signal.Signals) -> None:
    process, connect = server
    zero, one = make_ranks(connect, 2, TIMEOUT)
    failed: list[BaseException] = []

    def wait(each: Exchanges) -> None:
        try:
            with each.begin() as exchange:
                exchange.meet()
                exchange.post("topic", each.rank)
                exchange.gather("topic")
                met.wait(LONG)
                exchange.read("never", 1 - each.rank)
        except BaseException as error:
            failed.append(error)

    met = threading.Barrier(3)
    threads = [threading.Thread(target=wait, args=(each,), daemon=True) for each in (zero, one)]
    for thread in threads:
        thread.start()
    met.wait(LONG)
    process.send_signal(how)
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert [type(error) for error in failed] == [tl.RankError] * 2
    assert all("store" in str(error) and "rank 0 or the agent" in str(error) for error in failed)
    # And at once from now on, not each time after a wait.
    with pytest.raises(tl.RankError, match="store"), one.begin() as exchange:
        exchange.meet()


def test_a_store_that_was_stopped_for_a_while(server: tuple["subprocess.Popen[str]", MakeStore]) -> None:
    process, connect = server
    zero, one = make_ranks(connect, 2, TIMEOUT)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(tl.RankError, match="has not answered for 0.5 s"), zero.begin() as exchange:
        exchange.meet()
    with pytest.raises(tl.RankError, match="has not answered for 0.5 s"), one.begin() as exchange:
        exchange.meet()
    process.send_signal(signal.SIGCONT)
    zero.store._stuck.ended.wait(LONG)  # type: ignore[union-attr]
    one.store._stuck.ended.wait(LONG)  # type: ignore[union-attr]
    for each in (zero, one):
        each.attempts.record()  # that the first calls are over, which the store did not take
    with zero.begin() as there, one.begin() as here:
        met(there, here)
        there.post("placed", 2)
        assert here.read("placed", 0) == 2


def test_short_timeouts_have_more_heartbeats(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2, 0.2)
    with zero.begin() as here, one.begin():
        beats: set[str] = set()
        begun = time.monotonic()
        while len(beats) < 4:
            beats.add(str(zero.attempts.last_beat(1)))
            assert time.monotonic() - begun < LONG
        assert here._beat_seconds <= 0.2 / 4
