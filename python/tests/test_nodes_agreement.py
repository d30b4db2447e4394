"""The agreement of nodes on the latest save: its functions, and all orders of events."""

from dataclasses import replace
from typing import Any

import pytest
from nodes_model import Bounds, Protocol, Violation, explore

from trunkline.checkpoint.nodes.agreement import (
    Conflict,
    Decision,
    Diverged,
    Entry,
    Inventory,
    decide,
    needed_damaged,
    next_history,
    next_number,
)

A, B, C = "node a", "node b", "node c"


def save(number: int, nodes: tuple[str, ...] = (A, B), branch: str = "t1", **more: Any) -> Entry:
    return Entry(f"{branch}.{number}", number, branch, more.pop("history", ()), nodes, number, **more)


def holds(node: str, *entries: Entry, committed: tuple[Entry, ...] = ()) -> Inventory:
    return Inventory(node, (*entries, *committed), frozenset(each.id for each in committed))


def test_nodes_that_have_nothing() -> None:
    assert decide([]) == Decision()
    assert decide([holds(A), holds(B)]) == Decision()
    assert next_number([holds(A)]) == 1
    assert next_history([holds(A)], None) == ()


def test_what_counts() -> None:
    """What is committed anywhere, and what is prepared on all that it names."""
    one, two = save(1), save(2)
    assert decide([holds(A, two, committed=(one,)), holds(B, committed=(one,))]).latest == one
    assert decide([holds(A, two, committed=(one,)), holds(B, two, committed=(one,))]).latest == two
    assert decide([holds(A, two, committed=(one,)), holds(B, committed=(one, two))]).latest == two
    # A third node, which has nothing, changes nothing.
    assert decide([holds(A, one), holds(B, one), holds(C)]).latest == one


def test_what_does_not_count_can_be_certain_or_not() -> None:
    one, two = save(1), save(2)
    failed = decide([holds(A, two, committed=(one,)), holds(B, committed=(one,))])
    assert (failed.failed, failed.undecided) == ((two,), ())
    unknown = decide([holds(A, two, committed=(one,))])
    assert (unknown.failed, unknown.undecided) == ((), (two,))


def test_what_is_damaged_is_needed_unless_a_later_entry_or_another_node_shows_what_it_was() -> None:
    one, two = save(1), save(2)
    damaged = replace(holds(A, committed=(one,)), damaged=((2, "why"),))
    for other in (
        holds(B),
        holds(B, committed=(one,)),
        holds(B, two),
    ):  # what is only prepared may have failed
        assert needed_damaged([damaged, other]) == (A, "why")
        assert needed_damaged([other, damaged]) == (A, "why")
    assert needed_damaged([damaged, holds(B, committed=(two,))]) is None
    assert needed_damaged([damaged, holds(B, committed=(save(3),))]) is None
    assert needed_damaged([damaged, holds(B, committed=(save(2, (B, C)),))]) == (A, "why")  # not of this node
    assert needed_damaged([replace(damaged, damaged=((0, "why"), (1, "why")))]) is None
    assert next_number([damaged, holds(B)]) == 3


def test_the_order_of_inventories_does_not_matter() -> None:
    found = [holds(A, save(2), committed=(save(1),)), holds(B, save(2)), holds(C)]
    assert decide(found) == decide(found[::-1])


def test_a_load_is_found_as_the_save_that_it_continues() -> None:
    """Also where not all nodes are there that could show that the save counts."""
    one, two = save(1, (A, B, C)), save(2, (A, B, C))
    load = Entry("load", 3, "t2", (("t1", 2),), (A, B), 2, base=two.id)
    found = decide([holds(A, two, committed=(one, load))])
    assert (found.latest, found.save, found.saves) == (load, two, (one, two))
    without = decide([holds(A, committed=(load,))])
    assert (without.latest, without.save) == (load, None)


def test_a_node_that_returns_has_a_branch_that_was_abandoned() -> None:
    one, two = save(1, (A, B, C)), save(2, (A, B, C))
    away = holds(C, committed=(one, two))  # the others had not committed 2 when it went away
    there = [holds(A, two, committed=(one,)), holds(B, two, committed=(one,))]
    before = decide(there)
    assert (before.latest, before.undecided) == (one, (two,))
    history = next_history(there, before.latest)
    assert history == (("t1", 1),)
    after = save(next_number(there), branch="t2", history=history)
    found = decide([holds(A, two, committed=(one, after)), holds(B, committed=(one, after)), away])
    assert (found.latest, found.saves, found.abandoned) == (after, (one, after), (two,))
    # Until the others have saved, all three can go on from it.
    assert decide([*there, away]).latest == two


