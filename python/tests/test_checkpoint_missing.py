"""What is missing of a checkpoint that was committed is damage, never "no checkpoint yet"."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import trunkline as tl


def opened(directory: Path) -> tl.Checkpointer:
    return tl.Checkpointer(directory, process_group=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Steps 1, 2 and 3, with shards on two volumes."""
    made = tl.Checkpointer(tmp_path / "run", volumes=[tmp_path / "v0", tmp_path / "v1"], process_group=False)
    for step in (1, 2, 3):
        made.save(step, {"x": torch.full((900_000,), step), "y": torch.arange(5)}, block=True)
    return tmp_path / "run"


def a_shard(directory: Path) -> Path:
    return next(directory.parent.glob("v1/*/step-00000003/shard-*"))


def lose_shard(directory: Path) -> Path:
    shard = a_shard(directory)
    shard.unlink()
    return shard


def lose_step_directory(directory: Path) -> Path:
    shard = a_shard(directory)
    shutil.rmtree(shard.parent)
    return shard


def unmount(directory: Path) -> Path:
    shard = a_shard(directory)
    (directory.parent / "v1").rename(directory.parent / "elsewhere")
    (directory.parent / "v1").mkdir()
    return shard


def lose_mount_point(directory: Path) -> Path:
    shard = a_shard(directory)
    shutil.rmtree(directory.parent / "v1")
    (directory.parent / "v1").write_text("no directory")
    return shard


@pytest.mark.parametrize("lose", [lose_shard, lose_step_directory, unmount, lose_mount_point])
@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.filterwarnings("ignore:while cleaning up")
def test_a_missing_shard_is_damage(directory: Path, lose: object, step: int | None) -> None:
    shard = lose(directory)  # type: ignore[operator]
    checkpointer = opened(directory)
    into = {"x": torch.zeros(900_000, dtype=torch.int64), "y": torch.arange(5)}
    for read in (
        lambda: checkpointer.load(step),
        lambda: checkpointer.load(step, verify=False),
        lambda: checkpointer.load(step, into=into),
        lambda: checkpointer.verify(step),
    ):
        with pytest.raises(tl.Corrupt) as caught:
            read()
        assert not isinstance(caught.value, FileNotFoundError)
        assert caught.value.file == str(shard)
        assert caught.value.tensor in ("x", "y")
        message = str(caught.value)
        for part in (
            "step 3",
            str(shard),
            "mount its disk",
            "steps 1, 2 of this directory, not verified here",
        ):
            assert part in message
    assert checkpointer.steps() == [1, 2, 3]
    if lose in (lose_shard, lose_step_directory):
        assert torch.equal(checkpointer.load(2)["x"], torch.full((900_000,), 2))


def test_the_only_step_lacks_a_shard(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path)
    checkpointer.save(1, {"x": torch.ones(3)}, block=True)
    next(tmp_path.glob("step-*/shard-*")).unlink()
    with pytest.raises(tl.Corrupt, match="there is no other step"):
        checkpointer.load()


def test_a_manifest_behind_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path / "run")
    checkpointer.save(1, {"x": torch.ones(3)}, block=True)
    (manifest,) = tmp_path.glob("run/step-*/manifest-*")
    manifest.rename(tmp_path / "manifest")
    manifest.symlink_to(tmp_path / "manifest")
    checkpointer.load()
    (tmp_path / "manifest").unlink()
    for read in (checkpointer.load, checkpointer.verify, lambda: checkpointer.load(1)):
        with pytest.raises(tl.Corrupt, match="mount"):
            read()


def test_a_step_that_was_never_saved(tmp_path: Path) -> None:
    checkpointer = tl.Checkpointer(tmp_path, keep=None, process_group=False)
    for read in (checkpointer.load, checkpointer.verify):
        with pytest.raises(FileNotFoundError, match="there are no steps in it"):
            read(77)
    for step in range(5, 12):
        checkpointer.save(step, {"x": torch.ones(3)}, block=True)
    for read in (checkpointer.load, checkpointer.verify):
        with pytest.raises(FileNotFoundError) as caught:
            read(77)
        assert str(caught.value) == (
            f"{tmp_path} has no checkpoint of step 77; it has steps 5, 6, 7, ..., 9, 10, 11"
        )
        assert caught.value.filename == os.fspath(tmp_path)


