"""Checkpointer(incremental=True) on many ranks: each compares and writes its share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses, debris, same

import trunkline as tl
from trunkline import _core

RANKS = 3


@pytest.fixture(scope="module")
def crew() -> Iterator[RankProcesses]:
    """Three ranks."""
    with RankProcesses(RANKS) as ranks:
        yield ranks
        ranks.finish()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def state_of(step: int) -> dict[str, Any]:
    """Frozen weights of 12 MB, a small adapter, and a large tensor of which one row changes."""
    generator = torch.Generator().manual_seed(3)
    base = {f"layer{i}": torch.randn(1000, 1000, generator=generator) for i in range(3)}
    table = torch.arange(2_000_000, dtype=torch.int32).reshape(-1, 100)
    table[step * 1000] += 1
    return {"base": base, "adapter": torch.full((1000,), float(step)), "table": table, "number": step}


def written(directory: Path, step: int) -> int:
    manifest = _core.CheckpointStore(str(directory)).open_manifest(step)
    return manifest.bytes_written


def check(directory: Path, steps: list[int], volumes: Any = ()) -> None:
    alone = tl.Checkpointer(directory, process_group=False)
    assert alone.steps() == steps
    for step in steps:
        alone.verify(step)
        assert same(alone.load(step), state_of(step)), step
    assert debris(directory, volumes) == []


@pytest.mark.parametrize("volumes", [0, 2])
@pytest.mark.parametrize("writers", ["rank", [1]])
def test_each_rank_writes_what_changed_in_its_share(
    crew: RankProcesses, directory: Path, tmp_path: Path, volumes: int, writers: Any
) -> None:
    disks = [tmp_path / f"disk{i}" for i in range(volumes)]
    for disk in disks:
        disk.mkdir()
    options = {"volumes": [str(disk) for disk in disks] or None, "writers": writers, "keep": 2}
    crew.all("open", str(directory), incremental=True, **options)
    for step in range(4):
        crew.all("save", step, state_of(step), block=True)
        assert step == 0 or written(directory, step) < 2_000_000
    check(directory, [2, 3], disks)
    tl.Checkpointer(directory, process_group=False).delete(2)
    check(directory, [3], disks)


def test_another_number_of_ranks_writes_everything_once(crew: RankProcesses, directory: Path) -> None:
    alone = tl.Checkpointer(directory, process_group=False, incremental=True, keep=None)
    for step in range(2):
        alone.save(step, state_of(step), block=True)
    crew.all("open", str(directory), incremental=True, keep=None)
    assert crew.all("latest_loaded_number") == [1] * RANKS
    for step in range(2, 4):
        crew.all("save", step, state_of(step), block=True)
    assert written(directory, 3) < 2_000_000
    check(directory, [0, 1, 2, 3])


def test_a_rank_that_cannot_read_the_base_writes_its_share(crew: RankProcesses, directory: Path) -> None:
    crew.all("open", str(directory), incremental=True, keep=None)
    crew.all("save", 0, state_of(0), block=True)
    crew.one(2, "fail_to_open_manifests")
    crew.all("save", 1, state_of(1), block=True)
    assert 20_000_000 / RANKS * 0.8 < written(directory, 1) < 20_000_000 / RANKS * 1.4
    check(directory, [0, 1])


def test_ranks_must_have_the_same_options(crew: RankProcesses, directory: Path) -> None:
    for rank in range(RANKS):
        crew.tell(rank, "open", str(directory), incremental=rank != 1)
    failed = crew.collect(list(range(RANKS)))
    assert len(failed) == RANKS
    assert "rank 1: incremental differs from rank 0" in failed[0].message
