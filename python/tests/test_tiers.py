"""Steps that are copied to other directories in the background: trunkline.Tier."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support_tiers import nothing_copied_to, save_all, state_of, steps_in

import trunkline as tl
from trunkline.checkpoint.tiers.shard_copier import ShardCopier


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def test_multiples_of_every_are_copied_and_the_last_ones_stay(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, keep=2, tiers=[tl.Tier(tier, every=10, keep=2)])
    for step in (9, 10, 11, 20, 25, 30, 31):
        save_all(checkpoints, step)
        checkpoints.wait_drained()
    assert steps_in(tier) == [20, 30]
    assert steps_in(run) == [30, 31]
    assert checkpoints.steps() == [20, 30, 31]
    assert checkpoints.latest() == 31
    assert checkpoints.locations() == {20: [str(tier)], 30: [str(run), str(tier)], 31: [str(run)]}
    [status] = checkpoints.drains()
    assert status == (str(tier), None, 0, 0, (), None)


def test_a_copy_needs_nothing_of_the_original(run: Path, tier: Path, tmp_path: Path) -> None:
    volumes = [tmp_path / "disk0", tmp_path / "disk1"]
    for volume in volumes:
        volume.mkdir()
    checkpoints = tl.Checkpointer(run, volumes=volumes, tiers=[tl.Tier(tier)])
    state = state_of(4) | {"shared": None}
    state["shared"] = state["weights"][10:]  # a view: a feature of the manifest
    checkpoints.save(4, state, metrics={"loss": 0.5}, block=True)
    checkpoints.wait_drained()
    for directory in (run, *volumes):
        shutil.rmtree(directory)
    copies = tl.Checkpointer(tier)
    copies.verify(4)
    loaded = copies.load()
    assert loaded["shared"].untyped_storage().data_ptr() == loaded["weights"].untyped_storage().data_ptr()
    assert copies.metrics(4) == {"loss": 0.5}
    with tl.open_tensors(tier / "step-00000004") as tensors:
        assert torch.equal(tensors["weights"], state["weights"])


def test_copies_of_incremental_checkpoints_are_whole(run: Path, tier: Path) -> None:
    """Their shards are links to those of earlier steps; a copy has all bytes, and is gone on from."""
    frozen = {f"w{number}": torch.randn(300, 1000) for number in range(4)}

    def state(step: int) -> dict[str, Any]:
        return {"model": {**frozen, "adapter": torch.full((100, 10), float(step))}, "step": step}

    options: dict[str, Any] = {"keep": 2, "incremental": True, "tiers": [tl.Tier(tier, every=2, keep=3)]}
    with tl.Checkpointer(run, **options) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(step, state(step), block=True)
        checkpoints.wait_drained()
    assert tl.Checkpointer(tier).steps() == [4, 6, 8]
    shutil.rmtree(run)
    copies = tl.Checkpointer(tier)
    for step in copies.steps():
        copies.verify(step)
        loaded = copies.load(step)["model"]
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state(step)["model"].items())
    with tl.Checkpointer(run, **options) as checkpoints:
        assert checkpoints.load()["step"] == 8
        checkpoints.save(9, state(9), block=True)
        checkpoints.save(10, state(10), block=True)
        checkpoints.wait_drained()
    assert tl.Checkpointer(tier).steps() == [6, 8, 10]
    assert torch.equal(tl.Checkpointer(tier).load()["model"]["w0"], frozen["w0"])


def test_an_empty_directory_goes_on_from_the_tier(run: Path, tier: Path) -> None:
    tiers = [tl.Tier(tier, every=2)]
    with tl.Checkpointer(run, tiers=tiers) as checkpoints:
        save_all(checkpoints, 1, 2, 3)
        checkpoints.wait_drained()
    shutil.rmtree(run)
    checkpoints = tl.Checkpointer(run, tiers=tiers)
    assert checkpoints.latest() == 2
    assert checkpoints.steps() == [2]
    assert checkpoints.load()["step"] == 2
    save_all(checkpoints, 3, 4)
    checkpoints.wait_drained()
    assert steps_in(tier) == [2, 4]
    assert checkpoints.load()["step"] == 4
    # And again, before anything was copied from the new directory.
    shutil.rmtree(run)
    checkpoints = tl.Checkpointer(run, tiers=tiers)
    assert checkpoints.load()["step"] == 4
    save_all(checkpoints, 5)
    again = tl.Checkpointer(run, tiers=tiers)
    assert again.load()["step"] == 5
    save_all(again, 6)
    again.wait_drained()
    assert steps_in(tier) == [2, 4, 6]


def test_the_last_commit_counts_wherever_it_is(run: Path, tier: Path, tmp_path: Path) -> None:
    """Two machines take turns; each has an old directory of its own."""
    tiers = [tl.Tier(tier, every=10)]
    here, there = run, tmp_path / "other"
    checkpoints = tl.Checkpointer(here, tiers=tiers)
    save_all(checkpoints, 10, 11)
    checkpoints.wait_drained()
    other = tl.Checkpointer(there, tiers=tiers)
    assert other.load()["step"] == 10
    save_all(other, 12, 20)
    other.wait_drained()
    back = tl.Checkpointer(here, tiers=tiers)
    assert back.latest() == 20
    assert back.load()["step"] == 20
    assert back.load(11)["step"] == 11
    assert back.load(10)["step"] == 10
    save_all(back, 30)
    back.wait_drained()
    assert steps_in(tier) == [10, 20, 30]


def test_the_directory_itself_comes_first(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    for shard in tier.glob("step-*/shard-*"):
        shard.unlink()
    assert checkpoints.load(1)["step"] == 1
    assert checkpoints.load()["step"] == 1
    checkpoints.verify(1)
    checkpoints.verify()


def test_an_error_about_a_damaged_step_names_the_copy(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    [shard] = run.glob("step-*/shard-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(tl.Corrupt) as error:
        checkpoints.load()
    assert f"{tier} has a copy of step 1" in str(error.value)


def test_parts_metrics_and_tensors_of_a_step_that_only_the_tier_has(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, keep=1, keep_best=("loss", "min", 1), tiers=[tl.Tier(tier, every=2)])
    for step, loss in ((1, 0.5), (2, 0.9), (3, 0.8)):
        checkpoints.save(step, state_of(step), metrics={"loss": loss}, block=True)
        checkpoints.wait_drained()
    save_all_with_loss = [4, 5]
    for step in save_all_with_loss:
        checkpoints.save(step, state_of(step), metrics={"loss": 1.0}, block=True)
    assert 2 not in tl.Checkpointer(run).steps()
    assert checkpoints.metrics(2) == {"loss": 0.9}
    assert checkpoints.best() == 1
    assert checkpoints.load(2, keys="step") == {"step": 2}
    with checkpoints.open_tensors(2) as tensors:
        assert float(tensors["weights"][0]) == 2.0


def test_retention_leaves_what_is_to_be_copied(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, keep=1, tiers=[tl.Tier(tier, every=2, keep=None)])
    with nothing_copied_to(tier):
        save_all(checkpoints, 1, 2, 3, 4, 5)
        assert steps_in(run) == [2, 4, 5]
    checkpoints.wait_drained()
    assert steps_in(tier) == [2, 4]
    save_all(checkpoints, 7)
    assert steps_in(run) == [7]


def test_the_last_copies_alone_are_made_where_many_wait(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, keep=1, tiers=[tl.Tier(tier, keep=2)])
    with nothing_copied_to(tier):
        save_all(checkpoints, 1, 2, 3, 4, 5)
    checkpoints.wait_drained()
    assert steps_in(tier) == [4, 5]
    save_all(checkpoints, 6)
    checkpoints.wait_drained()
    save_all(checkpoints, 7)
    assert set(steps_in(run)) <= {6, 7}


def test_delete_waits_for_a_copy(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    with nothing_copied_to(tier):
        save_all(checkpoints, 1, 2)
        deleting = threading.Thread(target=checkpoints.delete, args=(1,))
        deleting.start()
        deleting.join(0.3)
        assert deleting.is_alive()
        assert steps_in(run) == [1, 2]
    deleting.join()
    assert steps_in(run) == [2]
    checkpoints.wait_drained()
    assert steps_in(tier) == [1, 2]


def test_a_run_that_went_back_replaces_its_copies(run: Path, tier: Path) -> None:
    tiers = [tl.Tier(tier, every=10)]
    checkpoints = tl.Checkpointer(run, tiers=tiers)
    save_all(checkpoints, 10, 20, 30)
    checkpoints.wait_drained()
    again = tl.Checkpointer(run, tiers=tiers)
    assert again.load(10)["step"] == 10
    again.save(20, {"again": True}, block=True)
    again.wait_drained()
    assert tl.Checkpointer(tier).latest() == 20
    assert tl.Checkpointer(tier).load() == {"again": True}


def test_a_failed_copy_is_raised_shown_and_tried_again(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    (tier / "step-00000002").write_text("in the way")
    save_all(checkpoints, 2)
    with pytest.raises(tl.Error, match=f"copying step 2 to {tier} failed") as error:
        checkpoints.wait_drained()
    assert checkpoints.drains()[0].error is error.value
    with pytest.raises(tl.Error, match="copying step 2"):  # each time
        checkpoints.wait_drained()
    checkpoints.wait()  # it was raised
    save_all(checkpoints, 3)  # tries again
    (tier / "step-00000002").unlink()
    checkpoints.wait_drained()
    assert checkpoints.drains()[0].error is None
    assert steps_in(tier) == [1, 2, 3]


def test_the_next_save_raises_a_failure_once_and_saves_nothing(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    (tier / "step-00000002").write_text("in the way")
    save_all(checkpoints, 2)
    checkpoints._tiers._places[0].drain.wait()
    with pytest.raises(tl.Error, match="this call saved nothing: call it again"):
        save_all(checkpoints, 3)
    assert checkpoints.steps() == [1, 2]
    save_all(checkpoints, 3)
    checkpoints._tiers._places[0].drain.wait()
    save_all(checkpoints, 4)  # the same failure of the same step is not raised again
    checkpoints.wait()
    assert checkpoints.drains()[0].error is not None


def test_a_failing_tier_does_not_let_the_directory_grow(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, keep=2, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    tier.rename(tier.with_name("away"))
    for step in range(2, 9):
        try:
            save_all(checkpoints, step)
        except tl.Error:
            save_all(checkpoints, step)
        checkpoints._tiers._places[0].drain.wait()
    assert len(steps_in(run)) <= 4
    with pytest.raises(tl.Error, match="does not exist any more; mount its disk"):
        checkpoints.wait_drained()
    tier.with_name("away").rename(tier)
    checkpoints.wait_drained()
    assert steps_in(tier)[-1] == 8


def test_a_damaged_original_is_reported_and_does_not_block_others(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    with nothing_copied_to(tier):
        save_all(checkpoints, 1, 2)
        [shard] = run.glob("step-00000001/shard-*")
        contents = bytearray(shard.read_bytes())
        contents[-1] ^= 1
        shard.write_bytes(contents)
    with pytest.raises(tl.Corrupt, match="step 1 was not copied") as error:
        checkpoints.wait_drained()
    assert error.value.chunk == 0
    assert steps_in(tier) == [2]


def test_a_missing_shard_is_reported_and_does_not_block_others(run: Path, tier: Path) -> None:
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    with nothing_copied_to(tier):
        save_all(checkpoints, 1, 2)
        [shard] = run.glob("step-00000001/shard-*")
        shard.unlink()
    with pytest.raises(tl.Corrupt, match=f"{shard} is missing; mount its disk"):
        checkpoints.wait_drained()
    assert steps_in(tier) == [2]


def test_a_step_that_is_removed_while_it_is_copied_is_no_failure(
    run: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_original = ShardCopier._open

    def remove_first(self: ShardCopier, shard: Any) -> Any:
        shutil.rmtree(run / "step-00000001", ignore_errors=True)  # as another process
        return open_original(self, shard)

    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    with nothing_copied_to(tier):
        save_all(checkpoints, 1, 2)
    monkeypatch.setattr(ShardCopier, "_open", remove_first)
    checkpoints.wait_drained()
    assert steps_in(tier) == [2]


def test_a_copy_is_verified_before_it_is_committed(
    run: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = ShardCopier._verify

    def damage(self: ShardCopier, shard: Any, memory: Any) -> None:
        with Path(shard.copy).open("r+b") as file:
            file.seek(100)
            file.write(b"damage")
        verify(self, shard, memory)

    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    with monkeypatch.context() as patch:
        patch.setattr(ShardCopier, "_verify", damage)
        save_all(checkpoints, 1)
        with pytest.raises(tl.Corrupt, match=str(tier)):
            checkpoints.wait_drained()
    assert steps_in(tier) == []
    assert not list(tier.glob("step-*"))  # nothing is left of it
    checkpoints.wait_drained()
    assert steps_in(tier) == [1]


def test_another_run_in_the_tier_is_left_alone(run: Path, tier: Path) -> None:
    save_all(tl.Checkpointer(tier), 5, 10)
    before = sorted(tier.rglob("*"))
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    with pytest.raises(FileExistsError, match=f"{tier}: it already holds steps 5, 10"):
        save_all(checkpoints, 1)
    assert not run.exists()
    assert sorted(tier.rglob("*")) == before


def test_a_tier_of_another_run_is_not_loaded(run: Path, tier: Path) -> None:
    save_all(tl.Checkpointer(run), 1)
    save_all(tl.Checkpointer(tier), 5, 10)
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    assert checkpoints.steps() == [1]
    with pytest.raises(FileExistsError, match=f"{tier} holds steps 5, 10, which were not copied from"):
        checkpoints.load()
    with pytest.raises(FileExistsError):
        checkpoints.wait_drained()
    assert steps_in(tier) == [5, 10]


def test_fresh_sets_aside_in_the_tier_too(run: Path, tier: Path) -> None:
    tiers = [tl.Tier(tier, every=2)]
    first = tl.Checkpointer(run, tiers=tiers)
    save_all(first, 1, 2, 3, 4)
    first.wait_drained()
    second = tl.Checkpointer(run, fresh=True, tiers=tiers)
    save_all(second, 1)
    assert second.steps() == [1]
    assert [steps_in(each) for each in tier.glob("aside-*")] == [[2, 4]]
    save_all(second, 2)
    second.wait_drained()
    assert steps_in(tier) == [2]
    assert tl.Checkpointer(run, tiers=tiers).latest() == 2
    # On another machine, and after a step was moved back from the folder.
    shutil.rmtree(run)
    [aside] = tier.glob("aside-*")
    (aside / "step-00000004").rename(tier / "step-00000004")
    assert tl.Checkpointer(run, tiers=tiers).load()["step"] == 2


def test_an_unfinished_copy_is_resumed_without_a_save(run: Path, tier: Path) -> None:
    tiers = [tl.Tier(tier)]
    with nothing_copied_to(tier):
        first = tl.Checkpointer(run, tiers=tiers)
        save_all(first, 1, 2)
        first._tiers._places[0].drain.stop()
        first._tiers._places[0].drain.wait()
    assert steps_in(tier) == []
    second = tl.Checkpointer(run, tiers=tiers)
    second.wait_drained()
    assert steps_in(tier) == [1, 2]


def test_two_tiers(run: Path, tier: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    tiers = [tl.Tier(tier, every=2, keep=1), tl.Tier(far, every=4)]
    checkpoints = tl.Checkpointer(run, keep=1, tiers=tiers)
    for step in range(1, 8):
        save_all(checkpoints, step)
        checkpoints.wait_drained()
    assert (steps_in(tier), steps_in(far)) == ([6], [4])
    assert checkpoints.steps() == [4, 6, 7]
    shutil.rmtree(run)
    shutil.rmtree(tier)
    again = tl.Checkpointer(run, tiers=tiers)
    assert again.load()["step"] == 4


def test_copying_is_not_faster_than_the_limit(run: Path, tier: Path) -> None:
    """An upper bound: a loaded machine may be slower."""
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier, bytes_per_second="8MB")])
    checkpoints.save(1, state_of(1, 2_000_000), block=True)  # 8 MB, written and read back
    began = time.monotonic()
    checkpoints.wait_drained()
    # It may have begun when the save had ended, a moment before.
    assert time.monotonic() - began >= 2 * 0.98 - 0.1
    assert steps_in(tier) == [1]


def test_progress_is_shown(run: Path, tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, reached = threading.Event(), threading.Event()
    end_window = ShardCopier._end_window

    def wait(self: ShardCopier, nbytes: int, seconds: float) -> None:
        end_window(self, nbytes, seconds)
        reached.set()
        goes_on.wait()

    monkeypatch.setattr(ShardCopier, "_end_window", wait)
    checkpoints = tl.Checkpointer(run, keep=1, tiers=[tl.Tier(tier, keep=None)])
    save_all(checkpoints, 1)
    reached.wait()
    save_all(checkpoints, 2, 3)
    [status] = checkpoints.drains()
    assert status.step == 1
    assert 0 < status.done_bytes < status.total_bytes
    with pytest.raises(tl.Timeout):
        checkpoints.wait_drained(0.01)
    assert steps_in(run) == [1, 2, 3]  # 1 is being copied, the others wait
    goes_on.set()
    checkpoints.wait_drained()
    assert steps_in(tier) == [1, 2, 3]


def test_opening_the_tier_meanwhile_changes_nothing(
    run: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for leftovers of saves, which what is being copied must not count as."""
    opened: list[list[int]] = []
    verify = ShardCopier._verify

    def look(self: ShardCopier, shard: Any, memory: Any) -> None:
        opened.append(tl.Checkpointer(tier).steps())
        verify(self, shard, memory)

    monkeypatch.setattr(ShardCopier, "_verify", look)
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    assert opened[0] == []
    assert steps_in(tier) == [1]


