"""Which steps a tier gets, which ones retention leaves for it, and where a step is loaded from."""

import pytest

from trunkline.checkpoint.tiers.plan import Commit, held_steps, newest_of, source_of, steps_to_copy
from trunkline.checkpoint.tiers.rate import RateLimit


def commits(*pairs: tuple[int, int]) -> list[Commit]:
    return [Commit(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("local", "there", "every", "keep", "expected"),
    [
        ([], [], 1, 3, []),
        ([(1, 1), (2, 2)], [], 1, 3, [1, 2]),
        ([(1, 1), (2, 2)], [(1, 1)], 1, 3, [2]),
        ([(1, 1), (2, 2)], [(2, 2)], 1, 3, []),  # 1 was committed before the latest one there
        ([(9, 9), (10, 10), (11, 11), (20, 20)], [], 10, 3, [10, 20]),
        ([(0, 1), (5, 2)], [], 10, 3, [0]),
        ([(10, 1), (20, 2), (30, 3)], [], 10, 2, [20, 30]),  # the tier would remove 10 at once
        ([(10, 1), (20, 2), (30, 3)], [], 10, None, [10, 20, 30]),
        # The run went back to 10: the new 20 replaces the one that is there, and 30 is not copied again.
        ([(10, 1), (30, 3), (20, 4)], [(10, 1), (20, 2), (30, 3)], 10, 3, [20]),
        # In the order of commits, not of steps.
        ([(20, 4), (30, 3)], [(10, 1)], 10, 3, [30, 20]),
        # Another machine has copied 40 meanwhile.
        ([(10, 1), (20, 2), (30, 3)], [(40, 4)], 10, 3, []),
    ],
)
def test_what_is_copied(
    local: list[tuple[int, int]],
    there: list[tuple[int, int]],
    every: int,
    keep: int | None,
    expected: list[int],
) -> None:
    found = steps_to_copy(commits(*local), commits(*there), every, keep)
    assert [each.step for each in found] == expected


@pytest.mark.parametrize(
    ("local", "every", "settled", "expected"),
    [
        ([], 1, [], set()),
        ([(1, 1), (2, 2)], 1, [], {1, 2}),
        ([(1, 1), (2, 2)], 1, [(1, 1)], {2}),
        ([(1, 1), (2, 2)], 2, [], {2}),
        ([(2, 5)], 2, [(2, 2)], {2}),  # it was saved again
        ([(0, 1)], 1000, [], {0}),
    ],
)
def test_what_retention_leaves(
    local: list[tuple[int, int]], every: int, settled: list[tuple[int, int]], expected: set[int]
) -> None:
    assert held_steps(commits(*local), every, set(commits(*settled))) == expected


@pytest.mark.parametrize(
    ("sources", "newest", "of_step_10"),
    [
        ([[], []], None, None),
        ([[(10, 1)], [(10, 1)]], (0, 10), 0),  # the directory itself comes first
        ([[], [(10, 1)]], (1, 10), 1),
        ([[(20, 2)], [(10, 1)]], (0, 20), 1),
        ([[(20, 2)], [(10, 1), (30, 3)]], (1, 30), 1),  # what another machine has saved
        ([[(30, 3), (20, 4)], [(10, 1)]], (0, 20), 1),  # the last commit counts, not the highest step
        ([[(10, 1)], [(10, 7)]], (1, 10), 1),  # it was saved again, elsewhere
        ([[], [(10, 1)], [(10, 1), (20, 2)]], (2, 20), 1),
    ],
)
def test_where_a_step_is_loaded_from(
    sources: list[list[tuple[int, int]]], newest: tuple[int, int] | None, of_step_10: int | None
) -> None:
    found = newest_of([commits(*source) for source in sources])
    assert (None if found is None else (found[0], found[1].step)) == newest
    of_step = source_of([commits(*source) for source in sources], 10)
    assert (None if of_step is None else of_step[0]) == of_step_10


class Clock:
    """Time that passes only in pauses, which end late, and by transfers."""

    def __init__(self, late: float) -> None:
        self.now = 100.0
        self.late = late

    def pause(self, seconds: float) -> None:
        self.now += seconds + self.late


@pytest.mark.parametrize("late", [0.0, 0.0005, 0.003])
@pytest.mark.parametrize("takes", [0.0, 0.01, 0.04])
def test_the_rate_is_kept_within_two_percent(late: float, takes: float) -> None:
    clock = Clock(late)
    limit = RateLimit(20_000_000, clock.pause, lambda: clock.now)
    limit.start()
    begun = clock.now
    for _ in range(100):
        clock.now += takes
        limit.pace(1_000_000)
    rate = 100e6 / (clock.now - begun)
    assert rate <= 20_000_000 * 1.005
    if takes + late < 0.05:
        assert rate >= 20_000_000 * 0.98


def test_what_was_slow_does_not_make_the_rest_faster() -> None:
    clock = Clock(0)
    limit = RateLimit(1000, clock.pause, lambda: clock.now)
    limit.start()
    clock.now += 60  # the tier did not respond
    limit.pace(1000)
    begun = clock.now
    for _ in range(10):
        limit.pace(1000)
    assert clock.now - begun == pytest.approx(10, abs=0.02)


def test_without_a_limit_there_are_no_pauses() -> None:
    clock = Clock(0)
    limit = RateLimit(None, clock.pause, lambda: clock.now)
    limit.start()
    limit.pace(1 << 40)
    assert clock.now == 100.0


def test_what_was_set_aside_in_a_tier_is_not_copied_again() -> None:
    local = [Commit(step, step) for step in range(1, 6)]
    assert steps_to_copy(local, [], 1, None, above=3) == local[3:]
    assert steps_to_copy(local, [Commit(9, 4)], 1, None) == local[4:]
