"""What the coordinator of nodes decides of a save or load."""

from dataclasses import replace
from typing import Any

import pytest

from trunkline.checkpoint.nodes.agreement import Entry, Inventory, decide
from trunkline.checkpoint.nodes.run import (
    NewSave,
    Refill,
    Refused,
    Run,
    abandoned_steps,
    crowded_shares,
    goes_on_from,
    loadable_saves,
    plan_continuation,
    plan_load,
    plan_refill,
    plan_removal,
    plan_save,
    plan_tier_load,
    related_tiers,
    saves_to_verify,
    steps_with_lost_copies,
)
from trunkline.checkpoint.retention import KeepBest, Rules

A, B = "node a", "node b"


def entry(step: int, nodes: tuple[str, ...] = (A, B), number: int | None = None) -> Entry:
    return Entry(f"save {step}", number or step, "b1", (), nodes, step)


def both(*entries: Entry) -> list[Inventory]:
    """Both nodes have committed all of these."""
    return [Inventory(node, entries, frozenset(each.id for each in entries)) for node in (A, B)]


RUN = Run("b1", ())


def test_the_first_save() -> None:
    plan = plan_save([Inventory(A), Inventory(B)], None, False, NewSave(7), Rules(3, None, None))
    assert (plan.entry.step, plan.entry.number, plan.entry.nodes, plan.entry.history) == (7, 1, (A, B), ())
    assert plan.removable == ()


@pytest.mark.parametrize(
    ("steps", "step", "keep", "every", "removed"),
    [
        ([1, 2], 3, 3, None, []),
        ([1, 2, 3], 4, 3, None, [1]),
        ([1, 2, 3], 4, 1, None, [1, 2, 3]),
        ([1, 2, 3], 4, None, None, []),
        ([10, 15, 20], 25, 1, 10, [15]),
        ([1, 2, 3], 3, 3, None, [3]),  # the same step again
        ([1, 5, 9], 6, 3, None, [9]),  # later steps first
    ],
)
def test_what_a_save_lets_be_removed(
    steps: list[int], step: int, keep: int | None, every: int | None, removed: list[int]
) -> None:
    found = both(*(entry(each, number=number) for number, each in enumerate(steps, 1)))
    plan = plan_save(found, RUN, False, NewSave(step), Rules(keep, every, None))
    assert sorted(plan.removable) == sorted(f"save {each}" for each in removed)
    assert plan.entry.number == len(steps) + 1


@pytest.mark.parametrize(
    ("best", "losses", "removed"),
    [
        (("loss", "min", 1), [3.0, 1.0, 2.0, 2.5], [1, 3]),
        (("loss", "max", 2), [3.0, 1.0, 2.0, 2.5], [2, 3]),
        (("loss", "min", 1), [1.0, 1.0, 1.0, 1.0], [2, 3]),  # of equal ones the first
        (("loss", "min", 2), ["NaN", "Infinity", None, 0.5], [1, 3]),
        (("loss", "max", 1), ["Infinity", 5.0, 6.0, "NaN"], [2, 3]),
        (("other", "max", 1), [3.0, 1.0, 2.0, 2.5], [1, 2, 3]),
    ],
)
def test_the_best_are_kept_beside_the_last(best: KeepBest, losses: list[Any], removed: list[int]) -> None:
    metrics = [() if loss is None else (("loss", loss),) for loss in losses]
    saves = [replace(entry(step), metrics=metrics[step - 1]) for step in (1, 2, 3)]
    plan = plan_save(both(*saves), RUN, False, NewSave(4, metrics=metrics[3]), Rules(1, None, best))
    assert sorted(plan.removable) == sorted(f"save {each}" for each in removed)
    assert plan.entry.metrics == metrics[3]


def test_a_run_that_has_not_loaded_must_not_save() -> None:
    with pytest.raises(Refused, match="up to step 3"):
        plan_save(both(entry(3)), None, False, NewSave(9), Rules(3, None, None))
    fresh = plan_save(both(entry(3)), None, True, NewSave(9), Rules(1, None, None))
    assert fresh.entry.history == (("b1", 0),)
    assert fresh.removable == ()


def test_what_failed_is_removed_and_what_is_unknown_is_not() -> None:
    failed, unknown = entry(2), replace(entry(3, (A, "absent")), branch="b2")
    found = [Inventory(A, (entry(1), failed, unknown), frozenset({"save 1"})), both(entry(1))[1]]
    assert plan_save(found, RUN, False, NewSave(4), Rules(3, None, None)).removable == ("save 2",)


