"""Who may read the files of a checkpoint that takes the place of another one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support_users import open_directory, run_without_privileges

import trunkline as tl

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def files_of(*directories: Path) -> list[Path]:
    return sorted(path for directory in directories for path in directory.rglob("*") if path.is_file())


def make_private(paths: list[Path], mode: int = 0o600) -> None:
    for path in paths:
        path.chmod(mode)


def modes_of(paths: list[Path]) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in paths}


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((50_000,), value), "b": torch.full((3,), value)}


@pytest.mark.parametrize("volumes", [False, True])
def test_a_step_that_is_saved_again_is_not_more_readable_than_before(tmp_path: Path, volumes: bool) -> None:
    places = [tmp_path / "disk0", tmp_path / "disk1"] if volumes else None
    run = tmp_path / "run"
    checkpoints = tl.Checkpointer(run, process_group=False, volumes=places)
    checkpoints.save(1, state(1), block=True)
    old = [path for path in files_of(tmp_path) if "step-" in str(path)]
    assert modes_of(old) == {0o644}
    make_private(old)
    checkpoints.save(1, state(2), block=True)
    new = [path for path in files_of(tmp_path) if "step-" in str(path) and path.name != "moved-shards"]
    assert not set(new) & set(old)
    assert modes_of(new) == {0o600}
    assert torch.equal(checkpoints.load(1)["a"], state(2)["a"])
    # Other steps are new files, as of any program.
    checkpoints.save(2, state(3), block=True)
    assert modes_of(files_of(run / "step-00000002")) == {0o644}


def test_shards_are_private_if_only_those_before_them_were(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path, process_group=False)
    checkpoints.save(1, state(1), block=True)
    make_private(list(tmp_path.glob("step-*/shard-*")), 0o640)
    checkpoints.save(1, state(2), block=True)
    assert modes_of(list(tmp_path.glob("step-*/shard-*"))) == {0o640}
    assert modes_of(list(tmp_path.glob("step-*/manifest-*"))) == {0o644}


@pytest.mark.parametrize("volumes", [False, True])
@pytest.mark.parametrize("private", ["*", "*.shard"])
def test_a_dcp_checkpoint_is_not_more_readable_than_the_one_it_replaces(
    tmp_path: Path, volumes: bool, private: str
) -> None:
    disks = [tmp_path / "disk0", tmp_path / "disk1"] if volumes else None
    path = tmp_path / "ckpt"
    for value in (1, 2):
        writer = tl.dcp.StorageWriter(path, volumes=disks, overwrite=True)
        dcp.save(state(value), storage_writer=writer)
        if value == 1:
            make_private([each for each in path.glob(private) if each.is_file()])
    assert modes_of(list(path.glob("*.shard"))) == {0o600}
    assert modes_of([path / "dcp.manifest"]) == ({0o600} if private == "*" else {0o644})
    loaded = {"a": torch.zeros(50_000), "b": torch.zeros(3)}
    dcp.load(loaded, storage_reader=tl.dcp.StorageReader(path))
    assert torch.equal(loaded["a"], state(2)["a"])


def test_a_dcp_checkpoint_is_not_more_readable_than_the_one_of_torch_that_it_replaces(tmp_path: Path) -> None:
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(tmp_path))
    make_private(files_of(tmp_path))
    dcp.save(state(2), storage_writer=tl.dcp.StorageWriter(tmp_path, overwrite=True))
    assert modes_of(files_of(tmp_path)) == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_owner_and_group_are_those_of_the_files_before(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    for value in (1, 2):
        checkpoints.save(1, state(value), block=True)
        dcp.save(state(value), storage_writer=tl.dcp.StorageWriter(tmp_path / "dcp", overwrite=True))
        for path in files_of(tmp_path / "run" / "step-00000001", tmp_path / "dcp") if value == 1 else []:
            os.chown(path, 1234, 4321)
            path.chmod(0o640)
    for path in files_of(tmp_path / "run" / "step-00000001", tmp_path / "dcp"):
        found = path.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 4321, 0o640)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_directory_that_may_be_written_and_not_read(name: str, durable: bool) -> None:
    with open_directory() as directory:
        inbox = directory / "inbox"
        inbox.mkdir()
        run_without_privileges(
            f"""
            inbox = sys.argv[1]
            os.chmod(inbox, 0o300)
            for value in (1, 2):
                tl.save({{"a": torch.full((9,), value)}}, f"{{inbox}}/{name}", durable={durable})
                assert torch.equal(tl.load(f"{{inbox}}/{name}")["a"], torch.full((9,), value))
            os.chmod(inbox, 0o700)
            assert os.listdir(inbox) == ["{name}"]
            """,
            inbox,
            directory=inbox,
        )