def test_without_tiers_there_is_nothing_to_wait_for(run: Path) -> None:
    checkpoints = tl.Checkpointer(run)
    save_all(checkpoints, 3)
    checkpoints.wait_drained()
    assert checkpoints.drains() == []
    assert checkpoints.locations() == {3: [str(run)]}
    assert not (run / "trunkline-tiers.json").exists()


def test_a_tier_that_is_gone_is_not_made_anew(run: Path, tier: Path) -> None:
    tiers = [tl.Tier(tier)]
    first = tl.Checkpointer(run, tiers=tiers)
    save_all(first, 1)
    first.wait_drained()
    shutil.rmtree(tier)
    second = tl.Checkpointer(run, tiers=tiers)
    assert second.load()["step"] == 1
    save_all(second, 2)
    with pytest.raises(tl.Error, match="does not exist any more") as error:
        second.wait_drained()
    assert error.value.errno == errno.EIO
    tier.mkdir()  # as the error says
    second.wait_drained()
    assert steps_in(tier) == [1, 2]


SLOW = """
import sys, torch
import trunkline as tl
tiers = [tl.Tier(sys.argv[2], bytes_per_second="1MB")]
checkpoints = tl.Checkpointer(sys.argv[1], tiers=tiers)
checkpoints.save(1, {"weights": torch.zeros(10_000_000)}, block=True)  # 80 seconds
"""


