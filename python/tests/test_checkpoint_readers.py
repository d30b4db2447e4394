"""Reading checkpoints that others save, replace and remove meanwhile, or that can only be read."""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trunkline as tl
from trunkline._formats.pt import loader as pt_loader
from trunkline._formats.safetensors import loader as safetensors_loader
from trunkline._tensor_io import transfer
from trunkline.checkpoint.directory import step_load


def state_of(version: int) -> dict[str, Any]:
    return {"version": version, "x": torch.full((5000,), float(version))}


def save(directory: Path, step: int, version: int) -> None:
    checkpointer = tl.Checkpointer(directory, keep=1, process_group=False)
    store = checkpointer._context.store
    store.continue_from(store.position())  # as if it had loaded, without reading
    checkpointer.save(step, state_of(version), block=True)


@pytest.fixture
def before_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Have something done once, when a manifest was read and its shards are not open yet."""

    def arrange(action: Callable[[], None]) -> None:
        real = step_load.read_layouts
        actions = [action]

        def read_layouts(*arguments: Any, **options: Any) -> None:
            if actions:
                actions.pop()()
            real(*arguments, **options)

        monkeypatch.setattr(step_load, "read_layouts", read_layouts)

    return arrange


@pytest.mark.parametrize("in_place", [False, True])
def test_the_last_one_is_retired_while_it_is_loaded(
    tmp_path: Path, before_reading: Callable[[Callable[[], None]], None], in_place: bool
) -> None:
    save(tmp_path, 1, 10)
    before_reading(lambda: save(tmp_path, 2, 20))
    into = state_of(0) if in_place else None
    found = tl.Checkpointer(tmp_path, process_group=False).load(into=into)
    assert found["version"] == 20
    assert torch.equal(found["x"], state_of(20)["x"])


def test_a_step_is_replaced_while_it_is_loaded(
    tmp_path: Path, before_reading: Callable[[Callable[[], None]], None]
) -> None:
    save(tmp_path, 1, 10)
    before_reading(lambda: save(tmp_path, 1, 11))
    found = tl.Checkpointer(tmp_path, process_group=False).load(1)
    assert found["version"] == 11
    assert torch.equal(found["x"], state_of(11)["x"])


def test_a_step_that_was_asked_for_is_retired_while_it_is_loaded(
    tmp_path: Path, before_reading: Callable[[Callable[[], None]], None]
) -> None:
    save(tmp_path, 1, 10)
    before_reading(lambda: save(tmp_path, 2, 20))
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 1; it has step 2"):
        tl.Checkpointer(tmp_path, process_group=False).load(1)


def test_one_of_several_ranks_finds_the_step_gone_that_they_agreed_on(
    tmp_path: Path,
    before_reading: Callable[[Callable[[], None]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(tmp_path, 1, 10)
    before_reading(lambda: save(tmp_path, 2, 20))
    reader = tl.Checkpointer(tmp_path, process_group=False)

    def agree(decide: Callable[[], Any], **options: Any) -> None:
        """Decide as rank 0; the other rank opened the same checkpoint."""
        decide()

    monkeypatch.setattr(reader, "_agree", agree)
    reader._ranks.size = 2
    with pytest.raises(tl.Error, match="does not exist on rank 0") as caught:
        reader.load()
    assert not isinstance(caught.value, FileNotFoundError)  # the other rank goes on from there


def test_what_another_job_commits_during_a_load_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 6, 60)
    run = tl.Checkpointer(tmp_path, process_group=False)
    other = tl.Checkpointer(tmp_path, process_group=False)
    other.load()
    to_save = [7]
    real = run._context.store

    class Store:
        """Another job commits right after this one has looked at what there is."""

        def __getattr__(self, name: str) -> Any:
            attribute = getattr(real, name)
            if name not in ("latest", "position"):
                return attribute

            def look() -> Any:
                found = attribute()
                if to_save:
                    other.save(to_save.pop(), state_of(70), block=True)
                return found

            return look

    monkeypatch.setattr(run._context, "store", Store())
    assert run.load()["version"] == 60
    with pytest.raises(FileExistsError, match="step 7, which this run has neither loaded nor saved"):
        run.save(7, state_of(71), block=True)
    assert other.load(7)["version"] == 70


def test_the_last_one_is_retired_while_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 10)
    reader = tl.Checkpointer(tmp_path, process_group=False)
    real = reader._context.store
    verified: list[int] = []

    class Store:
        """Another step is saved when the manifest was read, and its shards are not open yet."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def verify(self, step: int, **options: Any) -> Any:
            if not verified:
                shard = next(tmp_path.glob("step-*/shard-*"))
                shard.unlink()
                found = real.verify(step, **options)
                save(tmp_path, 2, 20)
            else:
                found = real.verify(step, **options)
            verified.append(step)
            return found

    monkeypatch.setattr(reader._context, "store", Store())
    reader.verify()
    assert verified == [1, 2]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("verify", ["auto", False])
