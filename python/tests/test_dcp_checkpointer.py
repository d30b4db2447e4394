"""trunkline.dcp.Checkpointer: the steps of a run, as a training saves and continues them."""

import errno
import json
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RunScript
from support_cli import command, document
from support_dcp import numbers, save, shards

import trunkline as tl
from trunkline._checkpoint_tools import cli, dcp_directory
from trunkline._checkpoint_tools.dcp_directory import collect
from trunkline.dcp import StorageWriter, _checkpointer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": numbers(300, 200, seed=step), "b": numbers(7, seed=step)}, "step": step}


def loaded(checkpoints: "tl.dcp.Checkpointer", step: int | None = None) -> int:
    """Load, and check that the values are those of the step that it says; return it."""
    into = {"model": {"w": torch.zeros(300, 200), "b": torch.zeros(7)}, "step": -1}
    found = checkpoints.load(into, step)
    assert into["step"] == found
    assert torch.equal(into["model"]["w"], state(found)["model"]["w"])
    return found


def test_a_run_keeps_its_last_steps_and_continues(tmp_path: Path) -> None:
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run", keep=2)
    assert (checkpoints.latest(), checkpoints.steps()) == (None, [])
    assert not (tmp_path / "run").exists()
    for step in (1, 2, 3):
        checkpoints.save(step, state(step))
    assert (checkpoints.latest(), checkpoints.steps()) == (3, [2, 3])
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["step-00000002", "step-00000003"]
    again = tl.dcp.Checkpointer(tmp_path / "run", keep=2)
    assert loaded(again) == 3
    again.async_save(4, state(4)).result()
    again.async_save(5, state(5))
    again.wait()
    assert again.steps() == [4, 5]
    assert loaded(again, 4) == 4
    again.delete(5)
    assert (again.latest(), loaded(again)) == (4, 4)
    with pytest.raises(tl.FileNotFoundError, match="no checkpoint of step 5; it has steps 4"):
        again.load(state(0), 5)


def test_a_step_that_another_process_removes_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest one is loaded instead, and nothing is reported as damaged."""
    run, reader = (tl.dcp.Checkpointer(tmp_path / "run", keep=1) for _ in range(2))
    run.save(1, state(1))
    real = _checkpointer.load
    steps = iter(range(2, 100))
    removals = iter([True])

    def removed(*arguments: Any, **options: Any) -> None:
        if next(removals, False):
            step = next(steps)
            run.save(step, state(step))
        real(*arguments, **options)

    monkeypatch.setattr(_checkpointer, "load", removed)
    assert loaded(reader) == 2
    removals = iter([True])
    with pytest.raises(tl.FileNotFoundError, match="no checkpoint of step 2; it has step"):
        reader.load(state(0), 2)
    assert loaded(reader) == 3
    removals = iter([True] * 100)
    with pytest.raises(
        tl.Error, match="has removed checkpoints 20 times while they were loaded; let that keep more"
    ):
        loaded(reader)
    removals = iter([])
    [shard] = (tmp_path / "run").glob("step-*/*[!t]")
    shard.unlink()
    with pytest.raises(tl.Corrupt):
        loaded(reader)


def test_the_directory_is_moved_while_it_is_saved_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tl.dcp.Checkpointer(tmp_path / "run")
    run.save(1, state(1))
    real = StorageWriter.write_data

    def moved(*arguments: Any) -> Any:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        return real(*arguments)

    monkeypatch.setattr(StorageWriter, "write_data", moved)
    handle = run.async_save(2, state(2))
    with pytest.raises(tl.FileNotFoundError, match="step-00000002 was moved or removed while it was written"):
        handle.result()
    assert loaded(tl.dcp.Checkpointer(tmp_path / "moved")) == 1


@pytest.mark.parametrize("moment", ["manifest", "shards"])
def test_the_command_line_beside_a_run_that_removes_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What another process removes while it is looked at is not damaged."""
    run = tl.dcp.Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        run.save(step, state(step))
    real = dcp_directory.read_whole_manifest
    due: list[int] = []  # what is saved once the command reads a checkpoint

    def removed(folder: Path) -> Any:
        found = real(folder) if moment == "shards" else None
        for step in due:
            run.save(step, state(step))
        due.clear()
        return found or real(folder)

    monkeypatch.setattr(dcp_directory, "read_whole_manifest", removed)
    due.append(3)
    assert [each["step"] for each in json.loads(command("ls", tmp_path, "--json"))["checkpoints"]] == [2]
    due.append(4)
    found = json.loads(command("verify", tmp_path, "--all", "--json"))
    assert found["ok"] is True
    assert found["checkpoints"][0] == {"step": 2, "ok": True, "removed": True}
    due.append(5)
    text = command("verify", tmp_path, "--step", "3", expect=1)
    assert "step 3: not verified, another process removed it meanwhile" in text


