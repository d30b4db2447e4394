"""A state for torch.distributed.checkpoint, its saving and loading in one process, and its comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import trunkline as tl


def save(state: dict[str, Any], path: Path, planner: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=tl.dcp.StorageWriter(path, **options), planner=planner)


def load(state: dict[str, Any], path: Path, planner: Any = None, **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=tl.dcp.StorageReader(path, **options), planner=planner)
    return state


def failure(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """The one error that a CheckpointException of one process carries."""
    ((error, _),) = caught.value.failures.values()
    return error


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.shard"))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nested(seed: int) -> dict[str, Any]:
    strided = numbers(40, 60, seed=seed).t()
    return {
        "model": {"weight": numbers(700, 500, seed=seed), "bias": numbers(7, seed=seed), "strided": strided},
        "optimizer": {"step": torch.tensor(seed), "state": [numbers(3, seed=seed), {"m": numbers(0, 4)}]},
        "shared": [numbers(2000, seed=seed)] * 2,
        "note": {"lr": 0.5, "names": ["a", "b"]},
        "seed": seed,
    }


def blank(value: Any) -> Any:
    """The same structure without the values."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, dict):
        return {key: blank(element) for key, element in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [blank(element) for element in value]
    return None


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list) and expected and isinstance(expected[0], torch.Tensor):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected
