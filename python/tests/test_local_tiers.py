"""Tiers of nodes with disks of their own: Checkpointer(..., local=True, tiers=...)."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses, make_state, same
from support_cli import command, document
from support_tiers import nothing_copied_to, save_all, state_of, steps_in
from test_local_checkpoints import directories, open_all, state
from test_local_copies import damage, shards_of

import trunkline as tl
from trunkline.checkpoint.directory import node_tiers
from trunkline.checkpoint.directory.node_drain import ShareCopy
from trunkline.checkpoint.tiers import origin
from trunkline.checkpoint.tiers.plan import Commit
from trunkline.checkpoint.tiers.shard_copier import ShardCopier
from trunkline.checkpoint.tiers.staged_shares import FOLDER, StagedShares


def open_alone(folder: Path, tiers: Sequence[tl.Tier], **options: Any) -> tl.Checkpointer:
    return tl.Checkpointer(folder / "run", local=True, process_group=False, tiers=tiers, **options)


def check_tier(tier: Path, steps: Sequence[int]) -> None:
    """The tier is an ordinary directory of checkpoints with these steps, and nothing is left beside them."""
    made = tl.Checkpointer(tier, process_group=False)
    assert made.steps() == list(steps)
    for step in steps:
        made.verify(step)
        assert same(made.load(step), make_state(**state(step)))
    assert not (tier / FOLDER).exists()


def test_one_process(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tiers = [tl.Tier(tier, every=2, keep=2)]
    made = open_alone(tmp_path, tiers, keep=2)
    for steps in ([1, 2], [3, 4], [5]):
        save_all(made, *steps)
        made.wait_drained()
    assert steps_in(tier) == [2, 4]
    assert made.steps() == [2, 4, 5]
    run = str(tmp_path / "run")
    assert made.locations() == {2: [str(tier)], 4: [run, str(tier)], 5: [run]}
    assert [each.step for each in made.drains()] == [None]
    with pytest.raises(FileNotFoundError, match=rf"Checkpointer\('{tier}'\)\.delete\(2\) removes"):
        made.delete(2)
    # Another machine, whose disk is empty.
    shutil.rmtree(run)
    made = open_alone(tmp_path, tiers, keep=2)
    assert made.latest() == 4
    assert made.steps() == [2, 4]
    with pytest.raises(FileExistsError, match=r"holds steps 2, 4 of another run; .* call load\(\) first"):
        save_all(made, 5)
    assert made.load()["step"] == 4
    save_all(made, 5, 6)
    made.wait_drained()
    assert steps_in(tier) == [4, 6]
    # The same, in a new process that begins before anything is copied.
    with nothing_copied_to(tier):
        save_all(made, 7, 8)
        made = open_alone(tmp_path, tiers, keep=2)
        assert made.load()["step"] == 8
        assert made.steps() == [4, 6, 7, 8]
    save_all(made, 9)
    made.wait_drained()
    assert steps_in(tier) == [6, 8]


def test_metrics_and_odd_states_are_copied(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    made = open_alone(tmp_path, [tl.Tier(tier)], keep_best=("loss", "min", 1), keep=1)
    base = torch.arange(1000.0)
    odd = {"view": base[10:20], "base": base, "empty": torch.empty(0, 3), "text": "x", 3: (None, 1.5)}
    made.save(1, odd, metrics={"loss": 0.5}, block=True)
    made.save(2, {}, metrics={"loss": float("nan")}, block=True)
    made.wait_drained()
    copy = tl.Checkpointer(tier, process_group=False)
    assert copy.metrics(1) == made.metrics(1) == {"loss": 0.5}
    assert copy.load(2) == {}
    loaded = copy.load(1)
    assert loaded["view"].data_ptr() == loaded["base"].data_ptr() + 40
    assert torch.equal(loaded["base"], base)
    assert (loaded["empty"].shape, loaded["text"], loaded[3]) == ((0, 3), "x", (None, 1.5))


def test_steps_stay_until_they_are_copied(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    made = open_alone(tmp_path, [tl.Tier(tier, every=2)], keep=1)
    with nothing_copied_to(tier):
        save_all(made, 1, 2, 3, 4, 5)
        assert made.steps() == [2, 4, 5]
        again = open_alone(tmp_path, [tl.Tier(tier, every=2)], keep=1)
        again.load()
        save_all(again, 6, 7)
        assert again.steps() == [2, 4, 6, 7]
    again.wait_drained()
    save_all(again, 9)
    assert again.steps() == [2, 4, 6, 9]
    assert steps_in(tier) == [2, 4, 6]


def test_tiers_of_other_runs_are_refused(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    one = open_alone(tmp_path / "one", [tl.Tier(tier)])
    save_all(one, 1, 2)
    one.wait_drained()
    other = open_alone(tmp_path / "other", [])
    save_all(other, 7)
    other = open_alone(tmp_path / "other", [tl.Tier(tier)])
    for call in (other.load, other.steps, other.latest):
        with pytest.raises(FileExistsError, match=f"the tier {tier} holds step 2 of another run"):
            call()
    third = open_alone(tmp_path / "third", [tl.Tier(tier)])
    with pytest.raises(FileExistsError, match="holds steps 1, 2 of another run"):
        save_all(third, 1)
    assert steps_in(tier) == [1, 2]
    fresh = open_alone(tmp_path / "third", [tl.Tier(tier)], fresh=True)
    save_all(fresh, 1)
    fresh.wait_drained()
    assert steps_in(tier) == [1]
    assert [steps_in(each) for each in tier.glob("aside-*")] == [[1, 2]]
    # The first run is not to go on there. Its saves do not depend on the tier any more.
    save_all(one, 3)
    with pytest.raises(FileExistsError, match="holds step 1 of another run"):
        one.wait_drained()
    # Ordinary runs, and steps that were saved into the tier itself.
    ordinary = tl.Checkpointer(tmp_path / "ordinary", tiers=[tl.Tier(tier)], process_group=False)
    with pytest.raises(FileExistsError, match="holds step 1, which"):
        save_all(ordinary, 1)
    into = tl.Checkpointer(tier, process_group=False)
    into.load()
    save_all(into, 2)
    save_all(fresh, 3)
    with pytest.raises(FileExistsError, match="holds steps 1, 2 of another run"):
        fresh.wait_drained()
    assert steps_in(tier) == [1, 2]


def test_a_fresh_run_does_not_look_at_the_tier_of_another(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    one = open_alone(tmp_path / "one", [tl.Tier(tier)])
    save_all(one, 1, 2)
    one.wait_drained()
    other = open_alone(tmp_path / "other", [])
    save_all(other, 7)
    fresh = open_alone(tmp_path / "other", [tl.Tier(tier)], fresh=True)
    assert fresh.latest() == 7  # as without a tier: load() would continue that
    assert fresh.steps() == [7]
    save_all(fresh, 1)
    assert fresh.latest() == 1
    fresh.wait_drained()
    assert steps_in(tier) == [1]
    assert fresh.steps() == [1]


def test_a_deleted_step_is_not_copied(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    made = open_alone(tmp_path, [tl.Tier(tier)])
    with nothing_copied_to(tier):
        save_all(made, 1, 2, 3)
        made.delete(2)
    made.wait_drained()
    assert steps_in(tier) == [1, 3]
    assert made.drains()[0].error is None


def test_a_share_that_is_gone_is_an_error(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    made = open_alone(tmp_path, [tl.Tier(tier)])
    with nothing_copied_to(tier):
        save_all(made, 1, 2)
        shutil.rmtree(tmp_path / "run/saves/step-00000001")
    with pytest.raises(
        tl.Error, match=r"copying step 1 .*step-00000001 is gone, this node's share of step 1"
    ):
        made.wait_drained()
    save_all(made, 3)
    made.wait_drained()
    assert steps_in(tier) == [2, 3]


def test_a_run_that_goes_back_takes_its_tier_along(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    made = open_alone(tmp_path, [tl.Tier(tier, keep=4)], keep=4)
    save_all(made, 1, 2, 3)
    made.wait_drained()
    assert made.load(1)["step"] == 1
    save_all(made, 2)
    made.wait_drained()
    assert made.load()["step"] == 2
    assert tl.Checkpointer(tier, process_group=False).latest() == 2
    shutil.rmtree(tmp_path / "run")
    made = open_alone(tmp_path, [tl.Tier(tier, keep=4)], keep=4)
    assert made.load()["step"] == 2
    assert made.load(1)["step"] == 1
    save_all(made, 5)
    made.wait_drained()
    made = open_alone(tmp_path, [tl.Tier(tier, keep=4)])
    assert made.load()["step"] == 5
    assert tl.Checkpointer(tier, process_group=False).latest() == 5


def test_failures_are_raised_once(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tier.write_text("in the way")
    with pytest.raises(NotADirectoryError, match=str(tier)):
        open_alone(tmp_path, [tl.Tier(tier)])
    tier.unlink()
    made = open_alone(tmp_path, [tl.Tier(tier)], keep=1)
    save_all(made, 1)
    made.wait_drained()
    (tier / FOLDER).write_text("in the way")
    save_all(made, 2)
    with pytest.raises(tl.Error, match=f"copying step 2 to {tier} failed: .*{FOLDER}"):
        made.wait_drained()
    with pytest.raises(tl.Error, match="copying step 2"):  # it tries again
        made.wait_drained()
    save_all(made, 3)  # was raised
    with pytest.raises(tl.Error, match="copying step"):
        made.wait_drained()
    (tier / FOLDER).unlink()
    made.wait_drained()
    assert made.drains()[0].error is None
    assert steps_in(tier)[-1] == 3


def test_a_tier_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    tier, run = tmp_path / "tier", str(tmp_path / "run")
    made = open_alone(tmp_path, [tl.Tier(tier, every=2)])
    save_all(made, 1)
    assert document("ls", run)["tiers"] == [{"directory": str(tier), "steps": []}]
    save_all(made, 2)
    made.wait_drained()
    assert document("ls", run)["tiers"] == [{"directory": str(tier), "steps": [2]}]
    assert f"tier {tier}: 2" in command("ls", run).splitlines()
    away = tmp_path / "away"
    tier.rename(away)
    assert "mount its disk if it is not mounted" in document("ls", run)["tiers"][0]["error"]["message"]
    made = open_alone(tmp_path, [tl.Tier(tier, every=2)])
    made.load()
    save_all(made, 4)
    with pytest.raises(tl.Error, match="copying step 2 .* does not exist any more; mount its disk"):
        made.wait_drained()
    assert not tier.exists()
    away.rename(tier)
    made.wait_drained()
    assert steps_in(tier) == [2, 4]


def test_a_tier_with_volumes_is_refused(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tl.Checkpointer(tier, volumes=[tmp_path / "disk"], process_group=False).save(1, {"x": 1}, block=True)
    tl.Checkpointer(tier, process_group=False).delete(1)
    made = open_alone(tmp_path, [tl.Tier(tier)])
    save_all(made, 2)
    with pytest.raises(tl.Unsupported, match="is spread over volumes"):
        made.wait_drained()


def test_nodes_copy_their_shares(tmp_path: Path) -> None:
    paths, tier = directories(tmp_path, [0, 0, 1]), tmp_path / "tier"
    tiers = [tl.Tier(tier, every=2)]
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, keep=1, tiers=tiers)
        for step in (1, 2, 3, 4):
            ranks.all("save", step, state(step), block=True)
        ranks.all("wait_drained")
        assert ranks.all("steps") == [[2, 4]] * 3
        where = ranks.all("ask", "locations")[2]  # the save of step 4 may have found step 2 not copied yet
        assert where[2][-1] == str(tier)
        assert where[4] == [paths[2], str(tier)]
        assert [len(each) for each in ranks.all("ask", "drains")] == [1, 0, 1]
        assert ranks.all("loads", state(2), 2) == [True] * 3
        assert ranks.all("loads", state(4)) == [True] * 3
        ranks.finish()
    check_tier(tier, [2, 4])
    assert len(list((tier / "step-00000004").glob("*.safetensors"))) == 3  # one of each rank
    assert {each.stat().st_mode & 0o777 for each in tier.glob("*/*.safetensors")} == {
        each.stat().st_mode & 0o777 for each in shards_of(paths[0], 4)
    }


def test_copies_are_shared_out_where_nodes_are_lost(tmp_path: Path) -> None:
    """With copies=2, what an earlier run has not copied is copied by the nodes that are left."""
    paths, tier = directories(tmp_path, range(3)), tmp_path / "tier"
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, copies=2)
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    shutil.rmtree(paths[1])
    with RankProcesses(2) as ranks:
        open_all(ranks, [paths[2], paths[0]], copies=2, tiers=[tl.Tier(tier)])
        assert ranks.all("loads", state(1)) == [True] * 2
        ranks.all("wait_drained")
        check_tier(tier, [1])
        ranks.all("save", 2, state(2), block=True)
        ranks.all("wait_drained")
        ranks.finish()
    check_tier(tier, [1, 2])


def test_a_lost_node_is_made_up_for_by_the_tier(tmp_path: Path) -> None:
    paths, tier = directories(tmp_path, range(2)), tmp_path / "tier"
    tiers = [tl.Tier(tier, every=2)]
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, tiers=tiers)
        for step in (1, 2, 3):
            ranks.all("save", step, state(step), block=True)
        ranks.all("wait_drained")
        ranks.finish()
    away = tmp_path / "away"
    shutil.move(paths[1], away)
    with RankProcesses(2) as ranks:
        assert open_all(ranks, paths, tiers=tiers) == [[2]] * 2
        assert ranks.all("ask", "latest") == [2, 2]
        for warned in ranks.all("load_warns", state(2)):
            assert len(warned) == 1
            assert "step 3 cannot be loaded: its bytes on" in warned[0]
            assert f"Step 2 is loaded from the tier {tier} instead" in warned[0]
        ranks.all("save", 3, state(33), block=True)
        ranks.all("save", 4, state(4), block=True)
        ranks.all("wait_drained")
        assert ranks.all("loads", state(33), 3) == [True] * 2
        ranks.finish()
    check_tier(tier, [2, 4])
    # It returns, in the place of nobody: what it has is not used.
    (tmp_path / "node-2").mkdir()
    shutil.move(away, tmp_path / "node-2/run")
    with RankProcesses(3) as ranks:
        assert open_all(ranks, directories(tmp_path, range(3)), tiers=tiers) == [[2, 3, 4]] * 3
        for warned in ranks.all("load_warns", state(4)):
            assert any("was abandoned" in text for text in warned)
        assert ranks.all("loads", state(33), 3) == [True] * 3
        ranks.finish()


def test_new_nodes_go_on_from_the_tier_and_old_ones_follow(tmp_path: Path) -> None:
    old, new, tier = (
        directories(tmp_path / "old", range(2)),
        directories(tmp_path, range(3)),
        tmp_path / "tier",
    )
    tiers = [tl.Tier(tier)]
    with RankProcesses(2) as ranks:
        open_all(ranks, old, tiers=tiers)
        ranks.all("save", 1, state(1), block=True)
        ranks.all("wait_drained")
        ranks.finish()
    with RankProcesses(3) as ranks:
        assert open_all(ranks, new, tiers=tiers) == [[1]] * 3
        assert "holds step 1 of another run" in ranks.failures("save", 2, state(2), block=True)[0].message
        assert ranks.all("loads", state(1)) == [True] * 3
        ranks.all("save", 2, state(2), block=True)
        ranks.all("wait_drained")
        ranks.finish()
    check_tier(tier, [1, 2])
    with RankProcesses(
        2
    ) as ranks:  # the old nodes have step 1, and the tier a later one that goes on from it
        assert open_all(ranks, old, tiers=tiers) == [[1, 2]] * 2
        assert ranks.all("loads", state(2)) == [True] * 2
        ranks.all("save", 3, state(3), block=True)
        ranks.all("wait_drained")
        ranks.finish()
    check_tier(tier, [1, 2, 3])


def test_a_node_that_cannot_copy_fails_all(tmp_path: Path) -> None:
    paths, tier = directories(tmp_path, range(2)), tmp_path / "tier"
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, keep=1)
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    damage(shards_of(paths[1], 1))
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, keep=1, tiers=[tl.Tier(tier)])
        assert "is corrupt" in ranks.failures("loads", state(1))[1].message
        failed = ranks.failures("wait_drained")
        assert "is corrupt: chunk" in failed[1].message
        assert failed[0].kind == "RankError"
        assert "rank 1 could not copy to a tier: copying step 1" in failed[0].message
        ranks.finish()
    assert not list(tier.glob("step-*"))


def test_a_tier_that_is_not_mounted_on_a_node(tmp_path: Path) -> None:
    """Nothing is written below it, and saves go on."""
    paths, tier, empty = directories(tmp_path, range(2)), tmp_path / "tier", tmp_path / "empty"
    tier.mkdir()
    empty.mkdir()
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    mounts = [(str(nothing), str(nothing)), (str(empty), str(tier))]
    try:
        ranks = RankProcesses(2, mounts=mounts)
    except (EOFError, AssertionError):
        pytest.skip("mounting is not permitted")
    with ranks:
        open_all(ranks, paths, keep=1, tiers=[tl.Tier(tier)])
        ranks.all("save", 1, state(1), block=True)
        ranks.all("save", 2, state(2), block=True)
        for rank in range(2):
            ranks.tell(rank, "ask", "wait_drained", 1.0)
        assert {each.kind for each in ranks.collect(range(2)).values()} == {"Timeout"}
        assert ranks.all("steps") == [[1, 2]] * 2
        assert not list(empty.iterdir())
        ranks.finish()
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, keep=1, tiers=[tl.Tier(tier)])
        assert ranks.all("loads", state(2)) == [True] * 2
        ranks.all("wait_drained")
        ranks.finish()
    check_tier(tier, [1, 2])


def test_what_was_copied_before_a_crash_is_used(tmp_path: Path) -> None:
    paths, tier = directories(tmp_path, range(2)), tmp_path / "tier"
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, tiers=[tl.Tier(tier, bytes_per_second=1_000_000)])
        ranks.all("save", 1, state(1), block=True)
        deadline = time.monotonic() + 60
        while not list(tier.glob(f"{FOLDER}/*/*.safetensors")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, tiers=[tl.Tier(tier)])
        assert ranks.all("loads", state(1)) == [True] * 2
        ranks.all("save", 2, state(2), block=True)
        ranks.all("wait_drained")
        ranks.finish()
    check_tier(tier, [1, 2])


def test_a_share_on_record_is_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tmp_path / "tier"
    made = open_alone(tmp_path, [tl.Tier(tier)])
    waits = ShareCopy._wait_for_all

    def fail(self: Any) -> Any:
        raise OSError(5, "injected")

    monkeypatch.setattr(ShareCopy, "_wait_for_all", fail)
    save_all(made, 1)
    with pytest.raises(OSError, match="injected"):
        made.wait_drained()
    staged = list(tier.glob(f"{FOLDER}/*/*.safetensors"))
    assert len(staged) == 1
    monkeypatch.setattr(ShareCopy, "_wait_for_all", waits)
    monkeypatch.setattr(ShardCopier, "copy", lambda *_: pytest.fail("copied again"))
    made.wait_drained()
    assert steps_in(tier) == [1]
    assert not staged[0].exists()


@pytest.mark.parametrize("about", ["", "[]", '{"format": "trunkline share", "version": 2}', None])
def test_damaged_records_of_shares_are_as_none(tmp_path: Path, about: str | None) -> None:
    staged = StagedShares(str(tmp_path), "ab12")
    assert not staged.exists()
    staged.make()
    [path] = staged.new_files(3, 1)
    Path(path).write_bytes(b"x")
    staged.add(3, 1, [path])
    found = staged.find(3)
    assert found is not None
    assert (found.node, found.files) == (1, [path])
    assert staged.find(2) is None
    if about is None:
        Path(path).unlink()
    else:
        Path(staged.directory, "share-3.json").write_text(about)
    assert staged.find(3) is None
    other = StagedShares(str(tmp_path), "cd34")
    other.make()
    other.remove_others()
    assert not staged.exists()
    other.remove()
    assert not list(tmp_path.iterdir())


def test_an_error_before_the_commit_leaves_the_tier_to_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on record and was not committed does not count: each load() begins a new branch."""
    tier = tmp_path / "tier"
    made = open_alone(tmp_path, [tl.Tier(tier)])
    save_all(made, 1)
    made.wait_drained()
    made = open_alone(tmp_path, [tl.Tier(tier)])
    assert made.load()["step"] == 1

    def fail(*_: Any) -> Any:
        raise OSError(28, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(StagedShares, "take", fail)
        save_all(made, 2)
        with pytest.raises(OSError, match="injected"):
            made.wait_drained()
    again = open_alone(tmp_path, [tl.Tier(tier)])
    assert again.load()["step"] == 2
    again.wait_drained()
    assert steps_in(tier) == [1, 2]


def test_nodes_finish_what_the_coordinator_has_begun(tmp_path: Path) -> None:
    """Also if saves are faster than copies, so that later steps fill what the tier keeps."""
    paths, tier = directories(tmp_path, range(2)), tmp_path / "tier"
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, tiers=[tl.Tier(tier, keep=1, bytes_per_second=3_000_000)])
        for step in range(1, 25):
            ranks.all("save", step, {"seed": step, "kilobytes": 100}, block=True)
        ranks.all("wait_drained")
        assert tl.Checkpointer(tier, process_group=False).steps() == [24]
        ranks.all("save", 25, {"seed": 25, "kilobytes": 100}, block=True)
        assert ranks.all("steps") == [[23, 24, 25]] * 2  # nothing is held any more
        ranks.all("wait_drained")
        ranks.finish()


def test_a_damaged_share_does_not_keep_later_steps_from_the_tier(tmp_path: Path) -> None:
    paths, tier = directories(tmp_path, range(2)), tmp_path / "tier"
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, keep=2)
        for step in (1, 2):
            ranks.all("save", step, state(step), block=True)
        ranks.finish()
    damage(shards_of(paths[1], 1))
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, keep=2, tiers=[tl.Tier(tier)])
        assert ranks.all("loads", state(2)) == [True] * 2
        failed = ranks.failures("wait_drained")
        assert "is corrupt: chunk" in failed[1].message
        assert "rank 1 could not copy to a tier: copying step 1" in failed[0].message
        ranks.all("save", 3, state(3), block=True)
        ranks.all("wait_drained")
        ranks.all("save", 4, state(4), block=True)
        assert ranks.all("steps")[0][-2:] == [3, 4]  # nothing is held for the damaged one
        ranks.all("wait_drained")
        ranks.finish()
    check_tier(tier, [2, 3, 4])


def test_rank_0_must_see_the_tier_that_others_see(tmp_path: Path) -> None:
    """Otherwise new nodes would begin anew, and copies go to the disk below the mount point."""
    paths, tier, empty = directories(tmp_path, range(2)), tmp_path / "tier", tmp_path / "empty"
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, tiers=[tl.Tier(tier)])
        ranks.all("save", 1, state(1), block=True)
        ranks.all("wait_drained")
        ranks.finish()
    empty.mkdir()
    try:
        ranks = RankProcesses(2, mounts=[(str(empty), str(tier)), (str(tier), str(tier))])
    except (EOFError, AssertionError):
        pytest.skip("mounting is not permitted")
    new = directories(tmp_path / "new", range(2))
    with ranks:
        for rank, path in enumerate(new):
            ranks.tell(rank, "open_local", path, tiers=[tl.Tier(tier)])
        failed = ranks.collect(range(2))  # the first call is steps()
        assert "the node of rank 0 sees nothing where node" in failed[0].message
        for failed in (
            ranks.failures("ask", "latest"),
            ranks.failures("loads", state(1)),
            ranks.failures("save", 2, state(2), block=True),
        ):
            assert sorted(failed) == [0, 1]
            assert all("sees nothing where node" in each.message for each in failed.values())
        ranks.finish()
    assert not list(empty.iterdir())