@pytest.mark.parametrize("volumes", ["v0", b"v0", bytearray(b"v0"), Path("v0")])
def test_one_volume_alone_is_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, volumes: object
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="volumes: must be a list of directories"):
        tl.Checkpointer("ck", volumes=volumes, process_group=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="directories: must be a list of paths"):
        tl.Volume(volumes)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="volumes: must be a list of paths"):
        tl._core.CheckpointStore("ck", volumes)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_deleted_and_saved_again_meanwhile_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, checkpoints = opened(tmp_path / "run"), opened(tmp_path / "run")
    other.save(1, {"x": torch.zeros(1000)}, block=True)
    [reader] = checkpoints._readers
    read = reader.load

    def read_late(*arguments: object) -> object:
        monkeypatch.undo()
        other.delete(1)
        other.save(1, {"x": torch.ones(1000)}, block=True)  # as the same commit
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "load", read_late)
    assert torch.equal(checkpoints.load(1)["x"], torch.ones(1000))


def test_a_step_that_is_replaced_before_it_is_verified_first_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, checkpoints = opened(tmp_path / "run"), opened(tmp_path / "run")
    other.save(1, {"x": torch.zeros(1000)}, block=True)
    [reader] = checkpoints._readers
    verify = reader.verify

    def verify_late(step: int) -> None:
        monkeypatch.undo()
        (shard,) = (tmp_path / "run").glob("step-00000001/shard-*")
        before = bytearray(shard.read_bytes())
        other.save(1, {"x": torch.ones(1000)}, block=True)
        before[-1] ^= 1
        shard.write_bytes(before)  # as if it was damaged, and not removed yet
        verify(step)

    monkeypatch.setattr(reader, "verify", verify_late)
    into = {"x": torch.full((1000,), 7.0)}
    checkpoints.load(1, into=into, verify="first")
    assert torch.equal(into["x"], torch.ones(1000))


def test_a_directory_whose_run_was_set_aside_says_where(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path, process_group=False).save(1, {"x": torch.ones(3)}, block=True)
    checkpointer = tl.Checkpointer(tmp_path, fresh=True, process_group=False)
    checkpointer.save(1, {"x": torch.ones(3)}, block=True)
    checkpointer.delete(1)
    (aside,) = tmp_path.glob("aside-*")
    with pytest.raises(FileNotFoundError, match=f"was set aside in {aside}; open that directory"):
        checkpointer.load()


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_volume_that_is_a_file(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(NotADirectoryError, match=f"volumes: {tmp_path / path} is not a directory"):
        tl.Checkpointer(tmp_path / "run", volumes=[tmp_path / path], process_group=False)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    os.truncate(path, 4096)


def empty(path: Path) -> None:
    os.truncate(path, 0)


DAMAGE = {
    "a flipped bit": ("shard-*", flip_a_bit),
    "a truncated shard": ("shard-*", cut_off),
    "a missing shard": ("shard-*", Path.unlink),
    "a flipped bit of the manifest": ("manifest-*", flip_a_bit),
    "an empty manifest": ("manifest-*", empty),
    "another file in place of the manifest": ("manifest-*", lambda path: path.write_text("{}")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_names_the_other_steps(tmp_path: Path, damage: str) -> None:
    checkpointer = opened(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, {"x": torch.full((9000,), step)}, block=True)
    pattern, do = DAMAGE[damage]
    do(next((tmp_path / "step-00000003").glob(pattern)))
    into = {"x": torch.zeros(9000, dtype=torch.int64)}
    reads = (
        lambda: checkpointer.load(),
        lambda: checkpointer.load(3),
        lambda: checkpointer.load(3, into=into),
        lambda: checkpointer.load(3, into=into, verify="first"),
        lambda: checkpointer.verify(3),
    )
    for read in reads:
        with pytest.raises((tl.Corrupt, tl.Format)) as caught:
            read()
        assert str(caught.value).count("; steps 1, 2 of this directory, not verified here") == 1
        assert "earlier step" not in str(caught.value)
    for step in (1, 2):
        checkpointer.delete(step)
    for read in reads:
        with pytest.raises((tl.Corrupt, tl.Format)) as caught:
            read()
        assert str(caught.value).count("; there is no other step") == 1