def test_a_fresh_start_over_an_old_run_is_refused(tmp_path: Path) -> None:
    first = tl.dcp.Checkpointer(tmp_path / "run", keep=1)
    first.save(10, state(10))
    before = (tmp_path / "run/step-00000010/dcp.manifest").read_bytes()
    second = tl.dcp.Checkpointer(tmp_path / "run", keep=1)
    for step in (0, 10):
        with pytest.raises(
            FileExistsError, match=r"already holds step 10, which .*call load\(\) before saving"
        ):
            second.save(step, state(step))
        with pytest.raises(FileExistsError):
            second.async_save(step, state(step))
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["step-00000010"]
    assert (tmp_path / "run/step-00000010/dcp.manifest").read_bytes() == before
    # A later step is no danger to it; but the earlier run's is not counted, and not removed.
    with pytest.warns(RuntimeWarning, match="does not count or remove steps 10"):
        second.save(11, state(11))
    second.save(12, state(12))  # warned once
    assert second.steps() == [10, 12]
    loaded(second)
    second.save(13, state(13))
    assert second.steps() == [13]


def test_a_run_that_goes_back_gives_up_later_steps_first(tmp_path: Path) -> None:
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run", keep=3)
    for step in (10, 20, 30):
        checkpoints.save(step, state(step))
    loaded(checkpoints, 10)
    checkpoints.save(15, state(15))
    assert (checkpoints.steps(), checkpoints.latest()) == ([10, 15, 30], 15)
    checkpoints.save(15, numbers_again := state(15))  # replaces it
    assert torch.equal(numbers_again["model"]["w"], state(15)["model"]["w"])
    assert loaded(checkpoints) == 15
    checkpoints.save(16, state(16))
    assert checkpoints.steps() == [10, 15, 16]


def test_the_latest_is_what_was_committed_last(tmp_path: Path) -> None:
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run", keep=None)
    for step in (10, 20):
        checkpoints.save(step, state(step))
    loaded(checkpoints, 10)
    checkpoints.save(11, state(11))
    old = (tmp_path / "run/step-00000011/dcp.manifest").stat().st_mtime_ns
    os.utime(tmp_path / "run/step-00000020/dcp.manifest", ns=(old + 10**12, old + 10**12))  # clocks jump
    again = tl.dcp.Checkpointer(tmp_path / "run")
    assert (again.steps(), again.latest(), loaded(again)) == ([10, 11, 20], 11, 11)


def test_the_latest_is_found_by_the_beginning_of_manifests(tmp_path: Path) -> None:
    """Those of many tensors have tens of megabytes, most of them behind the number of the commit."""
    for step, commit, before in ((1, 3, 10), (2, 2, 65_520), (3, 4, 65_530), (4, 1, 200_000)):
        manifest = tmp_path / f"step-{step:08d}" / "dcp.manifest"
        manifest.parent.mkdir()
        manifest.write_bytes(b"x" * before + b'"save_id": "commit-%010d-"' % commit)
        os.truncate(manifest, 50_000_000)
    checkpoints = tl.dcp.Checkpointer(tmp_path)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    before = bytes_read()
    assert checkpoints.latest() == 3
    assert bytes_read() - before < 2_000_000


