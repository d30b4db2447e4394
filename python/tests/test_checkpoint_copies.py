"""Copies of a directory whose shards lie on volumes: read, and never a danger to the original."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support_program import PROGRAM

import trunkline as tl


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((100_000,), step)}


def opened(directory: Path, **options: object) -> tl.Checkpointer:
    return tl.Checkpointer(directory, process_group=False, **options)  # type: ignore[arg-type]


def run(action: str, directory: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(PROGRAM), "checkpoint", action, str(directory), "--json", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def original(tmp_path: Path) -> tl.Checkpointer:
    made = opened(tmp_path / "ck", volumes=[tmp_path / "v0", tmp_path / "v1"])
    for step in (1, 2):
        made.save(step, state_of(step), block=True)
    return made


def assert_whole(checkpointer: tl.Checkpointer, *steps: int) -> None:
    assert checkpointer.steps() == list(steps)
    for step in steps:
        assert torch.equal(checkpointer.load(step)["x"], state_of(step)["x"])


def test_a_copy_can_be_read_and_neither_saves_nor_removes(tmp_path: Path, original: tl.Checkpointer) -> None:
    shutil.copytree(tmp_path / "ck", tmp_path / "ckf")
    original.save(3, state_of(3), block=True)
    for options in ({}, {"volumes": [tmp_path / "v0", tmp_path / "v1"]}):
        with pytest.warns(RuntimeWarning, match="is a copy of"):
            copy = opened(tmp_path / "ckf", keep=1, **options)
        assert_whole(copy, 1, 2)
        copy.verify()
        for block in (True, False):
            with pytest.raises(tl.Unsupported) as caught:
                copy.save(4, state_of(4), block=block).wait()
            for part in (str(tmp_path / "ck"), str(tmp_path / "ckf"), "new directory"):
                assert part in str(caught.value)
    with pytest.raises(tl.Unsupported, match="is a copy of"):
        opened(tmp_path / "ckf", volumes=[tmp_path / "v2"])
    for option in ([], ["--dry-run"]):
        result = run("gc", tmp_path / "ckf", *option)
        assert result.returncode == 1
        assert json.loads(result.stdout)["error"]["kind"] == "unsupported"
        assert "is a copy of" in result.stderr
    assert_whole(original, 1, 2, 3)
    opened(tmp_path / "ck").save(4, state_of(4), block=True)
    assert_whole(original, 1, 2, 3, 4)


def test_the_copy_goes_on_in_a_new_directory(tmp_path: Path, original: tl.Checkpointer) -> None:
    shutil.copytree(tmp_path / "ck", tmp_path / "ckf")
    new = opened(tmp_path / "new", volumes=[tmp_path / "v0"])
    with pytest.warns(RuntimeWarning, match="is a copy of"):
        copy = opened(tmp_path / "ckf")
    new.save(2, copy.load(), block=True)
    assert_whole(new, 2)
    assert_whole(original, 1, 2)


@pytest.mark.parametrize("how", ["renamed", "copied"])
def test_a_directory_that_was_moved_goes_on(tmp_path: Path, original: tl.Checkpointer, how: str) -> None:
    if how == "renamed":
        (tmp_path / "ck").rename(tmp_path / "moved")
    else:
        shutil.copytree(tmp_path / "ck", tmp_path / "moved")
        shutil.rmtree(tmp_path / "ck")
        with pytest.warns(RuntimeWarning, match="may be a copy of"):
            moved = opened(tmp_path / "moved")
        with pytest.raises(tl.Unsupported, match="trunkline checkpoint adopt"):
            moved.save(3, state_of(3), block=True)
        result = run("adopt", tmp_path / "moved")
        assert (result.returncode, len(json.loads(result.stdout)["volumes"])) == (0, 2)
    moved = opened(tmp_path / "moved", keep=1)
    moved.load()
    moved.save(3, state_of(3), block=True)
    assert_whole(moved, 3)
    # What comes back to the old place is the copy now.
    shutil.copytree(tmp_path / "moved", tmp_path / "ck")
    with pytest.warns(RuntimeWarning), pytest.raises(tl.Unsupported, match="is a copy of"):
        opened(tmp_path / "ck").save(4, state_of(4), block=True)
    result = run("adopt", tmp_path / "ck")
    assert result.returncode == 1
    assert "is a copy of" in result.stderr
    assert_whole(moved, 3)


def test_a_copy_says_where_its_shards_went(tmp_path: Path, original: tl.Checkpointer) -> None:
    shutil.copytree(tmp_path / "ck", tmp_path / "ckf")
    for step in (3, 4, 5):
        original.save(step, state_of(step), block=True)
    with pytest.warns(RuntimeWarning, match="is a copy of"):
        copy = opened(tmp_path / "ckf")
    said = f"belong to {tmp_path / 'ck'}, where step 2 was removed"
    for read in (copy.load, copy.verify):
        with pytest.raises(tl.Corrupt, match=said):
            read()
    result = run("verify", tmp_path / "ckf")
    assert result.returncode == 1
    assert said in result.stdout


def test_a_backup_and_a_copy_in_place_of_the_original(tmp_path: Path, original: tl.Checkpointer) -> None:
    (tmp_path / "ck").rename(tmp_path / "ck.bak")
    shutil.copytree(tmp_path / "ck.bak", tmp_path / "ck")
    with pytest.warns(RuntimeWarning, match="a copy in its place"):
        copy = opened(tmp_path / "ck", keep=1)
    copy.load()
    with pytest.raises(tl.Unsupported, match="trunkline checkpoint adopt"):
        copy.save(3, state_of(3), block=True)
    assert_whole(opened(tmp_path / "ck.bak"), 1, 2)


def test_steps_that_were_renamed_or_copied_stay_whole(tmp_path: Path, original: tl.Checkpointer) -> None:
    run_directory = tmp_path / "ck"
    (run_directory / "step-00000001").rename(run_directory / "step-00000001.best")
    shutil.copytree(run_directory / "step-00000002", run_directory / "best")
    going_on = opened(run_directory, keep=1)
    going_on.load()
    for step in (3, 4):
        going_on.save(step, state_of(step), block=True)
    assert run("gc", run_directory).returncode == 0
    assert_whole(going_on, 4)
    (run_directory / "step-00000001.best").rename(run_directory / "step-00000001")
    (run_directory / "best").rename(run_directory / "step-00000002")
    assert_whole(opened(run_directory), 1, 2, 4)


def test_shards_of_a_step_that_was_moved_away_are_named(tmp_path: Path, original: tl.Checkpointer) -> None:
    (tmp_path / "ck" / "step-00000001").rename(tmp_path / "best")
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is missing.*gc --orphaned"):
        opened(tmp_path / "ck")
    result = run("gc", tmp_path / "ck")
    assert (result.returncode, json.loads(result.stdout)["removed"]) == (1, [])
    result = run("gc", tmp_path / "ck", "--orphaned")
    assert (result.returncode, json.loads(result.stdout)["problems"]) == (0, [])
    assert json.loads(result.stdout)["bytes"] > 100_000
    assert_whole(opened(tmp_path / "ck"), 2)


def test_a_copy_without_volumes_is_a_directory_of_its_own(tmp_path: Path) -> None:
    one = opened(tmp_path / "ck", keep=1)
    one.save(1, state_of(1), block=True)
    shutil.copytree(tmp_path / "ck", tmp_path / "ckf")
    other = opened(tmp_path / "ckf", keep=1)
    other.load()
    other.save(2, state_of(2), block=True)
    assert_whole(one, 1)
    assert_whole(other, 2)


def test_a_store_of_an_older_version_gets_its_record(tmp_path: Path, original: tl.Checkpointer) -> None:
    homes = sorted(tmp_path.glob("v*/*/home"))
    assert len(homes) == 2
    for home in homes:
        home.unlink()
    assert_whole(original, 1, 2)
    opened(tmp_path / "ck")
    assert sorted(tmp_path.glob("v*/*/home")) == [], "only a save says whose they are: it may be a copy"
    original.save(3, state_of(3), block=True)
    assert sorted(tmp_path.glob("v*/*/home")) == homes
