"""What a save cannot remove once its checkpoint is durable is told, and does not make it fail."""

import errno
import io
import linecache
import re
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

import trunkline as tl

STATE = {"x": torch.arange(10)}


def show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Do as warnings.showwarning, which pytest replaces."""
    print(warnings.formatwarning(message, category, filename, lineno, line), file=file or sys.stderr)


class FailingStore:
    """A store whose saves cannot remove old checkpoints."""

    def __init__(self, store: Any, error: BaseException) -> None:
        self._store, self._error = store, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def begin(self, step: int, shards: list[int]) -> "FailingSave":
        return FailingSave(self._store.begin(step, shards), self._error)


class FailingSave:
    def __init__(self, save: Any, error: BaseException) -> None:
        self._save, self._error = save, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._save, name)

    def retain(self, keep: int | None, **_: Any) -> Any:
        raise self._error


def failing(directory: Path, error: BaseException) -> tl.Checkpointer:
    checkpointer = tl.Checkpointer(directory, process_group=False)
    checkpointer._context.store = FailingStore(checkpointer._context.store, error)  # type: ignore[assignment]
    return checkpointer


@pytest.mark.parametrize("block", [False, True])
def test_a_failed_retention_is_a_warning(tmp_path: Path, block: bool) -> None:
    checkpointer = failing(tmp_path, tl.Error(errno.EIO, "injected"))
    for step in (1, 2):  # the directory is not left locked
        with pytest.warns(RuntimeWarning, match=f"^while cleaning up {tmp_path}: .*injected"):
            checkpointer.save(step, STATE, block=block).wait()
    assert tl.Checkpointer(tmp_path, process_group=False).steps() == [1, 2]


def test_warnings_as_errors_fail_no_save(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = tl.Checkpointer(tmp_path, keep=1, process_group=False)
    first.save(1, STATE, block=True)
    second = tl.Checkpointer(tmp_path, keep=1, process_group=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (2, 3):
            second.save(step, STATE, block=True)  # step 1 stays, which is told once
    assert (
        capfd.readouterr().err.count(f"RuntimeWarning: {tmp_path}: keep=1 does not count or remove step 1")
        == 1
    )
    assert second.steps() == [1, 3]


def damaged_home(tmp_path: Path) -> Path:
    """A directory of checkpoints that is whole, and a volume whose record of ownership is damaged."""
    directory = tmp_path / "run"
    tl.Checkpointer(directory, volumes=[tmp_path / "v"], process_group=False).save(1, STATE, block=True)
    (home,) = tmp_path.glob("v/*/home")
    data = bytearray(home.read_bytes())
    data[len(data) // 2] ^= 1
    home.write_bytes(data)
    return directory


def test_opening_warns_of_a_failed_clean_up(tmp_path: Path) -> None:
    directory = damaged_home(tmp_path)
    with pytest.warns(RuntimeWarning, match=f"^while cleaning up {directory}: .*home"):
        opened = tl.Checkpointer(directory, process_group=False)
    assert torch.equal(opened.load()["x"], STATE["x"])
    opened.verify()
    with pytest.raises(tl.Error, match="home"):  # it does not own the volume for sure
        opened.save(2, STATE, block=True)
    assert opened.steps() == [1]


def test_warnings_as_errors_fail_no_opening(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = damaged_home(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = tl.Checkpointer(directory, process_group=False)
    assert f"RuntimeWarning: while cleaning up {directory}: " in capfd.readouterr().err
    assert torch.equal(opened.load()["x"], STATE["x"])


@pytest.mark.parametrize("obstacle", ["closed", "none", "showwarning", "both"])
def test_warnings_that_cannot_be_shown_fail_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], obstacle: str
) -> None:
    tl.Checkpointer(tmp_path, keep=1, process_group=False).save(1, STATE, block=True)
    checkpointer = tl.Checkpointer(tmp_path, keep=1, process_group=False)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    closed = io.StringIO()
    closed.close()
    with warnings.catch_warnings():  # not those of pytest, which shows none
        warnings.simplefilter("error" if obstacle == "none" else "always")
        monkeypatch.setattr(warnings, "showwarning", fail if obstacle in ("showwarning", "both") else show)
        if obstacle in ("closed", "both"):
            monkeypatch.setattr(sys, "stderr", closed)
        if obstacle == "none":
            monkeypatch.setattr(sys, "stderr", None)
        checkpointer.save(2, STATE, block=True)  # step 1 stays, which is told
        monkeypatch.undo()
    assert checkpointer.steps() == [1, 2]
    assert checkpointer.latest() == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert (f"RuntimeWarning: {tmp_path}: keep=1 does not count or remove step 1" in err) == (
        obstacle == "showwarning"
    )


def test_an_interrupt_ends_the_save_and_unlocks_the_directory(tmp_path: Path) -> None:
    checkpointer = failing(tmp_path, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(1, STATE, block=True)
    other = tl.Checkpointer(tmp_path, process_group=False)
    assert torch.equal(other.load()["x"], STATE["x"])
    other.save(2, STATE, block=True)


def damaged(directory: Path) -> None:
    """Make a directory of checkpoints whose step 1 has a manifest with a flipped bit."""
    tl.Checkpointer(directory, process_group=False).save(1, STATE, block=True)
    (manifest,) = directory.glob("step-00000001/manifest-*")
    data = bytearray(manifest.read_bytes())
    data[-20] ^= 1
    manifest.write_bytes(data)


@pytest.mark.parametrize("block", [False, True])
def test_warnings_point_at_the_line_that_calls(tmp_path: Path, block: bool) -> None:
    damaged(tmp_path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        checkpointer = tl.Checkpointer(tmp_path, process_group=False)
        handle = checkpointer.save(2, STATE, block=block)
        handle.wait()
    for each, call in zip(found, ("tl.Checkpointer(", "checkpointer.save("), strict=True):
        assert each.category is RuntimeWarning
        assert each.filename == __file__
        assert call in linecache.getline(each.filename, each.lineno)
        said = str(each.message)
        assert said.startswith(f"step 1 of {tmp_path} is damaged: manifest ")
        assert said.endswith("; delete(1) removes it")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for step in (3, 4, 5):
            checkpointer.save(step, STATE, block=block).wait()
    assert len(shown) == 1
    checkpointer.delete(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tl.Checkpointer(tmp_path, process_group=False)


def test_a_manifest_of_a_newer_version_is_not_called_damaged(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path, process_group=False).save(1, STATE, block=True)
    (manifest,) = tmp_path.glob("step-00000001/manifest-*")
    head, newline, rest = manifest.read_bytes().partition(b"\n")
    manifest.write_bytes(
        re.sub(rb" v?1 ", lambda found: found[0].replace(b"1", b"99"), head, count=1) + newline + rest
    )
    with pytest.warns(RuntimeWarning, match=f"^step 1 of {tmp_path} cannot be read: ") as opening:
        tl.Checkpointer(tmp_path, process_group=False)
    assert "delete(" not in str(opening[0].message)


def test_the_warning_of_a_damaged_head_says_how_to_remove_it(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path, process_group=False).save(1, STATE, block=True)
    (manifest,) = tmp_path.glob("step-00000001/manifest-*")
    manifest.write_bytes(b"X" + manifest.read_bytes()[1:])
    with pytest.warns(RuntimeWarning, match=r"cannot be read: .*; delete\(1\) removes it$"):
        checkpointer = tl.Checkpointer(tmp_path, process_group=False)
    checkpointer.delete(1)
    assert checkpointer.steps() == []
