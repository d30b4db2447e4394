"""Tiers that two runs name, and tiers whose steps somebody removes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support_log import logged
from support_tiers import nothing_copied_to, save_all, steps_in

import trunkline as tl
from trunkline.checkpoint.tiers import tiers as module


def is_copied(checkpoints: tl.Checkpointer) -> bool:
    """Wait until all is copied to the tier; False: it is another run's."""
    try:
        checkpoints.wait_drained()
    except FileExistsError:
        return False
    return True


def begin_together(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two runs that save beside an empty tier: the one whose copies are there, the other one, the tier."""
    runs, tier = [tmp_path / "run0", tmp_path / "run1"], tmp_path / "tier"
    with nothing_copied_to(tier):
        both = [tl.Checkpointer(run, tiers=[tl.Tier(tier)]) for run in runs]
        for each in both:
            save_all(each, 0, 1)
    are_copied = [is_copied(each) for each in both]
    assert sorted(are_copied) == [False, True]
    first, second = runs if are_copied[0] else reversed(runs)
    return first, second, tier


def test_the_second_run_of_a_tier_gets_an_error_and_never_the_steps_of_the_first(tmp_path: Path) -> None:
    first, second, tier = begin_together(tmp_path)
    go_on = tl.Checkpointer(first, tiers=[tl.Tier(tier)])
    assert go_on.load()["step"] == 1
    save_all(go_on, 2)
    go_on.wait_drained()
    assert steps_in(tier) == [0, 1, 2]
    restarted = tl.Checkpointer(second, tiers=[tl.Tier(tier)])
    assert restarted.latest() == 1
    assert restarted.locations() == {0: [str(second)], 1: [str(second)]}
    with pytest.raises(FileExistsError, match=f"the tier {tier} holds steps 0, 1, 2, which were not copied"):
        restarted.load()
    with pytest.raises(FileExistsError, match="were not copied from"):
        save_all(restarted, 7)
    with pytest.raises(FileExistsError, match="were not copied from"):
        restarted.wait_drained()


def test_a_run_above_the_steps_of_another_one_is_not_copied_to_its_tier(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    first = tl.Checkpointer(tmp_path / "run0", tiers=[tl.Tier(tier)])
    save_all(first, 0, 1)
    first.wait_drained()
    other = tl.Checkpointer(tmp_path / "run1", tiers=[tl.Tier(tier)])
    with pytest.raises(FileExistsError, match=r"call load\(\) first, to go on from them"):
        save_all(other, 100)
    save_all(first, 2)
    first.wait_drained()
    assert steps_in(tier) == [0, 1, 2]


def test_a_run_that_was_continued_elsewhere_has_to_load_before_it_saves(tmp_path: Path) -> None:
    runs, tier = [tmp_path / "run0", tmp_path / "run1"], tmp_path / "tier"
    first = tl.Checkpointer(runs[0], tiers=[tl.Tier(tier)])
    save_all(first, 0, 1)
    first.wait_drained()
    other = tl.Checkpointer(runs[1], tiers=[tl.Tier(tier)])
    assert other.load()["step"] == 1
    save_all(other, 2)
    other.wait_drained()
    save_all(first, 5)  # it is still alive
    with pytest.raises(FileExistsError, match=r"holds steps 0, 1, 2, .* call load\(\) first"):
        first.wait_drained()
    back = tl.Checkpointer(runs[0], tiers=[tl.Tier(tier)])
    assert back.load(2)["step"] == 2
    save_all(back, 6)
    back.wait_drained()
    assert steps_in(tier) == [1, 2, 6]


def test_a_save_into_the_tier_itself_is_noticed(tmp_path: Path) -> None:
    run, tier = tmp_path / "run", tmp_path / "tier"
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 0, 1)
    checkpoints.wait_drained()
    copies = tl.Checkpointer(tier)
    copies.load()
    save_all(copies, 2)
    save_all(checkpoints, 2)
    with pytest.raises(FileExistsError, match=r"call load\(\) first, to go on from them"):
        checkpoints.wait_drained()
    again = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    assert again.load()["step"] == 2
    save_all(again, 3)
    again.wait_drained()
    assert steps_in(tier) == [1, 2, 3]


def test_of_two_copies_of_a_run_one_gets_an_error(tmp_path: Path) -> None:
    run, copied, tier = tmp_path / "run", tmp_path / "copied", tmp_path / "tier"
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 0)
    checkpoints.wait_drained()
    shutil.copytree(run, copied)
    other = tl.Checkpointer(copied, tiers=[tl.Tier(tier)])
    other.load()
    save_all(other, 1)
    other.wait_drained()
    save_all(checkpoints, 1)
    with pytest.raises(FileExistsError):
        checkpoints.wait_drained()
    assert steps_in(tier) == [0, 1]


def test_waiting_for_copies_needs_load_if_another_run_has_gone_on(tmp_path: Path) -> None:
    """The directory has steps that were never copied; nothing in the tier is removed."""
    runs, tier = [tmp_path / "run0", tmp_path / "run1"], tmp_path / "tier"
    first = tl.Checkpointer(runs[0], tiers=[tl.Tier(tier)])
    save_all(first, 1, 2)
    first.wait_drained()
    away = tl.Checkpointer(runs[0])
    away.load()
    save_all(away, 3, 4, 5, 6)
    other = tl.Checkpointer(runs[1], tiers=[tl.Tier(tier)])
    assert other.load()["step"] == 2
    save_all(other, 3, 4)
    other.wait_drained()
    assert steps_in(tier) == [2, 3, 4]
    back = tl.Checkpointer(runs[0], tiers=[tl.Tier(tier, keep=2)])
    with pytest.raises(FileExistsError, match=r"another run has gone on from there; .* call load\(\) first"):
        back.wait_drained()
    assert steps_in(tier) == [2, 3, 4]


def test_a_run_that_is_further_than_one_that_went_on_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs, tier = [tmp_path / "run0", tmp_path / "run1"], tmp_path / "tier"
    first = tl.Checkpointer(runs[0], tiers=[tl.Tier(tier)])
    save_all(first, 1)
    first.wait_drained()
    other = tl.Checkpointer(runs[1], tiers=[tl.Tier(tier)])
    other.load()
    save_all(other, 2)
    other.wait_drained()
    away = tl.Checkpointer(runs[0])
    away.load()
    save_all(away, 5, 6, 7)
    with logged(caplog, "WARNING") as records:
        assert tl.Checkpointer(runs[0], tiers=[tl.Tier(tier)]).load()["step"] == 7
    assert any("another run has gone on from the copies" in each and "to step 2" in each for each in records)


def diverged(tmp_path: Path) -> tuple[Path, Path]:
    """A copy of a run that was saved to without the tier, while the run went on there, and the tier."""
    run, copied, tier = tmp_path / "run", tmp_path / "copied", tmp_path / "tier"
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    shutil.copytree(run, copied)
    save_all(checkpoints, 2)
    checkpoints.wait_drained()
    alone = tl.Checkpointer(copied)
    alone.load()
    save_all(alone, 3)
    return copied, tier


def test_a_copy_of_a_run_that_was_saved_to_is_another_run(tmp_path: Path) -> None:
    copied, tier = diverged(tmp_path)
    other = tl.Checkpointer(copied, tiers=[tl.Tier(tier)])
    assert other.steps() == [1, 3]
    with pytest.raises(FileExistsError, match="which were not copied from"):
        save_all(other, 4)
    with pytest.raises(FileExistsError, match="which were not copied from"):
        other.wait_drained()
    with pytest.raises(FileExistsError, match="which were not copied from"):
        other.load()
    assert steps_in(tier) == [1, 2]


def test_a_restored_run_has_to_load_before_it_goes_on(tmp_path: Path) -> None:
    """It was copied at an earlier step, and the original is lost: the tier has the latest one."""
    run, backup, tier = tmp_path / "run", tmp_path / "backup", tmp_path / "tier"
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    shutil.copytree(run, backup)
    save_all(checkpoints, 2)
    checkpoints.wait_drained()
    del checkpoints
    shutil.rmtree(run)
    shutil.copytree(backup, run)
    restored = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    with pytest.raises(FileExistsError, match=r"call load\(\) before saving"):
        save_all(restored, 2)
    with pytest.raises(FileExistsError, match=r"call load\(\) first, to go on from them"):
        restored.wait_drained()
    assert restored.load()["step"] == 2
    save_all(restored, 3)
    restored.wait_drained()
    again = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    again.load()
    save_all(again, 4)
    again.wait_drained()
    assert steps_in(tier) == [2, 3, 4]


def test_a_damaged_origin_is_named_and_loading_goes_on(tmp_path: Path) -> None:
    run, tier = tmp_path / "run", tmp_path / "tier"
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    (tier / "trunkline-origin.json").write_text("{")
    again = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    with pytest.raises(FileExistsError, match=r"trunkline-origin.json, which says .* is damaged; .*load\(\)"):
        save_all(again, 2)
    again.load()
    save_all(again, 2)
    again.wait_drained()
    assert steps_in(tier) == [1, 2]


def test_a_fresh_start_that_fails_leaves_the_earlier_run_able_to_copy(tmp_path: Path) -> None:
    run, tier = tmp_path / "run", tmp_path / "tier"
    first = tl.Checkpointer(run, keep=None, tiers=[tl.Tier(tier, keep=None)])
    save_all(first, 1, 2)
    first.wait_drained()
    (run / "step-00000002").rename(tmp_path / "elsewhere")
    (run / "step-00000002").symlink_to("../elsewhere")  # cannot be set aside
    with pytest.raises(tl.Error):
        save_all(tl.Checkpointer(run, tiers=[tl.Tier(tier)], fresh=True), 1)
    assert steps_in(tier) == []
    again = tl.Checkpointer(run, keep=None, tiers=[tl.Tier(tier, keep=None)])
    assert again.load()["step"] == 2
    save_all(again, 3, 4)
    again.wait_drained()
    assert steps_in(tier) == [3, 4]


def test_a_new_tier_keeps_the_group_of_its_parent(tmp_path: Path) -> None:
    project, tier = tmp_path / "project", tmp_path / "project" / "tier"
    project.mkdir()
    project.chmod(0o2770)
    (tmp_path / "run").mkdir(0o700)
    checkpoints = tl.Checkpointer(tmp_path / "run", tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    assert tier.stat().st_mode & 0o7777 == 0o2700


def modes_below(folder: Path) -> set[int]:
    """Of the shards and manifests."""
    return {
        path.stat().st_mode & 0o777
        for path in folder.glob("step-*/*")
        if path.name.startswith(("shard-", "manifest-"))
    }


def test_a_new_tier_is_as_private_as_the_run(tmp_path: Path) -> None:
    run, tier = tmp_path / "run", tmp_path / "tier"
    run.mkdir(0o700)
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 1)
    checkpoints.wait_drained()
    assert tier.stat().st_mode & 0o777 == 0o700


def test_shards_and_manifests_of_copies_are_as_private_as_the_originals(tmp_path: Path) -> None:
    run, tier = tmp_path / "run", tmp_path / "tier"
    with nothing_copied_to(tier):
        checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
        save_all(checkpoints, 1)
        for path in run.glob("step-*/*"):
            path.chmod(0o600)
    checkpoints.wait_drained()
    assert modes_below(tier) == {0o600}
    save_all(checkpoints, 2)
    checkpoints.wait_drained()
    for path in tier.glob("step-00000002/*"):
        path.chmod(0o600)
    save_all(checkpoints, 2)  # shared by the run, private in the tier
    checkpoints.wait_drained()
    assert modes_below(tier) == {0o600}


def empty(tier: Path) -> None:
    for each in tier.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def delete(tier: Path) -> None:
    copies = tl.Checkpointer(tier)
    copies.delete(1)
    copies.delete(2)


def remove(tier: Path) -> None:
    for step in (1, 2):
        shutil.rmtree(tier / f"step-{step:08}")


@pytest.mark.parametrize("change", [empty, delete, remove])
def test_steps_that_were_removed_from_a_tier_are_copied_again(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    run, tier = tmp_path / "run", tmp_path / "tier"
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 0, 1, 2)
    checkpoints.wait_drained()
    change(tier)
    checkpoints.wait_drained()
    assert steps_in(tier) == [0, 1, 2]
    assert checkpoints.latest() == 2
    assert tl.Checkpointer(run, tiers=[tl.Tier(tier)]).load()["step"] == 2


def test_what_a_cut_off_copy_has_left_is_removed_by_the_next_process_that_copies(tmp_path: Path) -> None:
    run, tier = tmp_path / "run", tmp_path / "tier"
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 0)
    checkpoints.wait_drained()
    left = tier / "step-00000099" / "shard-00000-of-00001-0123456789abcdef.safetensors"
    left.parent.mkdir()
    left.write_bytes(bytes(1000))
    later = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    later.load()
    save_all(later, 1)
    later.wait_drained()
    assert not left.parent.exists()
    assert steps_in(tier) == [0, 1]


def test_saves_after_the_first_do_not_look_at_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk may hang, and only copies may wait for that."""
    run, tier = tmp_path / "run", tmp_path / "tier"
    checkpoints = tl.Checkpointer(run, tiers=[tl.Tier(tier)])
    save_all(checkpoints, 0)
    checkpoints.wait_drained()

    def hang(directory: str) -> str:
        raise AssertionError(f"looked at {directory}")

    with nothing_copied_to(tier), monkeypatch.context() as patched:
        for name in ("identity_of", "origin_of", "origins_of", "last_number_in"):
            patched.setattr(module, name, hang)
        save_all(checkpoints, 1, 2)
    checkpoints.wait_drained()
    assert steps_in(tier) == [0, 1, 2]