def test_a_file_is_replaced_while_it_is_loaded(tmp_path: Path, suffix: str, verify: Any) -> None:
    path = tmp_path / f"file.{suffix}"

    def state(version: int) -> dict[str, Any]:
        return {"x": torch.full((500_000,), float(version))} | ({"number": version} if suffix == "pt" else {})

    tl.save(state(1), path)
    loads = {"pt": pt_loader.load, "safetensors": safetensors_loader.load}

    def replace_and_read(*arguments: Any, **options: Any) -> None:
        tl.save(state(2), path)
        transfer.read_layouts(*arguments, **options)

    found = loads[suffix](path, verify=verify, read_layouts=replace_and_read)
    assert torch.equal(found["x"], state(1)["x"])
    assert found.get("number", 1) == 1


def test_a_save_waits_for_a_reader_that_opens_the_directory(tmp_path: Path) -> None:
    writer = tl.Checkpointer(tmp_path, process_group=False)
    writer.save(1, state_of(1), block=True)
    # What Checkpointer(tmp_path) does for a moment, to collect debris.
    with (tmp_path / "lock").open("r+b") as lock:
        last_byte = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 2**63 - 2, 1, 0)
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, last_byte)
        assert tl._core.CheckpointStore(str(tmp_path)).collect()["busy"]
        handle = writer.save(2, state_of(2))
        with pytest.raises(tl.Timeout):
            handle.wait(0.1)
    handle.wait(60)
    assert writer.steps() == [1, 2]


def descriptors_below(directory: Path) -> list[str]:
    """Return the files below `directory` that this process has open, one entry for each descriptor."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself, and what threads close
            found.append(str(descriptor.readlink()))
    return sorted(each for each in found if Path(each).is_relative_to(directory))


def test_a_load_that_fails_gives_its_files_back_at_once(tmp_path: Path) -> None:
    save(tmp_path, 1, 10)
    (shard,) = tmp_path.glob("step-*/shard-*")
    contents = bytearray(shard.read_bytes())
    contents[-1] ^= 1
    shard.write_bytes(contents)
    checkpointer = tl.Checkpointer(tmp_path, process_group=False)
    with pytest.raises(tl.Corrupt):
        checkpointer.load()
    before = descriptors_below(tmp_path)
    with pytest.raises(tl.Corrupt) as caught:
        checkpointer.load()
    assert descriptors_below(tmp_path) == before
    assert caught.value.tensor == "x"  # it is still held


def test_a_directory_that_can_only_be_read(tmp_path: Path) -> None:
    directory = tmp_path / "steps"
    save(directory, 1, 10)
    code = """
        import sys
        import torch
        import trunkline as tl
        checkpointer = tl.Checkpointer(sys.argv[1], process_group=False)
        assert checkpointer.latest() == 1
        assert torch.equal(checkpointer.load()["x"], torch.full((5000,), 10.0))
        checkpointer.verify()
        try:
            checkpointer.save(2, {"x": torch.ones(3)}).wait()
            raise AssertionError("it saved")
        except tl.Error as error:
            print(error.errno)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(directory)]
    if os.geteuid() == 0:  # whom no mode of a file keeps out
        mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'
        probe = ["unshare", "--mount", "sh", "-c", mount, str(directory)]
        if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting is refused here")
        command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', str(directory), *command]
    else:
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    finally:
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o755)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in {"30", "13"}  # EROFS, EACCES
