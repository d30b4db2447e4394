"""Python's calls that open, list or change a file fail one by one: users get a trunkline.Error that names it.

The library's calls in C++ are made to fail in other tests. os.stat() has no audit event, so it succeeds here.
"""

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import trunkline as tl

_EVENTS = {
    *("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link"),
    *("os.chmod", "os.truncate", "os.symlink"),
}


class Fault:
    """Counts the calls that concern a folder, and fails one of them, or all from there on."""

    folder: str | None = None
    calls = 0
    first = 0
    lasts = False

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event not in _EVENTS or not isinstance(arguments[0], str | bytes):
            return
        path = os.fsdecode(arguments[0])
        if not path.startswith(self.folder):
            return
        self.calls += 1
        if self.calls == self.first or (self.lasts and 0 < self.first < self.calls):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)


_fault = Fault()
sys.addaudithook(_fault.hear)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((1_000,), float(step)), "step": step}


class Run:
    """Checkpoints of steps 1 to 3, and a program that goes on from there."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def _open(self, root: Path, **more: Any) -> tl.Checkpointer:
        options = {name: value(root) if callable(value) else value for name, value in self._options.items()}
        return tl.Checkpointer(root / "run", keep=2, process_group=False, **options, **more)

    def prepare(self, root: Path) -> None:
        made = self._open(root)
        for step in (1, 2, 3):
            made.save(step, state_of(step)).wait()
        if "tiers" in self._options:
            made.wait_drained()

    def go_on(self, root: Path) -> None:
        made = self._open(root)
        assert made.load()["step"] == 3
        for step in (4, 5):
            made.save(step, state_of(step)).wait()
        made.delete(4)
        assert made.latest() == 5
        if "tiers" in self._options:
            made.wait_drained()

    def begin_anew(self, root: Path) -> None:
        made = self._open(root, fresh=True)
        made.save(1, state_of(1)).wait()
        assert made.load()["step"] == 1


def _save_and_load_dcp(root: Path) -> None:
    made = tl.dcp.Checkpointer(root / "run", keep=2)
    for step in (1, 2, 3):
        made.save(step, state_of(step))
    state = state_of(0)
    made.load(state)
    assert state["step"] == 3


def _write_folder(root: Path) -> None:
    (root / "model").mkdir()
    tl.save({"weight": torch.ones(100)}, root / "model" / "model.safetensors")


def _read_folder(root: Path) -> None:
    assert tl.load(root / "model")["weight"].sum() == 100
    assert [name for name, _ in tl.iter_tensors(root / "model")] == ["weight"]
    with tl.open_tensors(root / "model") as tensors:
        assert list(tensors) == ["weight"]


def _export(root: Path) -> None:
    tl.export_checkpoint(root / "run", root / "exported.safetensors")
    tl.export_checkpoint(root / "run", root / "exported.pt")


def _write_samples(root: Path) -> None:
    for name in ("cat", "dog"):
        (root / "samples" / name).mkdir(parents=True)
        (root / "samples" / name / "0.raw").write_bytes(b"12345678")


def _read_samples(root: Path) -> None:
    index = tl.data.index(root / "samples", cache=root / "cache")
    batches = [bytes(batch.samples[0]) for batch in tl.data.Loader(index, 1)]
    assert batches == [b"12345678"] * 2


def _nothing(root: Path) -> None:
    pass


_PLAIN = Run()
_TIERS = Run(tiers=lambda root: [tl.Tier(root / "tier", every=1)])
_INCREMENTAL = Run(incremental=True)
_VOLUMES = Run(volumes=lambda root: [root / "first", root / "second"])
_NODE = Run(local=True)
_NODE_WITH_TIER = Run(local=True, tiers=lambda root: [tl.Tier(root / "tier", every=1)])
USES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "plain": (_PLAIN.prepare, _PLAIN.go_on),
    "fresh": (_PLAIN.prepare, _PLAIN.begin_anew),
    "tiers": (_TIERS.prepare, _TIERS.go_on),
    "incremental": (_INCREMENTAL.prepare, _INCREMENTAL.go_on),
    "volumes": (_VOLUMES.prepare, _VOLUMES.go_on),
    "a node's disk": (_NODE.prepare, _NODE.go_on),
    "a node's disk, fresh": (_NODE.prepare, _NODE.begin_anew),
    "a node's disk, and a tier": (_NODE_WITH_TIER.prepare, _NODE_WITH_TIER.go_on),
    "torch.distributed.checkpoint": (_nothing, _save_and_load_dcp),
    "export": (_PLAIN.prepare, _export),
    "samples": (_write_samples, _read_samples),
    "a folder of safetensors": (_write_folder, _read_folder),
}


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(("prepare", "use"), USES.values(), ids=USES.keys())
@pytest.mark.filterwarnings("ignore")
def test_users_get_an_error_that_names_the_file(
    tmp_path: Path, prepare: Callable[[Path], None], use: Callable[[Path], None], lasts: bool
) -> None:
    calls, first = 1, 0
    while first <= calls:
        root = tmp_path / str(first)
        root.mkdir()
        prepare(root)
        _fault.folder, _fault.calls, _fault.first, _fault.lasts = str(root), 0, first, lasts
        try:
            failures = _failures(use, root)
        finally:
            _fault.folder = None
        for each in failures:
            assert isinstance(each, tl.Error), repr(each)
            assert str(root) in str(each)
        if first == 0:
            calls = _fault.calls
            assert calls > 0
        first += 1
        shutil.rmtree(root, ignore_errors=True)  # a copy to a tier may be at work


def _failures(use: Callable[[Path], None], root: Path) -> list[BaseException]:
    try:
        use(root)
    except CheckpointException as error:
        return [each for each, _ in error.failures.values()]
    except OSError as error:
        return [error]
    return []


def test_a_disk_that_is_full_is_reported_with_the_file(tmp_path: Path) -> None:
    """Writes to files that replace others are Python's, too."""
    _write_samples(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(tl.Error, match=r"index: file too large \(EFBIG\)") as caught:
            tl.data.index(tmp_path / "samples", cache=tmp_path / "index")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, before)
    assert (caught.value.filename, caught.value.errno) == (str(tmp_path / "index"), errno.EFBIG)
    assert not (tmp_path / "index").exists()
