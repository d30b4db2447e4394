"""scripts/fuzz.py with executables that only pretend to fuzz: no crash is dropped, and no corpus is lost."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fuzz.py"
COPY = 'for each in "$2"/*; do cp "$each" "$1"; done'  # the corpus, into the folder that is merged into


@pytest.fixture
def fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with its folders in tmp_path."""
    spec = importlib.util.spec_from_file_location("trunkline_fuzz_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name in ("CORPUS", "RESULTS", "KEPT", "SEEDS"):
        monkeypatch.setattr(module, name, tmp_path / name.lower())
    return module


@pytest.fixture
def pretend(fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make every target a shell script, which gets the folders as $1 and so on."""

    def set_to(body: str) -> None:
        program = tmp_path / "program"
        program.write_text(f'#!/bin/sh\nwhile case "$1" in -*) ;; *) false ;; esac; do shift; done\n{body}\n')
        program.chmod(0o755)
        monkeypatch.setattr(fuzz, "command_of", lambda *_: [program])

    return set_to


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two inputs of the target "units"."""
    folder = tmp_path / "corpus" / "units"
    folder.mkdir(parents=True)
    for name in ("one", "two"):
        (folder / name).write_text(name)
    return folder


def inputs(folder: Path) -> list[str]:
    return sorted(path.read_text() for path in folder.iterdir())


def test_a_merge(fuzz: ModuleType, pretend: Callable[[str], None], corpus: Path) -> None:
    pretend('cp "$2"/one "$1"')
    assert fuzz.merge("units", corpus) == ""
    assert inputs(corpus) == ["one"]
    assert [path.name for path in corpus.parent.iterdir()] == ["units"]


def test_what_is_kept(fuzz: ModuleType, pretend: Callable[[str], None], corpus: Path, tmp_path: Path) -> None:
    pretend(COPY)
    assert fuzz.keep("units")
    assert (tmp_path / "kept" / "units.txt").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("ends", ["echo Test unit written to crash-1 >&2", "echo failed >&2; exit 1"])
def test_a_crash_is_not_dropped(
    fuzz: ModuleType, pretend: Callable[[str], None], corpus: Path, tmp_path: Path, ends: str
) -> None:
    pretend(f"{COPY}; rm $1/one; {ends}")
    assert not fuzz.keep("units")
    assert not (tmp_path / "kept").exists()
    assert fuzz.merge("units", corpus) != ""
    assert inputs(corpus) == ["one", "two"]


def test_a_merge_that_is_killed_loses_no_corpus(
    fuzz: ModuleType, pretend: Callable[[str], None], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend('cp "$2"/one "$1"')
    rename, rmtree = Path.rename, fuzz.shutil.rmtree
    steps = 0  # renames and removals of whole folders until the script is killed
    while True:
        left = steps

        def count() -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1

        def counted_rename(*arguments: Any) -> Any:
            count()
            return rename(*arguments)

        def counted_rmtree(*arguments: Any, **options: Any) -> None:
            count()
            rmtree(*arguments, **options)

        monkeypatch.setattr(Path, "rename", counted_rename)
        monkeypatch.setattr(fuzz.shutil, "rmtree", counted_rmtree)
        try:
            fuzz.merge("units", corpus)
        except KeyboardInterrupt:
            monkeypatch.setattr(Path, "rename", rename)
            fuzz.restore(corpus)
        else:
            break
        finally:
            monkeypatch.setattr(Path, "rename", rename)
            monkeypatch.setattr(fuzz.shutil, "rmtree", rmtree)
        assert inputs(corpus) in (["one", "two"], ["one"])
        (corpus / "two").write_text("two")
        steps += 1
    assert steps == 5  # two removals of what is left, two renames, one removal
    assert [path.name for path in corpus.parent.iterdir()] == ["units"]


def test_the_only_copy_of_a_corpus_is_used(fuzz: ModuleType, corpus: Path) -> None:
    for left in ("units.before", "units.merged"):
        corpus.rename(corpus.parent / left)
        fuzz.restore(corpus)
        assert inputs(corpus) == ["one", "two"]
