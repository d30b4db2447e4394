"""What is logged of saves and loads of torch.distributed.checkpoint."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from support_dcp import blank, nested
from support_log import every_wait_is_long, in_threads, logged
from torch.distributed.checkpoint.api import CheckpointException

import trunkline as tl
from trunkline._flock import DirectoryLock
from trunkline.dcp import _directory, _saves

__all__ = ["every_wait_is_long"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")


def test_distributed_saves_and_loads(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    state, path = nested(1), tmp_path / "step"
    with logged(caplog) as records:
        dcp.save(state, storage_writer=tl.dcp.StorageWriter(path))
        dcp.load(blank(state), storage_reader=tl.dcp.StorageReader(path))
        dcp.save(state, storage_writer=tl.dcp.StorageWriter(path, overwrite=True))
    text = "\n".join(records)
    for record in (
        f"INFO checkpoint: {path}: rank 0 saves ",
        f"INFO checkpoint: {path}: rank 0 wrote ",
        f"INFO checkpoint: {path}: saved: ",
        f"INFO checkpoint: {path}: rank 0 loads the checkpoint of ",
        f"INFO checkpoint: {path}: rank 0 read ",
        f"INFO checkpoint: removed {path}",
    ):
        assert record in text


def test_a_distributed_save_or_load_that_is_refused(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    state, path = nested(1), tmp_path / "step"
    with logged(caplog) as records:
        with pytest.raises(CheckpointException):
            dcp.load(blank(state), storage_reader=tl.dcp.StorageReader(path))
        dcp.save(state, storage_writer=tl.dcp.StorageWriter(path))
        with pytest.raises(CheckpointException):
            dcp.save(state, storage_writer=tl.dcp.StorageWriter(path, overwrite=False))
    assert any(each.startswith(f"INFO checkpoint: {path}: not loaded: ") for each in records)
    assert any(each.startswith(f"INFO checkpoint: {path}: not saved: ") for each in records)


def test_a_distributed_save_that_waits_for_a_lock(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    every_wait_is_long: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_directory, "LOCK_SECONDS", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with logged(caplog) as records, pytest.raises(CheckpointException):
        dcp.save(nested(1), storage_writer=tl.dcp.StorageWriter(tmp_path))
    os.close(descriptor)
    assert any("for another process that has locked" in each for each in records)


def test_a_distributed_save_without_locks(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(lock: object) -> bool:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(DirectoryLock, "try_lock", unsupported)
    with logged(caplog) as records:
        dcp.save(nested(1), storage_writer=tl.dcp.StorageWriter(tmp_path / "step"))
    assert any("committing without a lock: the filesystem supports none" in each for each in records)


def test_a_commit_that_waits_for_another_of_this_process(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every_wait_is_long: None,
) -> None:
    monkeypatch.setattr(_saves, "LOCK_SECONDS", 0.05)
    lock = threading.Lock()

    def wait() -> None:
        with pytest.raises(tl.Error, match="another save of this process"):
            _saves._obtainable(lock, tmp_path)

    with logged(caplog) as records, lock:
        in_threads(wait)
    assert any(f"another save of this process into {tmp_path}" in each for each in records)