def test_what_is_undecided_is_removed_once_the_run_went_on_without_it() -> None:
    """The node that is lost may have committed it, but nobody was told that it was saved."""
    cut = entry(2, (A, "lost"))
    load = Entry("load", 3, "b2", (("b1", 1),), (A, B), 1, base="save 1")
    found = [
        Inventory(A, (entry(1), cut, load), frozenset({"save 1", "load"})),
        Inventory(B, (entry(1), load), frozenset({"save 1", "load"})),
    ]
    assert decide(found).undecided == (cut,)
    assert set(plan_save(found, Run.of(load), False, NewSave(2), Rules(3, None, None)).removable) == {
        "save 2",
        "load",
    }
    kept = plan_save(found, Run.of(load), False, NewSave(2), Rules(None, None, None))
    assert set(kept.removable) == {"load"}


def test_what_cannot_be_loaded_takes_the_place_of_nothing_that_can() -> None:
    lost = replace(entry(1, (A, "lost")), metrics=(("loss", 0.1),))
    here = [replace(entry(step), metrics=(("loss", step / 10),)) for step in (2, 3)]
    found = both(lost, *here)
    best = ("loss", "min", 1)
    plan = plan_save(found, RUN, False, NewSave(4, metrics=(("loss", 0.4),)), Rules(1, None, best))
    assert plan.removable == ("save 3",)  # the best that can be loaded is 2; 1 is the best with the lost node
    plan = plan_save(found, RUN, False, NewSave(4), Rules(3, None, None))
    assert plan.removable == ("save 1",)
    plan = plan_save(
        both(entry(1), entry(2, (A, "lost")), entry(3)), RUN, False, NewSave(4), Rules(3, None, None)
    )
    assert plan.removable == ()  # two that can be loaded, and the new one


def test_what_a_node_cannot_read_may_be_the_latest() -> None:
    damaged = replace(both(entry(1))[0], damaged=((2, "the manifest is damaged"),))
    for found in ([damaged], [damaged, both(entry(1))[1]]):
        for plan in (
            lambda: plan_load(found, None),  # noqa: B023
            lambda: loadable_saves(found),  # noqa: B023
            lambda: plan_save(found, RUN, False, NewSave(3), Rules(3, None, None)),  # noqa: B023
        ):
            with pytest.raises(Refused, match="on the node node a, the manifest is damaged") as refused:
                plan()
            assert refused.value.kind == "damaged"
    two = replace(entry(2), kept_by=((0, 1), (1, 0)))
    other = both(entry(1), two)[1]
    plan = plan_load([damaged, other], None)
    assert plan is not None
    assert (plan.save, plan.places) == (two, {B: [1]})
    saved = plan_save([damaged, other], RUN, False, NewSave(3), Rules(3, None, None))
    assert saved.entry.number == 3


def test_another_run_has_saved() -> None:
    with pytest.raises(Refused, match="another run has saved step 3 meanwhile"):
        plan_save(both(entry(3)), Run("b0", ()), False, NewSave(4), Rules(3, None, None))


def test_a_load_of_the_latest_is_an_entry_and_of_another_is_not() -> None:
    found = both(entry(1), entry(2), entry(3))
    latest = plan_load(found, None)
    assert latest is not None
    assert plan_load(found, 3) == latest
    assert (latest.save, latest.run) == (entry(3), None)
    load = plan_continuation(found, latest)
    assert (load.base, load.number, load.history) == ("save 3", 4, (("b1", 3),))
    after = both(entry(1), entry(2), entry(3), load)
    assert decide(after).save == entry(3)
    saved = plan_save(after, Run.of(load), False, NewSave(4), Rules(2, None, None))
    assert set(saved.removable) == {"save 1", "save 2", load.id}

    earlier = plan_load(found, 2)
    assert earlier is not None
    assert earlier.run == Run(start=entry(2), latest="save 3", left=("save 3",))
    back = plan_save(found, earlier.run, False, NewSave(3), Rules(5, None, None))
    assert back.entry.history == (("b1", 2),)
    assert back.removable == ("save 3",)
    assert decide(both(entry(1), entry(2), entry(3), back.entry)).saves == (entry(1), entry(2), back.entry)


def test_a_continuation_stays_while_it_shows_that_its_save_counts() -> None:
    save = entry(1, (A, "absent"))
    load = Entry("load", 2, "b2", (("b1", 1),), (A,), 1, base=save.id)
    found = [Inventory(A, (save, load), frozenset({load.id}))]
    assert decide(found).saves == (save,)
    assert plan_save(found, Run.of(load), False, NewSave(2), Rules(3, None, None)).removable == ()
    assert plan_save(found, Run.of(load), False, NewSave(2), Rules(1, None, None)).removable == (
        "load",
        "save 1",
    )


