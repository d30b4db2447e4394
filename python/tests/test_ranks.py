"""What ranks tell each other while they save: threads as ranks, over the stores of torch.distributed."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support_threads import await_saves
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import trunkline as tl
from trunkline.checkpoint._ranks import Exchanges, RankError

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
        for number, value in enumerate(values):
            there.post(f"topic{number}", value)
        for number, value in reversed(list(enumerate(values))):
            assert here.read(f"topic{number}", 0) == value
            assert here.read(f"topic{number}", 0) == value


def test_the_last_message_of_a_topic_counts(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2)
    with zero.begin() as there, one.begin() as here:
        there.post("committed", "first")
        there.post("committed", "second")
        assert here.read("committed", 0) == "second"


def test_exchanges_do_not_mix(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2)
    first, second = zero.begin(), zero.begin()
    with first, second:
        second.post("placed", 2)
        first.post("placed", 1)
        with one.begin() as here:
            assert here.read("placed", 0) == 1
        with one.begin() as here:
            assert here.read("placed", 0) == 2


def test_large_messages(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2)
    text = "".join(map("{:08x}".format, range(2 << 20)))  # 16 MiB; TCPStore takes 8 at once
    with zero.begin() as there, one.begin() as here:
        here.post("written", {"crc32c": text})
        assert there.read("written", 1) == {"crc32c": text}
        here.post("written", "short")
        assert there.read("written", 1) == "short"


def test_all_messages_of_many_ranks(new_store: MakeStore) -> None:
    ranks = make_ranks(new_store, 4)

    def take_part(each: Exchanges) -> list[Any]:
        with each.begin() as exchange:
            exchange.post("written", each.rank * 11)
            return exchange.gather("written")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(take_part, ranks)) == [[0, 11, 22, 33]] * 4


def test_a_rank_that_never_comes(new_store: MakeStore) -> None:
    zero, _ = make_ranks(new_store, 2, TIMEOUT)
    with (
        zero.begin() as here,
        pytest.raises(RankError, match=r"rank 1 \(it has made no call yet\) has not come") as info,
    ):
        here.read("written", 1)
    assert info.value.rank == 1
    assert isinstance(info.value, tl.Error)


def test_a_rank_that_falls_silent(new_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = make_ranks(new_store, 2, TIMEOUT)
    there = one.begin()
    with zero.begin() as here:
        # As the heart of a process that died: it has beaten for a while, and does no more.
        one.store.do(lambda store: store.set(there._key("alive", 1), "7"))
        with pytest.raises(RankError, match="rank 1 is silent for 0.5 s"):
            here.read("written", 1)


def test_a_rank_that_leaves_without_its_message(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2)
    with one.begin():
        pass
    with zero.begin() as here, pytest.raises(RankError, match="rank 1 gave up"):
        here.read("written", 1)


def test_a_message_counts_also_when_its_rank_is_gone(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2, TIMEOUT)
    with one.begin() as there:
        there.post("written", 1)
    with zero.begin() as here:
        assert here.read("written", 1) == 1


def test_a_rank_that_is_alive_may_be_slow(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2, TIMEOUT)
    read: list[Any] = []
    with zero.begin() as here, one.begin() as there:
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
    for number in range(6):
        with zero.begin() as exchange:
            exchange.post("decided", number)
    for number in range(6):
        with one.begin() as exchange:
            assert exchange.read("decided", 0) == number


def keys_left(store: Any) -> int:
    return int(store.num_keys())


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_keys_do_not_accumulate(kind: str) -> None:
    store: Any = (
        HashStore() if kind == "hash" else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    )
    ranks = make_ranks(lambda: store, 3)
    before = keys_left(store)

    def save(each: Exchanges) -> None:
        for number in range(50):
            with each.begin() as exchange:
                if each.rank == 0:
                    exchange.post("placed", number)
                    exchange.gather("written") if number % 3 else None
                    exchange.post("committed", "x" * 10 * number)
                else:
                    exchange.read("placed", 0)
                    exchange.post("written", number)
                    exchange.read("committed", 0)

    def no_written_of_rank_0(each: Exchanges) -> None:
        if each.rank == 0:  # gather() wants one of every rank
            begin = each.begin
            each.begin = lambda: posting(begin())  # type: ignore[method-assign]
        save(each)

    def posting(exchange: Any) -> Any:
        exchange.post("written", None)
        return exchange

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(no_written_of_rank_0, ranks))
    await_saves()
    assert keys_left(store) == before + 3  # which call each rank was in last


def test_keys_of_ranks_that_failed_go_as_well() -> None:
    store = HashStore()
    ranks = make_ranks(lambda: store, 3)
    before = keys_left(store)
    for _ in range(20):
        exchanges = [each.begin() for each in ranks]
        with exchanges[0], exchanges[1], exchanges[2]:
            exchanges[2].post("written", {"error": "full"})
            exchanges[0].post("placed", {"error": "full"})
    await_saves()
    assert keys_left(store) == before + 3  # which call each rank was in last


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
    assert [type(error) for error in failed] == [RankError] * 2
    assert all("store" in str(error) and "rank 0 or the agent" in str(error) for error in failed)
    # And at once from now on, not each time after a wait.
    with pytest.raises(RankError, match="store"), one.begin() as exchange:
        exchange.post("topic", 1)


def test_a_store_that_was_stopped_for_a_while(server: tuple["subprocess.Popen[str]", MakeStore]) -> None:
    process, connect = server
    zero, one = make_ranks(connect, 2, TIMEOUT)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RankError, match="has not answered for 0.5 s"), zero.begin() as exchange:
        exchange.read("written", 1)
    with pytest.raises(RankError, match="has not answered for 0.5 s"), one.begin() as exchange:
        exchange.read("placed", 0)
    process.send_signal(signal.SIGCONT)
    zero.store._stuck.ended.wait(LONG)  # type: ignore[union-attr]
    one.store._stuck.ended.wait(LONG)  # type: ignore[union-attr]
    with zero.begin() as there, one.begin() as here:
        there.post("placed", 2)
        assert here.read("placed", 0) == 2


def test_short_timeouts_have_more_heartbeats(new_store: MakeStore) -> None:
    zero, one = make_ranks(new_store, 2, 0.2)
    with zero.begin() as here, one.begin():
        beats: set[bytes | None] = set()
        begun = time.monotonic()
        while len(beats) < 4:
            beats.add(here._get(here._key("alive", 1)))
            assert time.monotonic() - begun < LONG
        assert here._beat_seconds <= 0.2 / 4
