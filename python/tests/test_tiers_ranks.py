"""Tiers of a Checkpointer on many ranks: rank 0 copies the shards of all."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_processes import Failed, RankProcesses, make_state, same

import trunkline as tl


@pytest.fixture(scope="module")
def crew() -> Iterator[RankProcesses]:
    with RankProcesses(3) as ranks:
        yield ranks
        ranks.finish()


def test_shards_of_all_ranks_are_copied_and_loaded(crew: RankProcesses, tmp_path: Path) -> None:
    run, tier = tmp_path / "run", tmp_path / "tier"
    tiers = [tl.Tier(tier, every=2)]
    crew.all("open", str(run), tiers=tiers)
    for step in (1, 2, 3):
        crew.all("save", step, {"seed": step}, block=True)
    crew.all("wait_drained")
    assert crew.all("steps") == [[1, 2, 3]] * 3
    shutil.rmtree(run)
    assert tl.Checkpointer(tier, process_group=False).steps() == [2]
    assert same(tl.Checkpointer(tier, process_group=False).load(), make_state(2))
    assert crew.all("open", str(run), tiers=tiers) == [[2]] * 3
    assert crew.all("loads", {"seed": 2}) == [True] * 3
    crew.all("save", 4, {"seed": 4}, block=True)
    crew.all("wait_drained")
    assert crew.all("loads", {"seed": 4}) == [True] * 3
    assert tl.Checkpointer(tier, process_group=False).steps() == [2, 4]


def test_a_failed_copy_fails_the_next_save_on_all_ranks(crew: RankProcesses, tmp_path: Path) -> None:
    run, tier = tmp_path / "run", tmp_path / "tier"
    crew.all("open", str(run), tiers=[tl.Tier(tier)])
    crew.all("save", 1, {"seed": 1}, block=True)
    crew.all("wait_drained")
    (tier / "step-00000002").write_text("in the way")
    crew.all("save", 2, {"seed": 2}, block=True)
    failed: dict[int, Failed] = {}
    step = 3
    while not failed:  # the copy may fail after the next save has begun
        failed = crew.failures("save", step, {"seed": step}, block=True)
        step += 1
    assert sorted(failed) == [0, 1, 2]
    assert all("copying step 2" in error.message for error in failed.values())
    crew.all("save", step, {"seed": step}, block=True)
    (tier / "step-00000002").unlink()
    crew.all("wait_drained")
    assert tl.Checkpointer(tier, process_group=False).latest() == step


def test_tiers_must_be_the_same_on_all_ranks(crew: RankProcesses, tmp_path: Path) -> None:
    for rank in range(3):
        crew.tell(
            rank, "open", str(tmp_path / "run"), tiers=[tl.Tier(tmp_path / "tier", every=1 + rank // 2)]
        )
    failed = crew.collect(range(3))
    assert sorted(failed) == [0, 1, 2]
    assert all("rank 2: tiers differs from rank 0" in error.message for error in failed.values())