def exit_of(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("raise KeyboardInterrupt", -signal.SIGINT), ("sys.exit(3)", 3)]
)
def test_the_exit_stops_a_copy_and_names_what_is_left(run: Path, tier: Path, end: str, status: int) -> None:
    began = time.monotonic()
    ended = exit_of(SLOW + end, run, tier)
    assert ended.returncode == status, ended.stderr
    assert f"trunkline: not copied to {tier} yet: step 1. The next run goes on with that" in ended.stderr
    assert time.monotonic() - began < 75
    assert not list(tier.glob("step-*"))
    again = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    again.wait_drained()
    assert tl.Checkpointer(tier).steps() == [1]


def test_the_exit_reports_a_failure_that_nobody_has_seen(run: Path, tier: Path) -> None:
    script = """
import pathlib, sys
import trunkline as tl
checkpoints = tl.Checkpointer(sys.argv[1], tiers=[tl.Tier(sys.argv[2])])
checkpoints.save(1, {}, block=True)
checkpoints.wait_drained()
(pathlib.Path(sys.argv[2]) / "step-00000002").write_text("in the way")
checkpoints.save(2, {}, block=True)
checkpoints._tiers._places[0].drain.wait()
"""
    ended = exit_of(script, run, tier)
    assert ended.returncode == 1
    assert f"trunkline: copying step 2 to {tier} failed" in ended.stderr