def test_what_holds_something_else_is_refused(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path / "ours").save(1, {"a": 1}, block=True)
    save(state(1), tmp_path / "single")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    (tmp_path / "file").touch()
    for name, why in (
        ("ours", "belongs to a trunkline.Checkpointer"),
        ("single", "a single checkpoint"),
        ("other", "holds other files and no steps"),
        ("file", "is not a directory"),
    ):
        with pytest.raises(tl.Error, match=why):
            tl.dcp.Checkpointer(tmp_path / name)
    with pytest.raises(ValueError, match="keep: "):
        tl.dcp.Checkpointer(tmp_path / "new", keep=0)
    checkpoints = tl.dcp.Checkpointer(tmp_path / "new")
    with pytest.raises(TypeError, match=r"the order is save\(step, state_dict\)"):
        checkpoints.save(state(1), 1)  # type: ignore[arg-type]
    with pytest.raises(tl.FileNotFoundError, match="has no checkpoint yet"):
        checkpoints.load(state(1))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "step-00000001").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="is a symbolic link"):
        checkpoints.save(1, state(1))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_failed_save_leaves_what_was_there_and_is_raised(tmp_path: Path) -> None:
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run")
    checkpoints.save(1, state(1))
    with pytest.raises(tl.Unsupported, match="cannot be stored"):
        checkpoints.save(2, {"a": torch.ones(3).to_sparse()})
    assert checkpoints.steps() == [1]
    checkpoints.async_save(2, {"f": lambda: 1})
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        checkpoints.save(3, state(3))  # the error of the one before; nothing is saved
    assert checkpoints.steps() == [1]
    checkpoints.save(3, state(3))
    assert checkpoints.steps() == [1, 3]


def test_volumes_are_emptied_with_their_steps(tmp_path: Path) -> None:
    volumes = [tmp_path / "v0", tmp_path / "v1"]
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run", keep=1, volumes=volumes)
    for step in (1, 2):
        checkpoints.save(step, state(step))
    links = {shard.resolve() for shard in shards(tmp_path / "run/step-00000002")}
    assert {each.resolve() for volume in volumes for each in volume.iterdir()} == links
    checkpoints.delete(2)
    assert [each for volume in volumes for each in volume.iterdir()] == []
    assert list((tmp_path / "run").iterdir()) == []


def test_two_processes_do_not_save_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_script: RunScript
) -> None:
    from trunkline.dcp import _directory, run_directory

    monkeypatch.setattr(_directory, "LOCK_SECONDS", 0.1)
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run")
    checkpoints.save(1, state(1))
    with run_directory.locked(tmp_path / "run"):  # as another process that saves
        for act in (lambda: checkpoints.save(2, state(2)), lambda: checkpoints.delete(1)):
            with pytest.raises(tl.Error, match="another process has held a lock") as busy:
                act()
            assert busy.value.errno == 16
    # What another process has saved meanwhile is not replaced, nor removed.
    run_script(
        """
        import warnings, torch, trunkline as tl
        warnings.simplefilter("ignore", UserWarning)  # of torch, that this is one process
        checkpoints = tl.dcp.Checkpointer("run", keep=1)
        checkpoints.load({"step": 0})
        checkpoints.save(2, {"step": 2})
        """
    )
    with pytest.raises(
        FileExistsError, match="already holds step 2, which this run has neither loaded nor saved"
    ):
        checkpoints.save(2, state(2))
    assert checkpoints.steps() == [2]


KILLED = """
    import os, signal, sys
    import torch, trunkline as tl
    from trunkline.dcp import _directory, _writer, run_directory

    def die(*arguments, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = tl.dcp.Checkpointer("run", keep=1)
    state = lambda step: {"model": {"w": torch.full((1000,), float(step))}, "step": step}
    checkpoints.save(1, state(1))
    module, name = sys.argv[1].split(".")
    setattr({"writer": _writer, "directory": _directory, "run": run_directory}[module], name, die)
    checkpoints.save(2, state(2))
"""


