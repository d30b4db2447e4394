"""Directories of a Checkpointer and of torch.distributed.checkpoint: each is refused to the other."""

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import trunkline as tl

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
STATE = {"x": torch.ones(3)}


@pytest.mark.parametrize("name", ["run", "run/step-00000001"])
@pytest.mark.parametrize("overwrite", [None, True])
def test_a_writer_leaves_the_directory_of_a_checkpointer_alone(
    tmp_path: Path, name: str, overwrite: bool | None
) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run")
    checkpoints.save(1, STATE, block=True)
    before = sorted(tmp_path.rglob("*"))
    writer = tl.dcp.StorageWriter(tmp_path / name, overwrite=overwrite)
    with pytest.raises(torch_dcp.CheckpointException) as caught:  # type: ignore[attr-defined]
        torch_dcp.save(STATE, storage_writer=writer, no_dist=True)
    [error] = [error for error, _ in caught.value.failures.values()]
    assert isinstance(error, tl.Error)
    assert error.errno == errno.ENOTEMPTY
    assert f"{tmp_path / name}: it belongs to a trunkline.Checkpointer" in str(error)
    assert sorted(tmp_path.rglob("*")) == before
    assert torch.equal(checkpoints.load()["x"], STATE["x"])
    with pytest.raises(FileNotFoundError, match=r"belongs to a trunkline.Checkpointer .* load it with"):
        tl.dcp.StorageReader(tmp_path / name).read_metadata()