def test_the_exit_reports_the_failure_of_a_checkpointer_that_is_gone(run: Path, tier: Path) -> None:
    script = """
import gc, pathlib, sys
import trunkline as tl
def train():
    checkpoints = tl.Checkpointer(sys.argv[1], tiers=[tl.Tier(sys.argv[2])])
    checkpoints.save(1, {}, block=True)
    checkpoints.wait_drained()
    (pathlib.Path(sys.argv[2]) / "step-00000002").write_text("in the way")
    checkpoints.save(2, {}, block=True)
    checkpoints._tiers._places[0].drain.wait()
train()
gc.collect()
if sys.argv[3] == "repaired":
    (pathlib.Path(sys.argv[2]) / "step-00000002").unlink()
    tl.Checkpointer(sys.argv[1], tiers=[tl.Tier(sys.argv[2])]).wait_drained()
"""
    ended = exit_of(script, run, tier, Path("failed"))
    assert ended.returncode == 1
    assert f"trunkline: copying step 2 to {tier} failed" in ended.stderr
    assert f"trunkline: not copied to {tier} yet: step 2" in ended.stderr
    shutil.rmtree(run)
    shutil.rmtree(tier)
    ended = exit_of(script, run, tier, Path("repaired"))
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("copies", ["one is stopped", "all are made"])
def test_the_exit_does_not_wait_for_a_tier_that_does_not_respond(run: Path, tier: Path, copies: str) -> None:
    script = """
import sys, threading
import trunkline as tl
from trunkline.checkpoint.tiers import drain, tiers
listed, has_hung, waits = drain.committed_in, threading.Event(), threading.Event()
def hangs(directory, every=1):  # as in a filesystem whose server is gone, but for Ctrl-C
    if has_hung.is_set() and str(directory) == sys.argv[2]:
        waits.set()
        threading.Event().wait()
    return listed(directory, every)
drain.committed_in = tiers.committed_in = hangs
drain._EXIT_SECONDS = 0.5
checkpoints = tl.Checkpointer(sys.argv[1], tiers=[tl.Tier(sys.argv[2])])
checkpoints.save(1, {}, block=True)
checkpoints.wait_drained()
has_hung.set()
if sys.argv[3] == "one is stopped":
    checkpoints.save(2, {}, block=True)
    assert waits.wait(60)
"""
    ended = exit_of(script, run, tier, Path(copies))
    if copies == "all are made":
        assert (ended.returncode, ended.stderr) == (0, "")
        return
    assert ended.returncode == 1
    gave_up, left = ended.stderr.splitlines()
    assert gave_up == f"trunkline: gave up waiting for the copy to {tier}, which does not respond"
    assert left.startswith(f"trunkline: not copied to {tier} yet: step 2. ")


