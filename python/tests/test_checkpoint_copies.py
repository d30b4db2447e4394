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
        result = subprocess.run(
            [str(PROGRAM), "checkpoint", "gc", str(tmp_path / "ckf"), "--json", *option],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 1
        assert json.loads(result.stdout)["error"]["kind"] == "unsupported"
        assert "is a copy of" in result.stderr
    assert_whole(original, 1, 2, 3)
    opened(tmp_path / "ck").save(4, state_of(4), block=True)
    assert_whole(original, 1, 2, 3, 4)


def test_the_copy_goes_on_in_a_new_directory(tmp_path: Path, original: tl.Checkpointer) -> None:
    shutil.copytree(tmp_path / "ck", tmp_path / "ckf")
    new = opened(tmp_path / "new", volumes=[tmp_path / "v0"])
    new.save(2, opened(tmp_path / "ckf").load(), block=True)
    assert_whole(new, 2)
    assert_whole(original, 1, 2)


@pytest.mark.parametrize("how", ["renamed", "copied"])
def test_a_directory_that_was_moved_goes_on(tmp_path: Path, original: tl.Checkpointer, how: str) -> None:
    if how == "renamed":
        (tmp_path / "ck").rename(tmp_path / "moved")
    else:
        shutil.copytree(tmp_path / "ck", tmp_path / "moved")
        shutil.rmtree(tmp_path / "ck")
    moved = opened(tmp_path / "moved", keep=1)
    moved.load()
    moved.save(3, state_of(3), block=True)
    assert_whole(moved, 3)
    # What comes back to the old place is the copy now.
    shutil.copytree(tmp_path / "moved", tmp_path / "ck")
    with pytest.raises(tl.Unsupported, match="is a copy of"):
        opened(tmp_path / "ck").save(4, state_of(4), block=True)
    assert_whole(moved, 3)


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
    assert sorted(tmp_path.glob("v*/*/home")) == homes