def test_what_cannot_be_loaded() -> None:
    assert plan_load([Inventory(""), Inventory("")], None) is None
    with pytest.raises(Refused, match="there is no checkpoint of step 5; no step can"):
        plan_load([Inventory("")], 5)
    with pytest.raises(Refused, match="there is no checkpoint of step 5; of these nodes, 1, 2 can be loaded"):
        plan_load(both(entry(1), entry(2)), 5)
    alone, shared = entry(1, (A,)), entry(2)
    found = [Inventory(A, (alone, shared), frozenset({alone.id, shared.id}))]
    for step in (None, 2):
        with pytest.raises(
            Refused, match="step 2 cannot be loaded: its bytes on node b are not here; .* 1 can"
        ):
            plan_load(found, step)
    assert [each.step for each in loadable_saves(found)] == [1]
    earlier = plan_load(found, 1)
    assert earlier is not None
    assert earlier.save == alone


def test_nodes_without_anything_do_not_matter() -> None:
    found = [Inventory(""), *both(entry(1))]
    plan = plan_load(found, None)
    assert plan is not None
    assert plan.places == {A: [1], B: [2]}
    assert [each.step for each in loadable_saves(found)] == [1]


def test_abandoned_steps_are_named() -> None:
    new = Entry("new", 3, "b2", (("b1", 1),), (A,), 2)
    found = [Inventory(A, (entry(1), new), frozenset({"save 1", "new"})), both(entry(1), entry(2))[1]]
    assert abandoned_steps(found) == [(2, B)]


def test_what_goes_with_a_deleted_step() -> None:
    load = Entry("load", 4, "b2", (("b1", 2),), (A, B), 2, base="save 2")
    latest = replace(entry(5), branch="b2", history=(("b1", 2),))
    found = both(entry(1), entry(2), load, latest)
    assert plan_removal(found, 1) == ["save 1"]
    assert plan_removal(found, 2) == ["load", "save 2"]
    with pytest.raises(Refused, match="step 5 is the latest, which cannot be deleted") as refused:
        plan_removal(found, 5)
    assert refused.value.kind == "latest"
    with pytest.raises(Refused, match="no checkpoint of step 9; of these nodes, 1, 2, 5 can be loaded"):
        plan_removal(found, 9)
    alone = entry(2, (A, "lost"))  # cannot be loaded
    assert plan_removal([Inventory(A, (alone, latest), frozenset({"save 2", "save 5"}))], 2) == ["save 2"]


def test_shares_with_two_copies_in_one_domain() -> None:
    saved = replace(entry(1, (A, B, "c")), kept_by=((0, 1), (1, 2), (2, 0)))
    assert crowded_shares(saved, {A: ["r1"], B: ["r2"], "c": ["r3"]}) == 0
    assert crowded_shares(saved, {A: ["r1"], B: ["r1"], "c": ["r3"]}) == 1
    assert crowded_shares(saved, {A: ["r1"], B: ["r1"]}) == 1
    # One that has come back, and the one in its place.
    assert crowded_shares(saved, {A: ["r1", "r1"], B: ["r2", "r3"], "c": ["r3"]}) == 0


def test_nodes_are_refilled_where_there_is_room() -> None:
    nodes = (A, B, "lost", "other")
    saves = [replace(entry(step, nodes), kept_by=((0, 2), (1, 3), (2, 0), (3, 1))) for step in (1, 2)]
    ids = frozenset(each.id for each in saves)
    found = [*(replace(each, committed=ids) for each in both(*saves)), Inventory("x"), Inventory("y")]
    planned = plan_refill(found, ["r1", "r2", "r2", "r1"])
    assert planned == [
        Refill(saves[step], lost, place) for step in (1, 0) for lost, place in (("lost", 2), ("other", 3))
    ]
    swapped = plan_refill(found, ["r1", "r2", "r1", "r2"])
    assert [(each.lost, each.place) for each in swapped[:2]] == [("lost", 3), ("other", 2)]
    taken = [*found[:3], Inventory("y", (replace(entry(9), number=2),))]
    assert [each.save.step for each in plan_refill(taken, ["r1", "r2", "r2", "r1"])] == [2, 1, 1]
    damaged = replace(found[2], damaged=((2, "why"),), marked=frozenset({"save 2"}))  # is replaced
    assert plan_refill([*found[:2], damaged, found[3]], ["r1", "r2", "r2", "r1"]) == planned


def test_steps_with_lost_copies() -> None:
    nodes = (A, B, "lost")
    copied = [replace(entry(step, nodes), kept_by=((0, 1), (1, 2), (2, 0))) for step in (1, 2)]
    assert steps_with_lost_copies(both(*copied, entry(3))) == [([1, 2], "lost")]
    assert steps_with_lost_copies(both(entry(3))) == []