@pytest.mark.parametrize(
    "call",
    [
        "steps()",
        "latest()",
        "locations()",
        "load()",
        "load(1)",
        "metrics(1)",
        "wait_drained()",
        "save(3, {})",
    ],
)
def test_ctrl_c_ends_a_call_that_reads_a_tier_which_does_not_respond(
    run: Path, tier: Path, call: str
) -> None:
    check_ctrl_c_ends(run, tier, call, local=False)


@pytest.mark.parametrize("call", ["steps()", "load()", "load(1)", "wait_drained()"])
def test_ctrl_c_ends_a_call_of_a_node(run: Path, tier: Path, call: str) -> None:
    check_ctrl_c_ends(run, tier, call, local=True)


def check_ctrl_c_ends(run: Path, tier: Path, call: str, *, local: bool) -> None:
    script = """
import os, signal, sys, threading
import trunkline as tl
from trunkline.checkpoint.directory import node_drain, node_tiers
from trunkline.checkpoint.tiers import drain, hung, tiers
listed, has_hung, answers = drain.committed_in, threading.Event(), threading.Lock()
id_of = node_tiers.id_of
answers.acquire()
def hangs(directory, every=1):  # as in a filesystem whose server is gone
    if has_hung.is_set() and str(directory) == sys.argv[2]:
        with answers:  # if the main thread waits here, the handler of the signal comes after that
            pass
    return listed(directory, every)
def hangs_too(directory):
    hangs(directory)
    return id_of(directory)
drain.committed_in = tiers.committed_in = node_drain.committed_in = node_tiers.committed_in = hangs
node_tiers.id_of = hangs_too
def say(text):
    print(text)
    threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
hung.say, hung._SAY_SECONDS = say, 0.01
options = {"tiers": [tl.Tier(sys.argv[2])], "local": sys.argv[4] == "local"}
checkpoints = tl.Checkpointer(sys.argv[1], **options)
checkpoints.save(1, {}, block=True)
checkpoints.wait_drained()
checkpoints = tl.Checkpointer(sys.argv[1], **options)
has_hung.set()
threading.Timer(60, answers.release).start()  # in case the call blocks in this thread
try:
    eval("checkpoints." + sys.argv[3])
    print("was not held up")
except KeyboardInterrupt:
    print("interrupted")
has_hung.clear()
hung._SAY_SECONDS = 60  # a busy machine may take long
print(checkpoints.steps())
os._exit(0)
"""
    ended = exit_of(script, run, tier, Path(call), Path("local" if local else "shared"))
    said, outcome, steps = ended.stdout.splitlines()
    what = f"one of the tiers {tier}" if local else f"the tier {tier}"
    assert said == f"waiting for {what}, which does not respond; Ctrl-C ends the wait"
    assert (outcome, steps) == ("interrupted", "[1]")


