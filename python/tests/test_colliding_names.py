"""Tensors of one state whose names are the same: nested keys with dots between them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import trunkline as tl
from trunkline._checkpoint_tools.difference import compare

X, Y, Z = (torch.full((2,), float(value)) for value in range(3))
STATES: list[tuple[dict[Any, Any], dict[Any, Any], str]] = [
    ({"a": {"b": X}, "a.b": Y}, {"a": {"b": Z}, "a.b": Y}, "['a']['b']"),
    ({"a": {"b": X}, "a.b": Y}, {"a": {"b": X}, "a.b": Z}, "['a.b']"),
    ({1: X, "1": Y}, {1: Z, "1": Y}, "[1]"),
    ({1: X, "1": Y}, {1: X, "1": Z}, "['1']"),
]


def saved(state: Any, path: Path, kind: str) -> Path:
    if kind == "file":
        tl.save(state, path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    tl.Checkpointer(path).save(1, state, block=True)
    return path


@pytest.mark.parametrize("kind", ["file", "step"])
@pytest.mark.parametrize(("one", "other", "differs"), STATES)
def test_the_one_that_differs_is_found(
    one: dict[Any, Any], other: dict[Any, Any], differs: str, kind: str, tmp_path: Path
) -> None:
    first, second = saved(one, tmp_path / "one", kind), saved(other, tmp_path / "other", kind)
    assert [tensor.name for tensor in compare(first, second).tensors] == [differs]
    same = compare(first, first)
    assert same.is_same
    assert same.compared == 2


def test_a_name_that_collides_on_one_side_only(tmp_path: Path) -> None:
    first = saved({"a": {"b": X}, "a.b": Y}, tmp_path / "one", "file")
    found = compare(first, saved({"a.b": Y}, tmp_path / "other", "file"))
    assert (found.only_a, found.only_b, found.tensors) == (["['a']['b']"], [], [])


@pytest.mark.parametrize("kind", ["file", "step"])
@pytest.mark.parametrize(("name", "state"), [("a.b", STATES[0][0]), ("1", STATES[2][0])])
def test_open_tensors_rejects_the_name(name: str, state: dict[Any, Any], kind: str, tmp_path: Path) -> None:
    with tl.open_tensors(saved({**state, "other": Z}, tmp_path / "one", kind)) as tensors:
        assert tensors.keys() == [name, "other"]
        assert torch.equal(tensors["other"], Z)
        for read in (tensors.get_tensor, tensors.get_slice):
            with pytest.raises(tl.Unsupported, match=f"2 tensors that are named '{name}'"):
                read(name)
