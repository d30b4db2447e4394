"""What is logged of saves, loads and waits of checkpoints."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support_log import LONG, every_wait_is_long, in_threads, logged, when_logged
from torch.distributed import HashStore, PrefixStore

import trunkline as tl
from trunkline.checkpoint import lock_wait
from trunkline.checkpoint.ranks import group, meeting
from trunkline.checkpoint.ranks.group import Exchanges

__all__ = ["every_wait_is_long", "when_logged"]  # fixtures


def test_waits_for_ranks_say_for_whom_and_what(
    caplog: pytest.LogCaptureFixture,
    every_wait_is_long: None,
    when_logged: Callable[[str], threading.Event],
) -> None:
    store = HashStore()
    zero, one = (Exchanges(PrefixStore("test", store), rank, 2, LONG) for rank in range(2))
    waits = when_logged("waiting for rank 1, to call")
    reads = when_logged("it has to write its share")

    def first() -> None:
        with zero.begin("save(5)") as exchange:
            exchange.meet()
            assert exchange.read("written", 1) == {"shards": []}

    def second() -> None:
        assert waits.wait(LONG)
        with one.begin("save(5)") as exchange:
            exchange.meet()
            assert reads.wait(LONG)
            exchange.post("written", {"shards": []})

    with logged(caplog) as records:
        in_threads(first, second)
    assert "INFO checkpoint: waiting for rank 1, to call save(5) as rank 0 has" in records
    assert "INFO checkpoint: waiting for rank 1 in save(5) (it has to write its share)" in records
    assert any(record.startswith("INFO checkpoint: waited ") for record in records)


def test_ranks_are_warned_of_when_half_of_the_timeout_has_passed() -> None:
    assert meeting.waiting_for("save(5)", LONG)._warn_after == LONG / 2


def test_many_ranks_are_not_all_named() -> None:
    assert meeting.names_of([4]) == "rank 4"
    assert meeting.names_of([1, 2]) == "ranks 1, 2"
    assert meeting.names_of(list(range(12))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


def test_topics_have_words() -> None:
    assert {"placed", "written", "committed"} <= group._STEPS.keys()


def test_saves_and_loads_of_a_directory(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    with logged(caplog, "DEBUG") as records:
        checkpoints.save(3, {"a": torch.ones(5)}, block=True)
        checkpoints.load()
        checkpoints.load(3)
    text = "\n".join(records)
    assert f"DEBUG checkpoint: saving step 3 to {tmp_path / 'run'}: rank 0 writes" in text
    assert f"INFO checkpoint: {tmp_path / 'run'}: step 3 is saved" in text
    assert f"INFO checkpoint: {tmp_path / 'run'}: step 3 is loaded (the last one)" in records
    assert f"INFO checkpoint: {tmp_path / 'run'}: step 3 is loaded (as requested)" in records


def test_a_save_that_fails(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine, logged(caplog) as records:
        faults.fail("write", 0, 5)
        with pytest.raises(OSError, match="cannot write"):
            tl.save_async({"a": torch.ones(1 << 16)}, tmp_path / "a.pt", engine=engine).wait(LONG)
    assert any(f"saving {tmp_path / 'a.pt'} failed: " in each for each in records)


def test_a_wait_for_a_save(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, every_wait_is_long: None
) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine, logged(caplog) as records:
        faults.hold("write", 0, 1)
        handle = tl.save_async({"a": torch.ones(1 << 16)}, tmp_path / "a.pt", engine=engine)
        with pytest.raises(tl.Timeout):
            handle.wait(0.01)
        faults.release()
        handle.wait(LONG)
    assert any(f"INFO checkpoint: waiting for the save of {tmp_path / 'a.pt'} (" in each for each in records)


def test_a_save_that_waits_for_one_to_the_same_file(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    every_wait_is_long: None,
    when_logged: Callable[[str], threading.Event],
) -> None:
    waits = when_logged("waiting for an earlier save")
    faults = tl.Faults()
    path = tmp_path / "a.pt"
    with tl.Engine("threads", faults=faults) as engine, logged(caplog) as records:
        faults.hold("write", 0, 1)
        first = tl.save_async({"a": torch.ones(1 << 16)}, path, engine=engine)
        first.wait_staged(LONG)
        second = tl.save_async({"a": torch.zeros(1 << 16)}, path, engine=engine)
        assert waits.wait(LONG)
        faults.release()
        second.wait(LONG)
    assert f"INFO checkpoint: waiting for an earlier save of this process to {path}" in records


def test_a_directory_that_is_locked(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    every_wait_is_long: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lock_wait, "_LOCK_TIMEOUT_SECONDS", 0.05)
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    checkpoints.save(1, {}, block=True)
    with (tmp_path / "run" / "lock").open("r+b") as lock, logged(caplog) as records:
        last_byte = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 2**63 - 2, 1, 0)
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, last_byte)
        with pytest.raises(tl.Error, match="another process"):
            checkpoints.save(2, {}, block=True)
    assert any("waiting for the lock of a directory of checkpoints: " in each for each in records)