def test_the_exit_does_not_say_again_that_a_tier_is_another_runs(run: Path, tier: Path) -> None:
    script = """
import sys
import trunkline as tl
checkpoints = tl.Checkpointer(sys.argv[1], tiers=[tl.Tier(sys.argv[2])])
checkpoints.save(1, {}, block=True)
checkpoints.wait_drained()
other = tl.Checkpointer(sys.argv[2])
other.load()
other.save(2, {}, block=True)
drain = checkpoints._tiers._places[0].drain
for seen in range(2):
    drain.request()
    drain.wait()
    if not seen:
        try:
            checkpoints._tiers.raise_failure()
        except FileExistsError:
            print("raised")
assert drain._news is not None
"""
    ended = exit_of(script, run, tier)
    assert (ended.returncode, ended.stdout) == (0, "raised\n"), ended.stderr
    assert "failed" not in ended.stderr


def test_waiting_for_copies_in_an_early_exit_handler_raises(run: Path, tier: Path) -> None:
    script = """
import atexit, sys
atexit.register(lambda: checkpoints.wait_drained())
import trunkline as tl, torch
checkpoints = tl.Checkpointer(sys.argv[1], tiers=[tl.Tier(sys.argv[2], bytes_per_second="1MB")])
checkpoints.save(1, {"weights": torch.zeros(10_000_000)}, block=True)
"""
    ended = exit_of(script, run, tier)
    assert f"cannot copy step 1 to {tier}: the interpreter is exiting" in ended.stderr