@pytest.mark.parametrize(
    ("where", "latest"),
    [
        ("writer.format_manifest", 1),  # shards are written, nothing is committed
        ("run.superseded", 2),  # committed, and the old one is still there
        ("run._remove_rest", 2),  # the old one is not a checkpoint any more, but its files are there
    ],
)
def test_killed_at_any_point(tmp_path: Path, run_script: RunScript, where: str, latest: int) -> None:
    run_script(KILLED, where, expect=-signal.SIGKILL)
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run", keep=1)
    assert checkpoints.latest() == latest
    into = {"model": {"w": torch.zeros(1000)}, "step": 0}
    assert checkpoints.load(into) == latest
    assert torch.equal(into["model"]["w"], torch.full((1000,), float(latest)))
    checkpoints.save(5, state(5))
    assert checkpoints.steps() == [5]
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["step-00000005"]


def test_damage_is_never_skipped(tmp_path: Path) -> None:
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run")
    for step in (1, 2):
        checkpoints.save(step, state(step))
    (shard,) = shards(tmp_path / "run/step-00000002")
    shard.unlink()
    with pytest.raises(tl.Corrupt, match=str(shard)):
        loaded(tl.dcp.Checkpointer(tmp_path / "run"))
    assert loaded(checkpoints, 1) == 1


def cut(manifest: Path) -> None:
    manifest.write_bytes(manifest.read_bytes()[:100])


def empty(manifest: Path) -> None:
    manifest.write_bytes(b"")


def change(manifest: Path) -> None:
    manifest.write_bytes(manifest.read_bytes().replace(b"commit-", b"commlt-"))


@pytest.mark.parametrize("damage", [cut, empty, change])
def test_a_damaged_manifest_may_be_that_of_the_latest_step(tmp_path: Path, damage: Any) -> None:
    """It is not taken for that of an old step, and keep does not remove it."""
    run = tmp_path / "run"
    checkpoints = tl.dcp.Checkpointer(run)
    for step in (1, 2):
        checkpoints.save(step, state(step))
    manifest = run / "step-00000002/dcp.manifest"
    whole = manifest.read_bytes()
    damage(manifest)
    again = tl.dcp.Checkpointer(run, keep=1)
    for act in (again.latest, lambda: loaded(again)):
        with pytest.raises(tl.Corrupt, match=r"dcp.manifest is corrupt.* move step-00000002 elsewhere"):
            act()
    assert loaded(again, 1) == 1
    with pytest.raises(tl.Corrupt, match="move step-00000002 elsewhere"):
        again.save(3, state(3))
    assert shards(run / "step-00000002")
    manifest.write_bytes(whole)
    assert loaded(again) == 2


def test_a_second_one_in_this_process_waits_for_a_running_save(tmp_path: Path) -> None:
    first = tl.dcp.Checkpointer(tmp_path / "run")
    first.async_save(1, state(1))
    assert tl.dcp.Checkpointer(tmp_path / "run").latest() == 1
    first.async_save(2, state(2))
    second = tl.dcp.Checkpointer(tmp_path / "run")
    assert loaded(second) == 2
    second.save(3, state(3))
    assert first.steps() == [1, 2, 3]


def test_the_error_of_a_save_that_nobody_waited_for_is_printed_at_exit(run_script: RunScript) -> None:
    said = run_script(
        """
        import sys, warnings, torch, trunkline as tl
        from trunkline.dcp import _writer

        warnings.simplefilter("ignore")  # of torch, that this is one process
        sys.stderr = sys.stdout

        def fail(*arguments):
            raise OSError(28, "no space left")

        checkpoints = tl.dcp.Checkpointer("run")
        _writer.format_manifest = fail
        checkpoints.async_save(1, {"w": torch.zeros(3)})
        """,
        expect=1,
    )
    assert "saving step 1 to " in said
    assert "no space left" in said


