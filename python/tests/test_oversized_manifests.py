"""Manifests that no memory could hold (sparse files): typed errors, before they are read."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import trunkline as tl
from trunkline._streaming import manifest as pack_manifest
from trunkline.dcp._manifest import read_manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
HUGE = 1 << 43  # more than any address space here holds


def make_sparse(path: Path, beginning: bytes) -> None:
    with path.open("wb") as file:
        file.write(beginning)
        try:
            file.truncate(HUGE)
        except OSError as error:
            pytest.skip(f"no sparse file of {HUGE} bytes on this filesystem: {error}")


def first_line(kind: str) -> bytes:
    """Return a first line that says the size of the file."""
    begin = b"trunkline %s 1 crc32c=00000000 bytes=" % kind.encode()
    if kind == "dcp":
        begin = begin.replace(b"trunkline dcp", b"trunkline-dcp")
    digits = len(str(HUGE))
    return begin + b"%d\n" % (HUGE - len(begin) - digits - 1)


@pytest.mark.parametrize("beginning", [b"", first_line("checkpoint")], ids=["zeros", "honest"])
def test_of_a_step(tmp_path: Path, beginning: bytes) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1)
    checkpoints.save(1, {"x": torch.ones(3)}, block=True)
    [manifest] = (tmp_path / "run").glob("step-*/manifest-*")
    make_sparse(manifest, beginning)
    for use in (checkpoints.load, lambda: checkpoints.load(1, into={"x": torch.ones(3)}), checkpoints.verify):
        with pytest.raises(tl.Format, match="is not the manifest of a checkpoint") as caught:
            use()
        assert caught.value.filename == str(manifest)
    with pytest.warns(RuntimeWarning, match="is not the manifest of a checkpoint"):
        checkpoints.save(2, {"x": torch.ones(3)}, block=True)
    assert checkpoints.steps() == [1, 2]  # what cannot be read is never removed
    assert torch.equal(checkpoints.load()["x"], torch.ones(3))


@pytest.mark.parametrize("beginning", [b"", first_line("dcp")], ids=["zeros", "honest"])
def test_of_torch_distributed_checkpoint(tmp_path: Path, beginning: bytes) -> None:
    torch_dcp.save({"x": torch.ones(3)}, storage_writer=tl.dcp.StorageWriter(tmp_path), no_dist=True)
    [manifest] = tmp_path.glob("*.manifest")
    make_sparse(manifest, beginning)
    with pytest.raises(tl.Format) as caught:
        tl.dcp.StorageReader(tmp_path).read_metadata()
    assert caught.value.filename == str(manifest)


def test_one_that_is_no_file(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "dcp.manifest")
    with pytest.raises(tl.Format, match="not a regular file"):
        read_manifest(tmp_path / "dcp.manifest")


def test_of_a_pack(tmp_path: Path) -> None:
    make_sparse(tmp_path / pack_manifest.NAME, b"")
    with pytest.raises(tl.Format, match="bytes"):
        pack_manifest.read(tmp_path)
