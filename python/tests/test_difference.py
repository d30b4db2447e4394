"""The place that is named when the states of two ranks differ."""

from typing import Any

import pytest
import torch

from trunkline.checkpoint.state.difference import MAX_MARKS, first_difference, marks_of
from trunkline.checkpoint.state.tree import flatten


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(2, 3), "b": torch.zeros(3)},
        "loader": {"position": 3, "order": [1, 2, 3], ("train", 0): (1, {"lr": 0.1})},
        "groups": [{"lr": 0.1}, {"lr": 0.2}],
    }


def place(ours: Any, theirs: Any) -> str | None:
    return first_difference(flatten(ours)[0], marks_of(flatten(theirs)[0]))


def test_equal_states_have_no_difference() -> None:
    other = state()
    other["model"]["w"] += 1  # values of tensors are not compared
    assert place(state(), other) is None


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda state: state["loader"].update(position=4), "state['loader']['position']"),
        (lambda state: state["loader"]["order"].append(4), "state['loader']['order']"),
        (lambda state: state["groups"][1].update(lr=0.3), "state['groups'][1]['lr']"),
        (lambda state: state["model"].update(w=torch.zeros(3, 2)), "state['model']['w']"),
        (lambda state: state["model"].update(b=torch.zeros(3).half()), "state['model']['b']"),
        (lambda state: state["model"].update(b=None), "state['model']['b']"),
        (lambda state: state.update(groups=tuple(state["groups"])), "state['groups']"),
        (lambda state: state.update(more=1), "state['more']"),
    ],
)
def test_the_first_value_that_differs_is_named(change: Any, where: str) -> None:
    ours = state()
    change(ours)
    assert place(ours, state()) == where


def test_a_key_that_only_the_other_state_has_is_told_by_what_follows_it() -> None:
    ours = state()
    del ours["loader"]["position"]
    assert place(ours, state()) == "state['loader']['order']"
    del ours["groups"]
    ours["loader"] = state()["loader"]
    assert place(ours, state()) is None  # nothing follows


def test_only_the_first_values_have_marks() -> None:
    ours = {str(number): number for number in range(MAX_MARKS + 5)}
    theirs = dict(ours)
    assert len(marks_of(flatten(ours)[0])) == MAX_MARKS
    theirs[str(MAX_MARKS - 2)] = -1  # the state itself is the first
    assert place(ours, theirs) == f"state['{MAX_MARKS - 2}']"
    theirs = {**ours, str(MAX_MARKS): -1}
    assert place(ours, theirs) is None