def test_going_back_to_an_earlier_save_abandons_what_came_after() -> None:
    found = [holds(A, committed=(save(1, (A,)), save(2, (A,)), save(3, (A,))))]
    again = save(4, (A,), "t2", history=next_history(found, save(1, (A,))))
    now = decide([holds(A, committed=(*found[0].prepared, again))])
    assert (now.latest, now.saves) == (again, (save(1, (A,)), again))
    assert now.abandoned == (save(2, (A,)), save(3, (A,)))


def test_starting_over_abandons_all() -> None:
    found = [holds(A, committed=(save(1, (A,)),))]
    fresh = save(2, (A,), "t2", history=next_history(found, None))
    now = decide([holds(A, committed=(save(1, (A,)), fresh))])
    assert (now.latest, now.saves, now.abandoned) == (fresh, (fresh,), (save(1, (A,)),))


def test_histories_name_all_branches_that_were_known() -> None:
    old = save(5, (A,), "t2", history=(("t0", 3), ("t1", 4)))
    other = save(4, (A,), "t3", history=(("t1", 2),))
    assert next_history([holds(A, old, other)], old) == (("t0", 3), ("t1", 4), ("t2", 5), ("t3", 0))


def test_runs_that_did_not_know_of_each_other() -> None:
    left, right = save(2, (A,), "t2", history=(("t1", 1),)), save(3, (B,), "t3", history=(("t1", 1),))
    with pytest.raises(Diverged, match="step 2 on node a; step 3 on node b") as raised:
        decide([holds(A, committed=(left,)), holds(B, committed=(right,))])
    assert raised.value.latest == (left, right)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([holds(A), holds(A)], "the directory of one is a copy"),
        ([holds(A, save(1)), holds(B, replace(save(1), digest="other"))], "different entries of step 1"),
        ([Inventory(A, (), frozenset({"t1.1"}))], "that it does not have"),
    ],
)
def test_inventories_that_contradict_each_other(found: list[Inventory], why: str) -> None:
    with pytest.raises(Conflict, match=why):
        decide(found)


# The whole protocol ---------------------------------------------------------------------------------------

BOUNDS = [
    Bounds(nodes=2, copies=1, saves=2, restarts=2),
    Bounds(nodes=2, copies=2, saves=2, restarts=2),
    Bounds(nodes=2, copies=2, saves=3, restarts=1, losses=1),
    Bounds(nodes=3, copies=1, saves=2, restarts=1),
    Bounds(nodes=3, copies=2, saves=1, restarts=2),
    Bounds(nodes=3, copies=2, saves=2, restarts=1, losses=1),
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_no_order_of_events_breaks_the_promise(bounds: Bounds) -> None:
    assert explore(bounds) > 5_000


def highest_step(found: list[Inventory]) -> Decision:
    """Believe whichever node has committed the highest step."""
    entries = [each for node in found for each in node.prepared if each.id in node.committed]
    last = max(entries, key=lambda each: (each.step, -each.number), default=None)
    saves = [each for each in entries if last and each.id == (last.base or last.id)]
    return Decision(last, saves[0] if saves else None)


def prepared_anywhere(found: list[Inventory]) -> Decision:
    """Let all count that is prepared on one node."""
    return decide([replace(node, committed=frozenset(each.id for each in node.prepared)) for node in found])


def lineage_only(found: list[Inventory], chosen: Entry | None) -> tuple[tuple[str, int], ...]:
    """Leave out branches that are known and not continued."""
    return tuple(each for each in next_history(found, chosen) if each[1] > 0)


def some(done: int, nodes: int) -> bool:
    return done > 0


MUTANTS = {
    "commits before all have prepared": Protocol(may_send_commit=some),
    "succeeds before all have committed": Protocol(may_succeed=some),
    "prepares before all shares are durable": Protocol(may_send_manifest=some),
    "removes before the entry is committed everywhere": Protocol(removes_after="prepared"),
    "removes when the first may commit": Protocol(removes_after="commit"),
    "believes a node that returns": Protocol(decide=highest_step),
    "believes what is prepared anywhere": Protocol(decide=prepared_anywhere),
    "does not commit a load": Protocol(load_is_an_entry=False),
    "forgets which branches it abandons": Protocol(next_history=lineage_only),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_protocol_that_is_wrong_is_found(name: str) -> None:
    assert any(is_violated(bounds, MUTANTS[name]) for bounds in BOUNDS)


def is_violated(bounds: Bounds, protocol: Protocol) -> bool:
    try:
        explore(bounds, protocol)
    except Violation:
        return True
    return False