def test_a_forked_child_copies_nothing_and_reports_nothing(
    run: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, reached = threading.Event(), threading.Event()
    end_window = ShardCopier._end_window

    def wait(self: ShardCopier, nbytes: int, seconds: float) -> None:
        reached.set()
        goes_on.wait()
        end_window(self, nbytes, seconds)

    monkeypatch.setattr(ShardCopier, "_end_window", wait)
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    reached.wait()
    child = os.fork()
    if child == 0:
        status = checkpoints.drains()[0]
        os._exit(0 if status.step is None and checkpoints._tiers._places[0].drain.wait(0) else 1)
    _, status = os.waitpid(child, 0)
    goes_on.set()
    assert os.waitstatus_to_exitcode(status) == 0
    checkpoints.wait_drained()
    assert steps_in(tier) == [1]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ValueError, "every: must be an integer of at least 1"),
        ({"every": 1.5}, TypeError, "every: must be an integer"),
        ({"keep": 0}, ValueError, "keep: must be an integer of at least 1"),
        ({"bytes_per_second": 0}, ValueError, "bytes_per_second: must be at least 1"),
        ({"bytes_per_second": "fast"}, ValueError, "bytes_per_second"),
    ],
)
def test_wrong_arguments_of_a_tier(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        tl.Tier("x", **arguments)


def test_wrong_tiers(run: Path, tier: Path) -> None:
    with pytest.raises(TypeError, match="put it into a list"):
        tl.Checkpointer(run, tiers=tl.Tier(tier))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must hold only trunkline.Tier, not str"):
        tl.Checkpointer(run, tiers=[str(tier)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="named twice"):
        tl.Checkpointer(run, tiers=[tl.Tier(tier), tl.Tier(os.path.join(tier, "."))])  # noqa: PTH118
    with pytest.raises(ValueError, match="the directory of the run"):
        tl.Checkpointer(run, tiers=[tl.Tier(run)])
    assert repr(tl.Tier("/x", every=2, bytes_per_second="2GB")) == (
        "trunkline.Tier('/x', every=2, keep=3, bytes_per_second=2000000000)"
    )
