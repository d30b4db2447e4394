"""Writes and fsyncs that fail: never reported as success, what was there stays, the next save works."""

import errno
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trunkline as tl
from trunkline.checkpoint import save as saving
from trunkline.checkpoint.directory.step_save import StepSave


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """Tensors for several transfers, some of them direct."""
    ramp = torch.arange(300_000, dtype=torch.int32)
    return {
        "version": torch.tensor([version]),
        "weight": ramp * 31 + version,
        "odd": (ramp[:77_777] + version).to(torch.uint8),
    }


class Checkpoints:
    """Saves to a directory of steps."""

    def __init__(self, root: Path, engine: tl.Engine, block: bool) -> None:
        self._checkpointer = tl.Checkpointer(root / "steps", keep=1, process_group=False, engine=engine)
        self._block = block

    def save(self, version: int) -> None:
        self._checkpointer.save(version, tensors_of(version), block=self._block).wait()

    def load(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self._checkpointer.load()
        return found


class SingleFile:
    """Saves to one file."""

    def __init__(self, root: Path, engine: tl.Engine, name: str, in_background: bool) -> None:
        self._path, self._engine, self._in_background = root / name, engine, in_background

    def save(self, version: int) -> None:
        if self._in_background:
            tl.save_async(tensors_of(version), self._path, engine=self._engine).wait()
        else:
            tl.save(tensors_of(version), self._path, engine=self._engine)

    def load(self) -> dict[str, torch.Tensor]:
        return dict(tl.load(self._path))


Way = Callable[[Path, tl.Engine], Any]

WAYS: dict[str, Way] = {
    "checkpoint": lambda root, engine: Checkpoints(root, engine, False),
    "checkpoint, blocking": lambda root, engine: Checkpoints(root, engine, True),
    "pt": lambda root, engine: SingleFile(root, engine, "file.pt", False),
    "pt, async": lambda root, engine: SingleFile(root, engine, "file.pt", True),
    "safetensors": lambda root, engine: SingleFile(root, engine, "file.safetensors", False),
    "safetensors, async": lambda root, engine: SingleFile(root, engine, "file.safetensors", True),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def way(request: pytest.FixtureRequest) -> Way:
    made: Way = request.param
    return made


def small_engine(faults: tl.Faults) -> tl.Engine:
    """Blocks so small that a save takes many commands."""
    return tl.Engine("threads", faults=faults, block_bytes="256KiB", lanes=2)


def names(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def assert_version(found: dict[str, torch.Tensor], version: int) -> None:
    expected = tensors_of(version)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("op", "code"), [("write", errno.EIO), ("write", errno.ENOSPC), ("sync", errno.EIO)])
def test_each_command_that_fails_fails_the_save(way: Way, tmp_path: Path, op: Any, code: int) -> None:
    faults = tl.Faults()
    version, number = 1, 0
    with small_engine(faults) as engine:
        saver = way(tmp_path, engine)
        saver.save(version)
        # How many commands a save takes depends on where its tensors lie in memory.
        while True:
            before, injected = names(tmp_path), faults.injected
            faults.fail(op, faults.commands(op) + number, code)
            try:
                saver.save(version + 1)
            except tl.Error as error:
                assert error.errno == code  # noqa: PT017 - and more is to be asserted meanwhile
                # At once, not only when the error is forgotten.
                assert names(tmp_path) == before
            else:
                assert faults.injected == injected, "a command failed, and the save did not"
                version += 1
                break
            assert faults.injected > injected
            assert_version(saver.load(), version)
            version += 1
            saver.save(version)  # with the same engine, and to the same place
            assert_version(saver.load(), version)
            number += 1
    assert number > 0
    with tl.Engine("threads") as fresh:
        saver = way(tmp_path, fresh)
        assert_version(saver.load(), version)
        saver.save(version + 1)
        assert_version(saver.load(), version + 1)


@pytest.mark.parametrize("volumes", [[], ["v0", "v1"]])
def test_a_fresh_run_that_cannot_save_says_where_the_earlier_one_is(
    tmp_path: Path, volumes: list[str]
) -> None:
    faults = tl.Faults()
    with small_engine(faults) as engine:
        options: Any = {"process_group": False, "engine": engine, "volumes": [tmp_path / v for v in volumes]}
        tl.Checkpointer(tmp_path / "run", **options).save(7, tensors_of(7), block=True)
        fresh = tl.Checkpointer(tmp_path / "run", fresh=True, **options)
        faults.fail("write", faults.commands("write"), errno.ENOSPC)
        with pytest.raises(tl.Error) as caught:
            fresh.save(0, tensors_of(0)).wait()
        (aside,) = (tmp_path / "run").glob("aside-*")
        assert caught.value.errno == errno.ENOSPC
        assert f"complete in {aside}: open that directory to continue" in str(caught.value)
        assert fresh.steps() == []
        earlier = tl.Checkpointer(aside, process_group=False, engine=engine)
        assert_version(earlier.load(), 7)
        # Saving again starts over, and sets nothing else aside.
        fresh.save(0, tensors_of(0), block=True)
        assert_version(fresh.load(), 0)
        faults.fail("write", faults.commands("write"), errno.ENOSPC)
        with pytest.raises(tl.Error) as caught:
            fresh.save(1, tensors_of(1), block=True)
        assert "aside" not in str(caught.value)
        earlier.save(8, tensors_of(8), block=True)
        assert_version(earlier.load(), 8)
        assert list((tmp_path / "run").glob("aside-*")) == [aside]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("keep", [3, None])
def test_the_error_of_a_save_names_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int, keep: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    faults = tl.Faults()
    with small_engine(faults) as engine:
        checkpoints = tl.Checkpointer("run", keep=keep, process_group=False, engine=engine)
        checkpoints.save(1, tensors_of(1), block=True)
        said = f"saving step 2 to {tmp_path}/run: "

        def begin() -> tl.SaveHandle:
            faults.fail("write", faults.commands("write"), code)
            return checkpoints.save(2, tensors_of(2))

        with pytest.raises(tl.Error) as caught:
            begin().wait()
        assert caught.value.errno == code
        message = str(caught.value)
        assert message.startswith(f"{said}cannot write ")
        assert ("the checkpoints that were there before are intact" in message) == (code != errno.EIO)
        assert ("keep=3 needs room for 4" in message) == (code != errno.EIO and keep == 3)
        assert str(pickle.loads(pickle.dumps(caught.value))) == message
        begin()._done.wait()
        with pytest.raises(tl.Error, match=f"^step 3 was not saved, .* The failure: {said}cannot write "):
            checkpoints.save(3, tensors_of(3))
        begin()._done.wait()
        monkeypatch.setattr(saving, "end_by_failure", lambda: None)
        saving._report_at_exit()
        assert "saving step 2 to run failed: cannot write " in capfd.readouterr().err
        assert checkpoints.steps() == [1]


def test_the_error_of_a_save_in_the_background_names_the_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    faults = tl.Faults()
    with small_engine(faults) as engine:
        faults.fail("write", faults.commands("write"), errno.EIO)
        tl.save_async(tensors_of(1), "a.pt", engine=engine)._done.wait()
        with pytest.raises(tl.Error, match=r"nobody waited for it: saving a.pt: cannot write "):
            tl.save({}, "a.pt")


def test_disturbed_commands_make_no_difference(way: Way, tmp_path: Path) -> None:
    faults = tl.Faults()
    with small_engine(faults) as engine:
        faults.disturb(7, interrupt_rate=0.2, short_rate=0.2)
        saver = way(tmp_path, engine)
        for version in range(1, 6):
            saver.save(version)
            assert_version(saver.load(), version)
    assert faults.injected > 0


def test_a_message_that_cannot_be_made_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        checkpoints = tl.Checkpointer(tmp_path / "steps", process_group=False, engine=engine)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(StepSave, "_mention_set_aside_run", interrupted)
        faults.fail("sync", faults.commands("sync"), errno.EIO)
        with pytest.raises(tl.Error) as caught:
            checkpoints.save(1, tensors_of(1), block=True)
        assert caught.value.errno == errno.EIO
        monkeypatch.undo()
        tl.Checkpointer(tmp_path / "steps", process_group=False).save(2, tensors_of(2), block=True)
        checkpoints.load(2)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    ],
)
def test_memory_that_is_full_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    checkpoints.save(1, {"w": torch.ones(10)}, block=True)

    def empty(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(tl.Error, match=r"the tensor 'w' \(40 bytes on cpu\).*allocate") as caught:
        checkpoints.load()
    assert type(caught.value) is tl.Error
    assert caught.value.errno == errno.ENOMEM
    monkeypatch.undo()
    assert torch.equal(checkpoints.load()["w"], torch.ones(10))
