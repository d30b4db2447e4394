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