@pytest.mark.parametrize("call", ["async_save", "save"])
def test_a_forked_child_does_not_wait_for_the_saves_of_its_parent(run_script: RunScript, call: str) -> None:
    run_script(
        """
        import os, sys, threading, time, warnings, torch, trunkline as tl
        from trunkline.dcp import _writer

        warnings.simplefilter("ignore")  # of torch, that this is one process
        release, stock = threading.Event(), _writer.format_manifest
        _writer.format_manifest = lambda *arguments: (release.wait(60), stock(*arguments))[1]
        checkpoints = tl.dcp.Checkpointer("run")
        if sys.argv[1:] == ["save"]:
            threading.Thread(target=checkpoints.save, args=(1, {"w": torch.zeros(3)})).start()
            while checkpoints._pending is None or not checkpoints._pending.has_begun:
                time.sleep(0.01)
        else:
            checkpoints.async_save(1, {"w": torch.zeros(3)})
        child = os.fork()
        if child == 0:
            try:
                assert checkpoints.latest() is None
                checkpoints.wait()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        release.set()
        checkpoints.wait()
        assert checkpoints.latest() == 1
        """,
        call,
    )


def test_a_signal_handler_is_told_to_set_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tl.dcp.Checkpointer(tmp_path / "run")
    stock = _checkpointer.save
    has_run = threading.Event()
    raised: list[str] = []

    def handler(number: int, frame: Any) -> None:
        for call in (lambda: checkpoints.save(2, state(2)), lambda: checkpoints.load(state(2))):
            with pytest.raises(tl.Error, match="set a flag in the handler") as error:
                call()
            raised.append(str(error.value))
        has_run.set()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert has_run.wait(60)
        return stock(*arguments, **options)

    monkeypatch.setattr(_checkpointer, "save", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        checkpoints.save(1, state(1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(raised) == 2
    assert checkpoints.steps() == [1]


def no_removal_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let removals of files of this name fail, as on a volume that is mounted read-only."""
    stock = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == name:
            raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        stock(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)


def test_a_shard_that_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    checkpoints = tl.dcp.Checkpointer(run, keep=1, volumes=[tmp_path / "v"])
    checkpoints.save(1, state(1))
    [shard] = (tmp_path / "v").iterdir()
    with monkeypatch.context() as during:
        no_removal_of(shard.name, during)
        with pytest.raises(
            tl.Error,
            match=rf"step 1 .* not a checkpoint any more, .*: cannot remove {shard}: .*checkpoint gc {run}",
        ) as caught:
            checkpoints.delete(1)
        assert caught.value.errno == errno.EROFS
        assert checkpoints.steps() == []
        found = collect(str(run), dry_run=False)
        assert (found["removed"], found["bytes"]) == ([], 0)
        [problem] = found["problems"]
        assert (problem["errno"], problem["path"]) == (errno.EROFS, str(shard))
        assert f"cannot remove {shard}" in problem["message"]
        with pytest.warns(RuntimeWarning, match=f"what an earlier save left: cannot remove {shard}"):
            checkpoints.save(2, state(2))
    assert shard.exists()
    assert [each["path"] for each in collect(str(run), dry_run=False)["removed"]] == [
        str(run / "step-00000001")
    ]
    assert not shard.exists()
    [kept] = (tmp_path / "v").iterdir()
    no_removal_of(kept.name, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"could not remove step 2: .*cannot remove {kept}"):
        checkpoints.save(3, state(3))
    assert checkpoints.steps() == [3]


def test_the_command_line_fails_where_a_shard_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    tl.dcp.Checkpointer(run).save(1, state(1))
    [shard] = shards(run / "step-00000001")
    no_removal_of(shard.name, monkeypatch)
    assert cli.main(["rm", str(run), "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"cannot remove {shard}" in printed.err
    assert cli.main(["gc", str(run), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["removed"] == []
    assert document["problems"][0]["path"] == str(shard)


def test_folders_that_do_not_count_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = tl.dcp.Checkpointer(run, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step))
    (run / "step-00000003").rename(run / "step-3")
    (run / "step-00000004").symlink_to(tmp_path / "not mounted")
    with pytest.warns(RuntimeWarning) as warned:
        again = tl.dcp.Checkpointer(run, keep=2)
    found = sorted(str(each.message) for each in warned)
    assert len(found) == 2
    assert "step-00000004 is ignored: it is a symbolic link to" in found[0]
    assert "step-3 is ignored: rename it to step-00000003" in found[1]
    assert loaded(again) == 2  # warned once
    with pytest.warns(RuntimeWarning, match="is ignored"):
        loaded(checkpoints)


def test_a_step_whose_manifest_cannot_be_read_is_not_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = tl.dcp.Checkpointer(run, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(step))
    manifest = run / "step-00000002/dcp.manifest"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-10])  # behind the number of its commit
    assert b"commit-" in whole[:-10]
    again = tl.dcp.Checkpointer(run, keep=1)
    assert loaded(again, 1) == 1
    with pytest.warns(RuntimeWarning, match=f"could not remove step 2: {manifest} is corrupt"):
        again.save(3, state(3))
    assert again.steps() == [2, 3]
    assert shards(run / "step-00000002")


def test_arguments_that_are_not_a_state_are_named(tmp_path: Path) -> None:
    checkpoints: Any = tl.dcp.Checkpointer(tmp_path / "run")
    for act in (checkpoints.save, checkpoints.async_save):
        with pytest.raises(TypeError, match="state_dict: must be a dict, not list"):
            act(2, [torch.zeros(3)])
    with pytest.raises(TypeError, match=r"state_dict: must be a dict, not int; .* load\(state_dict, step\)"):
        checkpoints.load(1)


def test_saves_in_an_exit_handler(run_script: RunScript, tmp_path: Path) -> None:
    run_script(
        """
        import atexit, warnings, torch, trunkline as tl

        warnings.simplefilter("ignore")  # of torch, that this is one process
        checkpoints = tl.dcp.Checkpointer("run")

        def at_exit():
            checkpoints.save(1, {"w": torch.zeros(3)})
            checkpoints.async_save(2, {"w": torch.ones(3)}).result()

        atexit.register(at_exit)
        """
    )
    assert tl.dcp.Checkpointer(tmp_path / "run").steps() == [1, 2]


def test_the_command_line_understands_the_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = tl.dcp.Checkpointer(run, keep=None)
    for step in (1, 2):
        checkpoints.save(step, state(step))
    listed = document("ls", run)
    assert (listed["latest"], [each["step"] for each in listed["checkpoints"]]) == (2, [1, 2])
    assert [each["commit"] for each in listed["checkpoints"]] == [1, 2]
    assert "latest" in command("ls", run)
    shown = document("show", run, "--step", "1")
    assert (shown["step"], {each["name"] for each in shown["tensors"]}) == (1, {"model.w", "model.b"})
    assert shown["tensors"][0]["shape"] in ([300, 200], [7])
    assert document("verify", run, "--all")["ok"] is True
    assert "no checkpoint of step 7" in command("verify", run, "--step", "7", expect=2)

    left = run / "step-00000003" / f"rank00000-0-{'0' * 32}.shard"  # of a save that was killed
    left.parent.mkdir()
    left.write_bytes(b"12345")
    assert document("gc", run, "--dry-run")["removed"] == [{"path": str(left.parent), "bytes": 5}]
    assert left.exists()
    assert f"removed {left.parent}" in command("gc", run)
    assert not left.parent.exists()

    command("export", run, tmp_path / "model.safetensors", "--key", "model", "--step", "1")
    assert torch.equal(tl.load(tmp_path / "model.safetensors")["w"], state(1)["model"]["w"])
    told = command("diff", run / "step-00000001", run, "--key", "model", expect=1)
    assert "w: 60000 of 60000 elements differ" in told

    (shard,) = shards(run / "step-00000002")
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    (found,) = document("verify", run, expect=1)["checkpoints"][0]["mismatches"]
    assert (found["kind"], found["path"], found["chunk"]) == ("checksum", str(shard), 0)
    assert f"{shard}: chunk 0 (bytes 0 to" in command("verify", run, "--all", expect=1)
    shard.unlink()
    assert document("verify", run, expect=1)["checkpoints"][0]["mismatches"][0]["kind"] == "missing"
    assert "incomplete" in command("ls", run, expect=1)

    assert document("rm", run, "2")["steps"] == [1]
    assert checkpoints.steps() == [1]
    assert document("verify", run)["ok"] is True
    assert document("verify", run / "step-00000001")["ok"] is True