def test_saves_that_count_are_verified() -> None:
    """What is committed somewhere, or prepared everywhere: of others, some node need not have anything."""
    one, two, three, four = map(entry, (1, 2, 3, 4))
    found = [
        Inventory(A, (one, two, three, four), frozenset({one.id, three.id})),
        Inventory(B, (one, two), frozenset({one.id})),
    ]
    assert saves_to_verify(found, None, True) == [one, two, three]
    assert saves_to_verify(found, None, False) == [three]
    assert saves_to_verify(found, 2, False) == [two]
    assert saves_to_verify([Inventory(A), Inventory(B)], None, True) == []
    with pytest.raises(Refused, match="no node has a share of step 4; there are those of 1, 2, 3"):
        saves_to_verify(found, 4, False)


def test_what_is_to_be_copied_stays() -> None:
    plan = plan_save(
        both(*map(entry, (1, 2, 3))), RUN, False, NewSave(4), Rules(1, None, None), held=["save 2"]
    )
    assert sorted(plan.removable) == ["save 1", "save 3"]
    plan = plan_save(both(entry(3)), RUN, False, NewSave(4), Rules(1, None, None), first_number=9)
    assert plan.entry.number == 9


def of_run(branch: str, number: int, **continued: int) -> Entry:
    return Entry(f"{branch} {number}", number, branch, tuple(sorted(continued.items())), (A, B), number)


def test_which_runs_go_on_from_each_other() -> None:
    first, second, back = of_run("b1", 3), of_run("b2", 5, b1=3), of_run("b3", 6, b1=2, b2=0)
    assert goes_on_from(of_run("b1", 9), first)
    assert goes_on_from(second, first)
    assert not goes_on_from(first, second)
    assert goes_on_from(back, second)  # it knows that run, and has gone back behind it
    assert not goes_on_from(of_run("b3", 6, b1=2), second)
    assert not goes_on_from(of_run("b4", 6, b1=0, b2=0), second)  # fresh=True


def test_what_is_loaded_from_a_tier() -> None:
    early, late = of_run("b1", 2), of_run("b1", 3)
    other = of_run("b2", 7, b1=3)
    nobody = [Inventory(A), Inventory("")]
    tiers = [("slow", [early]), ("slower", [early, late])]

    def plan(found: list[Inventory], step: int | None, there: Any = tiers) -> Any:
        chosen = plan_tier_load(found, step, there)
        return chosen and (chosen.tier, chosen.save.id)

    assert plan(nobody, None, [("empty", [])]) is None
    assert plan(nobody, None) == (1, "b1 3")
    assert plan(nobody, 2) == (0, "b1 2")  # the first that has it
    assert plan(nobody, 4) is None
    here = both(early, late)
    assert plan(here, None) is plan(here, 3) is None
    assert plan(both(late), 2) == (0, "b1 2")
    assert plan(here, None, [("tier", [other])]) == (0, "b2 7")  # other nodes have gone on from there
    elsewhere = [("elsewhere", [of_run("b9", 9)]), ("tier", [other])]
    with pytest.raises(Refused, match="the tier elsewhere holds step 9 of another run"):
        related_tiers(here, elsewhere, fresh=False)
    assert related_tiers(here, elsewhere, fresh=True) == [("elsewhere", []), ("tier", [other])]
    assert related_tiers(nobody, elsewhere, fresh=False) == elsewhere
    # The bytes of the latest step are on a node that is missing.
    alone = both(early, late)[:1]
    chosen = plan_tier_load(alone, None, [("tier", [early])])
    assert chosen is not None
    assert chosen.save == early
    assert chosen.lost == "step 3 cannot be loaded: its bytes on node b are not here"
    save = plan_save(alone, chosen.run, False, NewSave(3), Rules(1, None, None), first_number=3)
    assert (save.entry.number, save.entry.history, save.removable) == (4, (("b1", 2),), ("b1 2",))
    # What was lost does not count any more when it is back.
    assert (
        decide([*both(early, late), Inventory("c", (save.entry,), frozenset({save.entry.id}))]).latest
        == save.entry
    )


def test_a_run_that_goes_back_within_a_tier_knows_what_was_there() -> None:
    saves = [of_run("b1", 1), of_run("b2", 2, b1=1)]
    chosen = plan_tier_load([Inventory(A)], 1, [("tier", saves)])
    assert chosen is not None
    save = plan_save([Inventory(A)], chosen.run, False, NewSave(5), Rules(1, None, None), first_number=3)
    assert save.entry.history == (("b1", 1), ("b2", 0))
    assert goes_on_from(save.entry, saves[1])
