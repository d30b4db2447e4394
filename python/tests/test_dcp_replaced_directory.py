"""A directory that is moved, or replaced by a copy, while trunkline.dcp saves into it."""

from __future__ import annotations

import errno
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from support_dcp import assert_same, blank, failure, load, nested, save  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402

from trunkline.dcp import _directory, _writer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")


class Planner(DefaultSavePlanner):
    """Calls a function once, before the first item is written."""

    def __init__(self, before_writing: Callable[[], None]) -> None:
        super().__init__()
        self._todo = [before_writing]

    def resolve_data(self, write_item: Any) -> Any:
        while self._todo:
            self._todo.pop()()
        return super().resolve_data(write_item)


def replace_by_copy(directory: Path) -> None:
    """As who moves a run to a larger disk by `cp -a`, and has not noticed that a job still saves into it."""
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy, symlinks=True)
    directory.rename(directory.with_name("moved"))
    directory.symlink_to(copy)


@pytest.mark.parametrize("volumes", [False, True])
@pytest.mark.parametrize("moment", ["while data is written", "before the commit"])
def test_a_directory_that_is_replaced_by_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, volumes: bool
) -> None:
    directory = tmp_path / "run"
    where = {"volumes": [tmp_path / "v0", tmp_path / "v1"]} if volumes else {}
    save(nested(1), directory, **where)
    planner = Planner(
        (lambda: replace_by_copy(directory)) if moment == "while data is written" else lambda: None
    )
    if moment == "before the commit":
        format_manifest = _writer.format_manifest

        def format_later(*args: Any) -> Any:
            monkeypatch.undo()
            replace_by_copy(directory)
            return format_manifest(*args)

        monkeypatch.setattr(_writer, "format_manifest", format_later)
    writer = tl.dcp.StorageWriter(directory, overwrite=True, **where)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(nested(2), storage_writer=writer, planner=planner, no_dist=True)
    error = failure(caught)
    assert isinstance(error, tl.Error)
    assert error.errno == errno.ESTALE
    assert f"{directory} was moved or replaced meanwhile" in str(error)
    for held in (directory, tmp_path / "moved"):
        assert_same(load(blank(nested(0)), held), nested(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* may not own files")  # it is a copy
        save(nested(3), directory, overwrite=True, **where)
    assert_same(load(blank(nested(0)), directory), nested(3))


def test_a_copy_is_not_cleaned_up_in_place_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is replaced by a backup once the new checkpoint is there, and the old one is to go."""
    directory, backup = tmp_path / "run", tmp_path / "backup"
    save(nested(1), directory)
    shutil.copytree(directory, backup)
    directory.rename(tmp_path / "moved")
    directory.symlink_to(tmp_path / "moved")
    remove = _directory.remove_leftovers

    def point_elsewhere(*args: Any) -> None:
        directory.unlink()
        directory.symlink_to(backup)
        remove(*args)

    monkeypatch.setattr(_directory, "remove_leftovers", point_elsewhere)
    with pytest.warns(RuntimeWarning, match="could not remove files of earlier checkpoints"):
        save(nested(2), directory)
    assert_same(load(blank(nested(0)), backup), nested(1))
    assert_same(load(blank(nested(0)), tmp_path / "moved"), nested(2))


def test_a_stock_checkpoint_that_is_made_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save has found none, and so has no leave to remove one."""
    directory = tmp_path / "run"
    save(nested(1), directory)
    write_layouts = _writer.write_layouts

    def save_with_torch(layouts: Any, **kwargs: Any) -> Any:
        if layouts[0].path.endswith(".manifest"):
            (directory / ".metadata").write_bytes(b"of torch")
        return write_layouts(layouts, **kwargs)

    monkeypatch.setattr(_writer, "write_layouts", save_with_torch)
    save(nested(2), directory)
    assert (directory / ".metadata").read_bytes() == b"of torch"


def test_a_rank_that_does_not_commit_keeps_nothing_open(tmp_path: Path) -> None:
    """Else its volumes cannot be unmounted after the save."""
    writer = tl.dcp.StorageWriter(tmp_path / "run", volumes=[tmp_path / "v0"])
    planner = DefaultSavePlanner()
    planner.set_up_planner({"x": torch.ones(3)}, is_coordinator=False)
    writer.set_up_storage_writer(False, rank=1)
    writer.write_data(writer.prepare_local_plan(planner.create_local_plan()), planner).wait()
    opened = {str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir()}
    assert not {str(tmp_path / "run"), str(tmp_path / "v0")} & opened
