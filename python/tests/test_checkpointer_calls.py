"""Ranks that make different calls: each hears of it in bounded time, and the next common call works."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_processes import Failed, RankProcesses

TIMEOUT = 1.5  # of a rank that does not come
LONG = 60.0  # where none may be waited for
SAVE = ("save", 2, {"seed": 2})


@pytest.fixture(scope="module")
def pair() -> Iterator[RankProcesses]:
    with RankProcesses(2) as ranks:
        yield ranks
        ranks.finish()


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    with RankProcesses(4) as ranks:
        yield ranks
        ranks.finish()


@pytest.fixture(params=[2, 4])
def crew(request: pytest.FixtureRequest, pair: RankProcesses, four: RankProcesses) -> RankProcesses:
    return pair if request.param == 2 else four


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def tell(crew: RankProcesses, rank: int, call: tuple[Any, ...]) -> None:
    crew.tell(rank, *call, **({"block": True} if call[0] == "save" else {}))


def opened(crew: RankProcesses, directory: Path, timeout: float) -> None:
    crew.all("open", str(directory), timeout=timeout, keep=None)
    crew.all("save", 1, {"seed": 1}, block=True)


def works_again(crew: RankProcesses, step: int = 10) -> None:
    begun = time.monotonic()
    crew.all("save", step, {"seed": step}, block=True)
    assert crew.all("latest_loaded") == [step] * crew.size
    assert time.monotonic() - begun < LONG / 2


def check_names(failed: dict[int, Failed], odd: int, odd_call: str, call: str) -> None:
    for rank, error in failed.items():
        assert error.is_ours, error
        if rank == odd:
            assert f"calls {odd_call}" in error.message, error
        else:
            assert f"rank {odd} calls {odd_call}" in error.message, error
        assert f"calls {call}" in error.message, error
        assert "`if rank == 0:`" in error.message, error


@pytest.mark.parametrize(
    ("call", "odd_call", "odd"),
    [
        (SAVE, ("latest_loaded",), "last"),
        (SAVE, ("latest_loaded",), "first"),
        (SAVE, ("save", 3, {"seed": 3}), "first"),
        (SAVE, ("save", 3, {"seed": 3}), "last"),
        (("save", 3, {"seed": 3}), SAVE, "last"),
    ],
)
def test_calls_that_meet_fail_at_once_on_all_ranks(
    crew: RankProcesses, directory: Path, call: tuple[Any, ...], odd_call: tuple[Any, ...], odd: str
) -> None:
    names = {"save": "save({1})", "latest_loaded": "load()"}
    number = 0 if odd == "first" else crew.size - 1
    opened(crew, directory, LONG)
    begun = time.monotonic()
    for rank in range(crew.size):
        tell(crew, rank, odd_call if rank == number else call)
    failed = crew.collect(range(crew.size))
    assert time.monotonic() - begun < LONG / 2
    assert len(failed) == crew.size
    # With an odd rank 0 each of the others differs from it.
    shown = [names[each[0]].format(*each) for each in (odd_call, call)]
    for rank, error in failed.items():
        assert error.is_ours, (rank, error)
        assert all(f"calls {name}" in error.message for name in shown), error
        assert "`if rank == 0:`" in error.message, error
    if number != 0:
        check_names({rank: failed[rank] for rank in (0, number)}, number, *shown)
    works_again(crew)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("times", [1, 3])
def test_a_call_that_others_skip(crew: RankProcesses, directory: Path, who: int, times: int) -> None:
    """As with `if rank == 0:` around a save, or an exception before it that is caught."""
    opened(crew, directory, TIMEOUT)
    for step in range(2, 2 + times):
        (failed,) = crew.failures("save", step, {"seed": 1}, block=True, ranks=[who]).values()
        assert failed.is_ours
        assert f"called save({step}) within 1.5 s" in failed.message
        for other in range(crew.size) if who == 0 else [0]:
            assert (f"rank {other} (its last call was save(1))" in failed.message) == (other != who)
    works_again(crew)


@pytest.mark.parametrize("timeout", [0.2, TIMEOUT])
def test_a_rank_that_saves_while_others_are_in_a_collective(
    crew: RankProcesses, directory: Path, timeout: float
) -> None:
    opened(crew, directory, LONG)
    crew.all("set_timeout", timeout)
    for rank in range(1, crew.size):
        crew.tell(rank, "collective")
    (failed,) = crew.failures(*SAVE, block=True, ranks=[0]).values()
    assert "executing other code" in failed.message
    assert crew.one(0, "collective") == crew.size
    assert [crew.reply(rank) for rank in range(1, crew.size)] == [crew.size] * (crew.size - 1)
    crew.all("set_timeout", LONG)
    works_again(crew)


@pytest.mark.parametrize("who", [0, 1])
def test_a_load_that_others_skip(crew: RankProcesses, directory: Path, who: int) -> None:
    opened(crew, directory, TIMEOUT)
    (alone,) = crew.failures("latest_loaded", ranks=[who]).values()
    assert f"rank {1 - who} (its last call was save(1))" in alone.message
    assert "not called load() within 1.5 s" in alone.message
    crew.all("set_timeout", LONG)
    works_again(crew)


@pytest.mark.parametrize("call", [SAVE, ("latest_loaded",)])
@pytest.mark.parametrize("who", [0, 1])
def test_a_call_that_all_make_after_one_made_it_alone(
    crew: RankProcesses, directory: Path, who: int, call: tuple[Any, ...]
) -> None:
    """The failure of the first call does not matter to the others, whichever rank comes first now."""
    opened(crew, directory, TIMEOUT)
    for first in range(2):
        tell(crew, who, call)
        assert len(crew.collect([who])) == 1
        crew.all("set_timeout", LONG)
        for rank in sorted(range(crew.size), reverse=first == 0):
            tell(crew, rank, call)
        assert crew.collect(range(crew.size)) == {}
        crew.all("set_timeout", TIMEOUT)
    crew.all("set_timeout", LONG)
    works_again(crew)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_save_that_failed_on_one_rank_before_a_collective(
    crew: RankProcesses, directory: Path, odd: int
) -> None:
    """Its failure is over: the others wait for the next attempt, though they come to that first."""
    opened(crew, directory, LONG)
    others = [rank for rank in range(crew.size) if rank != odd]
    begun = time.monotonic()
    for _ in range(2):
        assert len(crew.failures("save_object", 2, ranks=[odd])) == 1
        assert crew.all("collective") == [crew.size] * crew.size
        for rank in others:
            # Others than rank 0 have met that one before they look.
            crew.one(rank, "save_until_it_looks" if 0 in (odd, rank) else "save", *SAVE[1:])
        tell(crew, odd, SAVE)
        assert crew.collect([odd]) == {}
        assert crew.failures("wait", ranks=others) == {}
    assert time.monotonic() - begun < LONG / 2
    works_again(crew)


def test_a_load_that_all_make_after_some_were_in_other_calls(four: RankProcesses, directory: Path) -> None:
    """What ranks have not heard of by then is over."""
    opened(four, directory, LONG)
    tell(four, 0, ("latest_loaded",))
    tell(four, 1, ("save", 9, {"seed": 9}))
    assert len(four.collect([0, 1])) == 2
    assert four.all("collective") == [4] * 4
    begun = time.monotonic()
    for rank in (3, 2, 1, 0):
        tell(four, rank, ("latest_loaded",))
    assert four.collect(range(4)) == {}
    assert time.monotonic() - begun < LONG / 2
    works_again(four)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_step_that_is_tried_again_after_different_calls(
    crew: RankProcesses, directory: Path, odd: int
) -> None:
    opened(crew, directory, LONG)
    begun = time.monotonic()
    for _ in range(3):
        for rank in range(crew.size):
            tell(crew, rank, ("latest_loaded",) if rank == odd else SAVE)
        assert len(crew.collect(range(crew.size))) == crew.size
    crew.all("save", *SAVE[1:], block=True)
    assert time.monotonic() - begun < LONG / 2
    works_again(crew)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_skips_a_save_and_loads_with_the_others_later(
    crew: RankProcesses, directory: Path, odd: int
) -> None:
    """As a loop in which one rank raises before its save, catches that and goes on; all meet in a barrier."""
    opened(crew, directory, TIMEOUT)
    for rank in range(crew.size):
        if rank != odd:
            tell(crew, rank, SAVE)
        crew.tell(rank, "latest_loaded")
    for rank in range(crew.size):
        replies = 1 if rank == odd else 2
        assert sum(len(crew.collect([rank])) for _ in range(replies)) == replies
    assert crew.all("collective") == [crew.size] * crew.size
    crew.all("set_timeout", LONG)
    works_again(crew)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("order", ["first", "last"])
def test_a_rank_that_fails_by_itself_before_and_after_the_others_come(
    crew: RankProcesses, directory: Path, odd: int, order: str
) -> None:
    opened(crew, directory, LONG)
    begun = time.monotonic()
    others = [rank for rank in range(crew.size) if rank != odd]
    for _ in range(2):
        failed = {}
        if order == "first":
            failed = crew.failures("save_object", 2, ranks=[odd])
        for rank in others:
            tell(crew, rank, SAVE)
        if order == "last":
            failed = crew.failures("save_object", 2, ranks=[odd])
        failed |= crew.collect(others)
        assert failed.pop(odd).kind == "Unsupported"
        assert sorted(failed) == others
        assert all(f"rank {odd}" in error.message for error in failed.values()), failed
    crew.all("save", *SAVE[1:], block=True)
    assert time.monotonic() - begun < LONG / 2
    works_again(crew)


def test_a_rank_that_comes_when_the_others_have_gone_on(crew: RankProcesses, directory: Path) -> None:
    """It hears that they gave up, and they go on to wait for it in the call that they are in."""
    opened(crew, directory, TIMEOUT)
    late = crew.size - 1
    assert len(crew.failures(*SAVE, block=True, ranks=range(late))) == late
    crew.all("set_timeout", LONG)
    for rank in range(late):
        tell(crew, rank, ("save", 3, {"seed": 3}))
    for step in (2, 3):
        tell(crew, late, ("save", step, {"seed": step}))
    (failed,) = crew.collect([late]).values()
    assert f"rank 0 left save(2) before rank {late} joined it" in failed.message
    assert crew.collect(range(crew.size)) == {}
    works_again(crew)


def test_opening_while_others_save(pair: RankProcesses, directory: Path, tmp_path: Path) -> None:
    opened(pair, directory, TIMEOUT)
    pair.tell(1, "open", str(tmp_path / "other"), name="other")
    (failed,) = pair.failures(*SAVE, block=True, ranks=[0]).values()
    assert "rank 1 (its last call was save(1)) has not called save(2)" in failed.message
    pair.one(0, "open", str(tmp_path / "other"), name="other")
    pair.reply(1)
    works_again(pair)


def test_a_skipped_save_in_the_background(crew: RankProcesses, directory: Path) -> None:
    """In a loop that goes on: errors until all have heard of it, and no longer."""
    opened(crew, directory, TIMEOUT)
    for rank in range(crew.size - 1):
        crew.one(rank, "save", 2, {"seed": 2})
    failures = 0
    for step in range(3, 12):
        if not crew.failures("save", step, {"seed": step}):
            break
        failures += 1
    assert 1 <= failures <= 3
    crew.all("wait")
    works_again(crew, 20)


def test_a_skipped_save_of_a_step_that_is_saved_again_and_again(crew: RankProcesses, directory: Path) -> None:
    """The state of one moment on some ranks, and of a later one on others, would make one checkpoint."""
    opened(crew, directory, TIMEOUT)
    for rank in range(crew.size - 1):
        crew.one(rank, "save", 5, {"seed": 1})
    messages = []
    for _ in range(4):
        for rank in range(crew.size):
            crew.tell(rank, "collective")
        crew.collect(range(crew.size))
        failed = crew.failures("save", 5, {"seed": 1}, block=True)
        messages += [error.message for error in failed.values()]
        if not failed:
            break
    else:
        raise AssertionError("it never works again")
    assert any("different points of the training" in message for message in messages)
    works_again(crew, 20)


def test_a_failed_save_on_one_rank_and_a_load_on_the_others(crew: RankProcesses, directory: Path) -> None:
    """A rank whose state cannot be saved has come to the save all the same."""
    opened(crew, directory, LONG)
    for rank in range(crew.size):
        if rank == 1:
            crew.tell(1, "save_object", 2)
        else:
            tell(crew, rank, SAVE)
    failed = crew.collect(range(crew.size))
    assert len(failed) == crew.size
    assert failed[1].kind == "Unsupported"
    works_again(crew)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_signal_handler_that_raises_as_a_save_begins(
    pair: RankProcesses, directory: Path, odd: int
) -> None:
    """At every second line (each rank at others): nobody waits for that save, and a later one works."""
    opened(pair, directory, LONG)
    pair.all("set_timeout", 0.4)
    event = odd
    while pair.one(odd, "interrupted_save", 100 + event, event):
        begun = time.monotonic()
        for _ in range(4):
            failed = pair.failures("save", 100 + event, {"seed": event}, block=True)
            if not failed:
                break
            assert all(error.is_ours for error in failed.values()), failed
        assert not failed, (event, failed)
        assert time.monotonic() - begun < LONG / 2
        event += 2
    assert event > 20
    pair.all("set_timeout", LONG)
    works_again(pair, 1000)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("how", ["cancelled_save", "save_until_ctrl_c"])
def test_a_save_that_is_cancelled_while_it_waits_for_others(
    crew: RankProcesses, directory: Path, odd: int, how: str
) -> None:
    """It ends immediately, ranks that join later learn of it, and the next save raises nothing."""
    opened(crew, directory, LONG)
    begun = time.monotonic()
    if how == "cancelled_save":
        (failed,) = crew.failures(how, *SAVE[1:], ranks=[odd]).values()
        assert failed.kind == "Cancelled"
    else:
        assert crew.one(odd, how, *SAVE[1:])
    others = [rank for rank in range(crew.size) if rank != odd]
    late = crew.failures(*SAVE, block=True, ranks=others)
    assert sorted(late) == others
    for error in late.values():
        assert error.is_ours, error
        assert f"rank {odd}" in error.message, error
        assert "save(2) was cancelled" in error.message, error
    assert crew.failures("save", 3, {"seed": 3}, block=True) == {}
    assert time.monotonic() - begun < LONG / 2
    works_again(crew)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_failure_on_another_rank_is_no_cancellation(directory: Path, odd: int) -> None:
    with RankProcesses(2) as ranks:
        opened(ranks, directory, LONG)
        ranks.one(odd, "fail_writes", errno.EIO)
        ranks.all("save", 2, {"seed": 2})
        (failed,) = ranks.failures("cancel_late", ranks=[1 - odd]).values()
        assert failed.is_ours
        assert f"rank {odd}" in failed.message
        assert "EIO" in failed.message
        assert sorted(ranks.failures("wait", ranks=[odd])) == [odd]
        ranks.finish()


@pytest.mark.parametrize("odd", [0, 1])
def test_a_save_that_is_cancelled_while_others_write(pair: RankProcesses, directory: Path, odd: int) -> None:
    """One rank has written its share, and waits for the other, whose disk hangs."""
    opened(pair, directory, LONG)
    begun = time.monotonic()
    pair.one(1 - odd, "hold_writes")
    pair.one(odd, "watch_reads", "written" if odd == 0 else "committed")
    pair.all("save", 2, {"seed": 2})
    pair.one(odd, "await_read")
    (failed,) = pair.failures("cancel", ranks=[odd]).values()
    assert failed.kind == "Cancelled"
    pair.one(1 - odd, "release")
    (failed,) = pair.failures("wait", ranks=[1 - odd]).values()
    assert failed.is_ours
    assert f"rank {odd}" in failed.message
    assert pair.failures("cancel_late") == {}  # cancelled on both
    assert time.monotonic() - begun < LONG / 2
    assert pair.all("latest_loaded") == [1, 1]
    works_again(pair)