def test_all_ranks_raise_what_one_knows(tmp_path: Path) -> None:
    paths, tier = directories(tmp_path, range(2)), tmp_path / "tier"
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, tiers=[tl.Tier(tier)], timeout=20.0)
        ranks.all("save", 1, state(1), block=True)
        ranks.all("wait_drained")
        away = tier.rename(tmp_path / "away")
        ranks.all("save", 2, state(2), block=True)
        time.sleep(0.5)  # rank 0 knows by now
        for _ in range(2):
            failed = ranks.failures("wait_drained")
            assert {rank: each.kind for rank, each in failed.items()} == {0: "Error", 1: "RankError"}
            assert all("does not exist any more" in each.message for each in failed.values())
        away.rename(tier)
        # All wait until the first of them gives up.
        ranks.tell(0, "ask", "wait_drained", 30.0)
        time.sleep(0.2)
        ranks.tell(1, "ask", "wait_drained", 30.0)
        assert ranks.collect(range(2)) == {}
        ranks.finish()
    check_tier(tier, [1, 2])


def test_nodes_that_have_saved_nothing_have_nothing_to_copy(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    made = open_alone(tmp_path, [tl.Tier(tier)])
    made.wait_drained()
    save_all(made, 1)
    made.wait_drained()
    new = open_alone(tmp_path / "new", [tl.Tier(tier)])
    assert new.load()["step"] == 1
    new.wait_drained()
    save_all(new, 2)
    new.wait_drained()
    assert steps_in(tier) == [1, 2]


def test_a_step_that_is_deleted_while_it_is_copied(tmp_path: Path) -> None:
    paths, tier = directories(tmp_path, range(2)), tmp_path / "tier"
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, tiers=[tl.Tier(tier, bytes_per_second=2_000_000)])
        for step in (1, 2):
            ranks.all("save", step, {"seed": step, "kilobytes": 300}, block=True)
        deadline = time.monotonic() + 60
        while not list(tier.glob(f"{FOLDER}/*/*.safetensors")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ranks.all("ask", "delete", 1)
        ranks.all("wait_drained")
        assert ranks.all("steps") == [[2]] * 2
        ranks.finish()
    assert tl.Checkpointer(tier, process_group=False).steps() == [2]
    assert not (tier / FOLDER).exists()


def test_a_failed_copy_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tmp_path / "tier"
    made = open_alone(tmp_path, [tl.Tier(tier)])

    def fail(*_: Any) -> Any:
        raise OSError(28, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(ShardCopier, "_verify", fail)
        save_all(made, 1)
        with pytest.raises(OSError, match="injected"):
            made.wait_drained()
    assert not list(tier.rglob("*.safetensors"))
    made.wait_drained()
    assert steps_in(tier) == [1]


def test_tiers_are_independent_of_each_other(tmp_path: Path) -> None:
    """One that fails does not let steps go that another is still to get."""
    slow, broken = tmp_path / "slow", tmp_path / "broken"
    broken.mkdir()
    (broken / "something").write_text("else")
    tiers = [tl.Tier(broken.with_name("other"), every=5), tl.Tier(slow, every=5, bytes_per_second=3_000_000)]
    made = open_alone(tmp_path, tiers, keep=2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/something").write_text("else")
    for step in range(11):
        with suppress(tl.Error):
            made.save(step, state_of(step, 300_000), block=True)
        if step not in made.steps():
            made.save(step, state_of(step, 300_000), block=True)
    with pytest.raises(tl.Error, match="other.*is not a directory of checkpoints"):
        made.wait_drained()
    assert steps_in(slow) == [0, 5, 10]


def test_two_runs_do_not_begin_in_one_tier(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    one, other = (
        open_alone(tmp_path / "one", [tl.Tier(tier)]),
        open_alone(tmp_path / "other", [tl.Tier(tier)]),
    )

    def fail(*_: Any) -> Any:
        raise OSError(5, "injected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShareCopy, "_wait_for_all", fail)
        save_all(one, 1)
        with pytest.raises(OSError, match="injected"):
            one.wait_drained()
    with pytest.raises(FileExistsError, match="another run has begun to copy to the tier"):
        save_all(other, 1)
    one.wait_drained()
    assert steps_in(tier) == [1]
    fresh = open_alone(tmp_path / "other", [tl.Tier(tier)], fresh=True)
    save_all(fresh, 2)
    fresh.wait_drained()
    assert steps_in(tier) == [2]


def test_nodes_go_on_from_the_directory_of_an_ordinary_run(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with tl.Checkpointer(tier, process_group=False) as ordinary:
        save_all(ordinary, 1, 2)
    made = open_alone(tmp_path, [tl.Tier(tier)])
    assert made.latest() == 2
    with pytest.raises(FileExistsError, match=r"holds steps 1, 2 of another run; .* call load\(\) first"):
        save_all(made, 3)
    assert made.load(1)["step"] == 1
    assert made.load()["step"] == 2
    save_all(made, 3)
    made.wait_drained()
    assert steps_in(tier) == [1, 2, 3]
    assert open_alone(tmp_path, [tl.Tier(tier)]).load()["step"] == 3


def test_failures_that_nobody_has_seen_are_reported_at_exit(
    tmp_path: Path, run_script: Callable[..., str]
) -> None:
    code = """
        import sys, time
        from pathlib import Path
        import torch
        import trunkline as tl
        root = Path(sys.argv[1])
        (root / "tier").mkdir(parents=True)
        (root / "tier/something").write_text("else")
        tier = tl.Tier(root / "other")
        made = tl.Checkpointer(root / "run", local=True, tiers=[tier], process_group=False)
        (root / "tier").rename(root / "other")
        made.save(1, {"w": torch.ones(10)}, block=True)
        while made.drains()[0].error is None:
            time.sleep(0.01)
    """
    run_script(code, str(tmp_path), expect=1, fresh=True)


ROUNDS = int(os.environ.get("TRUNKLINE_TEST_TIER_KILLS", "4"))


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_kills_at_any_moment(tmp_path: Path, seed: int) -> None:
    """Nodes are killed while they save and copy; the tier is whole at any time, and catches up."""
    random_ = random.Random(seed)
    nodes, keep = random_.choice([1, 2, 3]), random_.choice([None, 1, 2])
    paths, tier = directories(tmp_path, range(nodes)), tmp_path / "tier"

    def open_again(ranks: RankProcesses, limit: int | None) -> int:
        """Go on from the latest step, and return that; 0: there is none."""
        tiers = [tl.Tier(tier, every=2, keep=keep, bytes_per_second=limit)]
        steps = open_all(ranks, paths, keep=2, tiers=tiers)[0]
        if steps:
            assert ranks.all("loads", state(steps[-1])) == [True] * nodes
        return steps[-1] if steps else 0

    for _ in range(3):
        with RankProcesses(nodes) as ranks:
            last = open_again(ranks, random_.choice([None, 3_000_000]))
            for rank in range(nodes):
                ranks.tell(rank, "save_until_killed_of", last + 1, state(0))
            time.sleep(random_.uniform(0.1, 1.5))
            for process in random_.sample(ranks.processes, random_.randint(1, nodes)):
                process.kill()
        there = tl.Checkpointer(tier, process_group=False)
        for each in there.steps():
            assert same(there.load(each), make_state(**state(each)))
    with RankProcesses(nodes) as ranks:
        last = open_again(ranks, None)
        last += 2 - last % 2
        ranks.all("save", last, state(last), block=True)
        ranks.all("wait_drained")
        assert ranks.all("steps")[0][-1] == last
        ranks.finish()
    steps = tl.Checkpointer(tier, process_group=False).steps()
    if keep is None:
        assert steps == list(range(2, last + 1, 2))
    else:
        assert steps[-1] == last
        assert len(steps) <= keep
    check_tier(tier, steps)


def test_a_tier_is_made_while_the_nodes_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the thread that copies: rank 0 may have looked before, and another node afterwards."""
    made = tl.Checkpointer(tmp_path / "run", local=True, tiers=[tl.Tier(tmp_path / "tier")])
    made.save(1, {"weight": torch.zeros(3)}, block=True)
    made.wait_drained()
    tiers = made._context.node_tiers  # type: ignore[attr-defined]
    [seen] = tiers.seen()
    tiers.check_same([[""], [seen]], ["0", "1"])
    monkeypatch.setattr(node_tiers, "id_of", lambda directory: "")
    with pytest.raises(tl.Error, match="the node of rank 0 sees nothing where node 1 sees a tier"):
        tiers.check_same([[""], [seen]], ["0", "1"])


def test_the_record_of_a_tier_is_replaced_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the thread that copies, for a run that has gone on: it must not look like another one's."""
    options: dict[str, Any] = {"local": True, "tiers": [tl.Tier(tmp_path / "tier")]}
    made = tl.Checkpointer(tmp_path / "run", **options)
    made.save(1, {"weight": torch.zeros(3)}, block=True)
    made.wait_drained()
    origin_file = tmp_path / "tier" / origin.NAME
    before = origin_file.read_bytes()
    again = tl.Checkpointer(tmp_path / "run", **options)
    again.load()  # a new branch
    again.save(2, {"weight": torch.zeros(3)}, block=True)
    again.wait_drained()
    after = origin_file.read_bytes()
    assert json.loads(before)["ids"] != json.loads(after)["ids"]
    origin_file.write_bytes(before)
    read = origin._read_file

    def replaced(directory: str) -> Any:
        found = read(directory)
        origin_file.write_bytes(after)
        return found

    monkeypatch.setattr(origin, "_read_file", replaced)
    monkeypatch.setattr(node_tiers, "committed_in", lambda directory: {Commit(1, 1)})
    [[save]] = again._context.node_tiers.saves_in_tiers()  # type: ignore[attr-defined]
    assert save.nodes
