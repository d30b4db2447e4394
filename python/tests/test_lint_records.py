"""scripts/clean_records.py: a file is left out only while all that was read is as it was."""

import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "clean_records.py"


@pytest.fixture
def records_of() -> Callable[[Path, Path], Any]:
    """Make records in a folder as another process would, which has read nothing yet."""

    def make(folder: Path, root: Path) -> Any:
        spec = importlib.util.spec_from_file_location("trunkline_clean_records", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.CleanRecords(folder, root)

    return make


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source that includes a header, older than any run."""
    root = tmp_path / "tree"
    root.mkdir()
    for name in ("a.cpp", "a.h"):
        (root / name).write_text(name)
        os.utime(root / name, (1, 1))
    return root


def test_a_record_holds_until_a_file_changes(
    records_of: Callable[[Path, Path], Any], tree: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    records = records_of(folder, tree)
    assert not records.holds("check a.cpp")
    records.add("check a.cpp", [tree / "a.cpp", tree / "a.h"], time.time())
    assert records_of(folder, tree).holds("check a.cpp")
    assert not records_of(folder, tree).holds("check --more a.cpp")
    (tree / "a.h").write_text("changed")
    assert not records_of(folder, tree).holds("check a.cpp")
    (tree / "a.h").unlink()
    assert not records_of(folder, tree).holds("check a.cpp")


def test_a_file_that_changes_during_the_run_is_not_remembered(
    records_of: Callable[[Path, Path], Any], tree: Path, tmp_path: Path
) -> None:
    records = records_of(tmp_path / "records", tree)
    started = time.time()
    os.utime(tree / "a.h", (started + 1, started + 1))
    records.add("check a.cpp", [tree / "a.cpp", tree / "a.h"], started)
    assert not records.holds("check a.cpp")


def test_copies_of_the_tree_share_records(
    records_of: Callable[[Path, Path], Any], tree: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    folder = tmp_path / "records"
    records_of(folder, tree).add(f"check {tree}/a.cpp", [tree / "a.cpp"], time.time())
    assert records_of(folder, copy).holds(f"check {copy}/a.cpp")
    (copy / "a.cpp").write_text("changed")
    assert not records_of(folder, copy).holds(f"check {copy}/a.cpp")


def test_a_damaged_record_does_not_hold(
    records_of: Callable[[Path, Path], Any], tree: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    records_of(folder, tree).add("check a.cpp", [tree / "a.cpp"], time.time())
    (record,) = folder.iterdir()
    record.write_text(record.read_text()[:-1])
    assert not records_of(folder, tree).holds("check a.cpp")


def test_old_records_are_removed(records_of: Callable[[Path, Path], Any], tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    records = records_of(folder, tree)
    records.add("check a.cpp", [tree / "a.cpp"], time.time())
    records.add("check a.h", [tree / "a.h"], time.time())
    assert len(list(folder.iterdir())) == 2
    os.utime(next(folder.iterdir()), (1, 1))
    records.prune()
    assert len(list(folder.iterdir())) == 1