def test_a_checkpointer_leaves_the_directory_of_a_writer_alone(tmp_path: Path) -> None:
    torch_dcp.save(STATE, storage_writer=tl.dcp.StorageWriter(tmp_path), no_dist=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(tl.Error, match=r"is not a directory of checkpoints.*dcp\.manifest") as caught:
        tl.Checkpointer(tmp_path)
    assert caught.value.errno == errno.ENOTEMPTY
    assert sorted(tmp_path.rglob("*")) == before


def test_a_writer_leaves_a_step_alone_that_is_being_saved(tmp_path: Path) -> None:
    """It has shards before it has a manifest."""
    tl.Checkpointer(tmp_path / "run", process_group=False).save(1, STATE, block=True)
    step = tmp_path / "run" / "step-00000001"
    for manifest in step.glob("manifest-*"):
        manifest.unlink()
    [shard] = step.iterdir()
    with pytest.raises(torch_dcp.CheckpointException) as caught:  # type: ignore[attr-defined]
        torch_dcp.save(STATE, storage_writer=tl.dcp.StorageWriter(step), no_dist=True)
    [error] = [error for error, _ in caught.value.failures.values()]
    assert f"{step}: it belongs to a trunkline.Checkpointer (it contains {shard.name})" in str(error)
    assert list(step.iterdir()) == [shard]


def test_a_writer_takes_no_name_of_a_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tl.Checkpointer(run, process_group=False).save(1, STATE, block=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(torch_dcp.CheckpointException) as caught:  # type: ignore[attr-defined]
        torch_dcp.save(STATE, storage_writer=tl.dcp.StorageWriter(run / "step-00000007"), no_dist=True)
    [error] = [error for error, _ in caught.value.failures.values()]
    assert isinstance(error, tl.Error)
    assert error.errno == errno.ENOTEMPTY
    assert f"name of a step of the trunkline.Checkpointer that {run} belongs to" in str(error)
    assert sorted(tmp_path.rglob("*")) == before
    torch_dcp.save(STATE, storage_writer=tl.dcp.StorageWriter(run / "sharded"), no_dist=True)
    torch_dcp.save(STATE, storage_writer=tl.dcp.StorageWriter(tmp_path / "step-00000007"), no_dist=True)


@pytest.mark.parametrize(
    ("name", "is_of_dcp"),
    [
        ("dcp.manifest", True),
        ("dcp-rank00003.manifest", True),
        ("dcp-rank100000.manifest", True),
        (f"rank00000-0-{'0' * 32}.shard", True),
        (".metadata", True),
        ("__3.metadata", True),
        ("__0_12.distcp", True),
        ("dcp-notes.manifest", False),
        ("rank0.shard", False),
        ("notes.distcp", False),
    ],
)
def test_load_says_which_folders_are_of_torch_distributed_checkpoint(
    tmp_path: Path, name: str, is_of_dcp: bool
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match="is a directory") as caught:
        tl.load(tmp_path)
    assert ("is a directory of torch.distributed.checkpoint" in str(caught.value)) == is_of_dcp


def test_load_knows_what_writers_save(tmp_path: Path) -> None:
    """Whichever of their files is left."""
    for number, make in enumerate((tl.dcp.StorageWriter, torch_dcp.FileSystemWriter)):
        saved = tmp_path / str(number)
        torch_dcp.save(STATE, storage_writer=make(saved), no_dist=True)
        for file in saved.iterdir():
            folder = tmp_path / f"{number}-{file.name}"
            folder.mkdir()
            file.rename(folder / file.name)
            with pytest.raises(FileNotFoundError, match=r"directory of torch\.distributed\.checkpoint"):
                tl.load(folder)


def test_a_file_in_place_of_the_directory_is_a_typed_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, message in (
        (file, f"cannot save to {file}: it is not a directory; name one"),
        (file / "run", f"cannot create the directory {file / 'run'}: not a directory (ENOTDIR)"),
    ):
        with pytest.raises(torch_dcp.CheckpointException) as caught:  # type: ignore[attr-defined]
            torch_dcp.save(STATE, storage_writer=tl.dcp.StorageWriter(place), no_dist=True)
        [error] = [error for error, _ in caught.value.failures.values()]
        assert isinstance(error, tl.NotADirectoryError)
        assert str(error) == message
    with pytest.raises(tl.NotADirectoryError, match="/file is not a directory; name the directory of a"):
        tl.dcp.StorageReader(file).read_metadata()


def test_a_writer_leaves_the_directory_of_a_run_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tl.dcp.Checkpointer(run).save(1, STATE)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(torch_dcp.CheckpointException) as caught:  # type: ignore[attr-defined]
        torch_dcp.save(STATE, storage_writer=tl.dcp.StorageWriter(run), no_dist=True)
    [error] = [error for error, _ in caught.value.failures.values()]
    assert isinstance(error, tl.Error)
    assert error.errno == errno.ENOTEMPTY
    assert f"{run}: it holds the steps of a run" in str(error)
    assert f"use a separate directory, for example {run}-single" in str(error)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_says_what_to_do_about_a_single_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    torch_dcp.save(STATE, storage_writer=tl.dcp.StorageWriter(run), no_dist=True)
    with pytest.raises(tl.Error, match=r"\(dcp.manifest\); name another directory"):
        tl.dcp.Checkpointer(run)
    step = run / "step-00000001"  # as an earlier version allowed it
    torch_dcp.save(STATE, storage_writer=tl.dcp.StorageWriter(step), no_dist=True)
    with pytest.raises(tl.Error, match=r"beside its steps, .*; move that file and the rank\*.shard files"):
        tl.dcp.Checkpointer(run)
    with pytest.raises(tl.Error, match=f"open the directory above it, {run}, or"):
        tl.dcp.Checkpointer(step)


def test_a_run_leaves_a_checkpoint_of_torch_in_the_folder_of_a_step(tmp_path: Path) -> None:
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run")
    checkpoints.save(1, STATE)
    step = tmp_path / "run/step-00000001"
    torch_dcp.save(STATE, checkpoint_id=str(step), no_dist=True)
    before = {path: path.stat().st_mtime_ns for path in step.iterdir()}
    for save in (checkpoints.save, checkpoints.async_save):
        with pytest.raises(
            FileExistsError, match=rf"{step} contains .*FileSystemWriter \(.metadata\).* move"
        ):
            save(1, STATE)
    assert {path: path.stat().st_mtime_ns for path in step.iterdir()} == before
    checkpoints.save(2, STATE)


def test_readers_of_one_checkpoint_name_a_step_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = tl.dcp.Checkpointer(run)
    for step in (1, 2):
        checkpoints.save(step, STATE)
    with pytest.raises(FileNotFoundError, match=f"steps of a run, .* such as {run}/step-00000002"):
        tl.dcp.to_torch_save(run, tmp_path / "whole.pt")
    for act in (tl.load, tl.open_tensors):
        with pytest.raises(
            FileNotFoundError, match=rf"a run of trunkline.dcp; .*'{run}/step-00000002', FILE"
        ):
            act(run)
