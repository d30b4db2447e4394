"""Relative paths mean what they meant when they were given, wherever the process goes meanwhile."""

import os
import pickle
import pwd
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from rank_processes import RankProcesses
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import trunkline as tl

STATE = {"x": torch.arange(300_000)}
ALL = 1 << 40  # commands


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The process is in tmp_path / "here" and will go to the directory that this returns."""
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "elsewhere"


def same(found: dict[str, Any]) -> bool:
    return torch.equal(found["x"], STATE["x"])


@pytest.mark.parametrize(
    "path", ["file.pt", "file.safetensors", b"\xff.pt", Path("file.pt"), "./a//../file.pt", "link/../file.pt"]
)
def test_a_file_that_is_saved_in_the_background(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, path: Any
) -> None:
    Path("a").mkdir()
    (tmp_path / "target" / "of").mkdir(parents=True)
    Path("link").symlink_to(tmp_path / "target" / "of")
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        faults.hold("write", 0, ALL)
        handle = tl.save_async(STATE, path, engine=engine)
        monkeypatch.chdir(elsewhere)
        faults.release()
        handle.wait()
    assert list(elsewhere.iterdir()) == []
    monkeypatch.chdir(tmp_path / "here")
    assert same(tl.load(path))
    assert os.fsdecode(path) in repr(handle)
    in_target = os.fsdecode(path).startswith("link")
    assert (tmp_path / "target" / "file.pt").exists() == in_target  # as the kernel resolves ".."
    assert not list(tmp_path.rglob(".trunkline-*"))


@pytest.mark.parametrize("volumes", [None, ["disk0", "disk1"]])
def test_checkpoints(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, volumes: list[str] | None
) -> None:
    for volume in volumes or []:
        Path(volume).mkdir()
    checkpointer = tl.Checkpointer("run", volumes=volumes, process_group=False)
    checkpointer.save(1, STATE)
    monkeypatch.chdir(elsewhere)
    checkpointer.save(2, STATE, block=True)
    assert same(checkpointer.load(1))
    assert same(checkpointer.load(2))
    checkpointer.verify()
    assert list(elsewhere.iterdir()) == []
    assert tl.Checkpointer(tmp_path / "here" / "run", process_group=False).steps() == [1, 2]
    assert str(checkpointer.directory) == "run"
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "empty").mkdir()
    empty = tl.Checkpointer("empty", process_group=False)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(FileNotFoundError) as caught:
        empty.load()
    assert str(caught.value) == f"{tmp_path}/here/empty has no checkpoint yet"
    assert caught.value.filename == f"{tmp_path}/here/empty"


@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
def test_dcp(tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    Path("disk").mkdir()
    writer = tl.dcp.StorageWriter("run", volumes=["disk"])
    reader = tl.dcp.StorageReader("run")
    monkeypatch.chdir(elsewhere)
    dcp.save(STATE, storage_writer=writer)
    found = {"x": torch.zeros_like(STATE["x"])}
    dcp.load(found, storage_reader=reader)
    assert same(found)
    assert list(elsewhere.iterdir()) == []
    assert len(list((tmp_path / "here" / "disk").glob("*.shard"))) == 1


def test_a_volume(tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("disk0", "disk1"):
        Path(name).mkdir()
    volume = tl.Volume(["disk0", "disk1"])
    monkeypatch.chdir(elsewhere)
    with volume.open("file", "w") as file:
        file.pwrite(b"x" * 10_000)
    assert volume.list() == ["file"]
    assert volume.directories == [str(tmp_path / "here" / name) for name in ("disk0", "disk1")]
    assert list(elsewhere.iterdir()) == []


def test_what_lightning_removes_later(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    plugin = tl.lightning.CheckpointIO(background=True)
    plugin.save_checkpoint(STATE, "old.ckpt")
    plugin.save_checkpoint(STATE, "new.ckpt")
    (elsewhere / "old.ckpt").write_bytes(b"of another run")
    plugin._to_remove.clear()
    monkeypatch.setattr(plugin, "_settle", lambda: None)  # as while the save is under way
    plugin.remove_checkpoint("old.ckpt")
    monkeypatch.undo()
    os.chdir(elsewhere)
    try:
        plugin.teardown()
    finally:
        os.chdir(tmp_path)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["new.ckpt"]
    assert (elsewhere / "old.ckpt").exists()


TAKE_PATHS: dict[str, Callable[[Any], Any]] = {
    "directory": lambda path: tl.Checkpointer(path, process_group=False),
    "volumes": lambda path: tl.Checkpointer("run", volumes=[path], process_group=False),
    "path": lambda path: tl.save(STATE, f"{path}/a.pt"),
    "path ": lambda path: tl.save_async(STATE, f"{path}/a.safetensors"),
    "path  ": lambda path: tl.load(f"{path}/a.pt"),
    "path   ": lambda path: tl.dcp.StorageWriter(path),
    "path    ": lambda path: tl.dcp.StorageReader(path),
    "volumes[0]": lambda path: tl.dcp.StorageWriter("run", volumes=[path]),
    "checkpoint_id": lambda path: tl.dcp.StorageWriter().reset(path),
}


@pytest.mark.parametrize("argument", TAKE_PATHS)
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("s3://bucket/run", "s3://bucket/.* is a URL.*; use a path on a mounted filesystem, and copy"),
        ("hf+x://bucket", "hf.x://bucket.* is a URL"),
        (Path("s3://bucket/run"), "s3:/bucket/.* is a URL"),
        ("file:///run", "file:///run.* is a URL.*; pass the path without file://$"),
        ("~/run", r"~/run.* begins with ~, .*; pass os.path.expanduser\('~/run"),
        ("~", r"~.* begins with ~, .*; pass os.path.expanduser\('~"),
        ("~root/run", r"~root/run.* begins with ~root, .*; pass os.path.expanduser"),
    ],
)
def test_what_would_be_saved_into_a_folder_of_a_strange_name(
    tmp_path: Path, elsewhere: Path, argument: str, path: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(argument.strip())}: {says}"):
        TAKE_PATHS[argument](path)
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("argument", TAKE_PATHS)
def test_a_user_without_a_home_gets_no_folder_of_that_name(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    def no_entry(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    says = r"~.* begins with ~, .* none is known: HOME is not set, .* Pass an absolute path"
    for path in ("~/run", "~"):
        with pytest.raises(ValueError, match=rf"^{re.escape(argument.strip())}: {says}"):
            TAKE_PATHS[argument](path)
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("name", ["~", "s3:", "~root"])
def test_a_directory_of_a_strange_name_is_used_if_it_exists(elsewhere: Path, name: str) -> None:
    tl.Checkpointer(f"./{name}/run", process_group=False).save(1, STATE, block=True)
    assert tl.Checkpointer(f"{name}/run", process_group=False).steps() == [1]
    tl.save(STATE, f"{name}/a.pt")
    assert same(tl.load(f"{name}/a.pt"))
    assert Path("./" + name, "a.pt").exists()
    with pytest.raises(ValueError, match="is a URL"):
        tl.save(STATE, "s3://a.pt")


@pytest.mark.parametrize("name", ["~backup.pt", "a:b.pt", "x:/a.pt", "~no-such-user/a.pt"])
def test_a_name_that_only_looks_strange(elsewhere: Path, name: str) -> None:
    Path("./" + name).parent.mkdir(exist_ok=True)
    tl.save(STATE, name)
    assert same(tl.load(name))


DELETED = """
import torch.distributed.checkpoint  # which needs a working directory
import os, sys
import trunkline as tl

os.chdir(sys.argv[1])
os.rmdir(sys.argv[1])
for argument, use in {
    "path": lambda path: tl.save({}, path),
    "path ": lambda path: tl.save_async({}, path),
    "directory": tl.Checkpointer,
    "volumes": lambda path: tl.Checkpointer("/run", volumes=[path]),
    "path  ": tl.dcp.StorageWriter,
    "path   ": tl.dcp.StorageReader,
    "volumes[0]": lambda path: tl.dcp.StorageWriter("/run", volumes=[path]),
}.items():
    try:
        use("a.pt")
    except tl.Error as error:
        assert isinstance(error, FileNotFoundError), type(error)
        expected = f"{argument.strip()}: a.pt is relative, but the working directory"
        assert str(error).startswith(expected), error
    else:
        raise AssertionError(argument)
"""


def test_a_working_directory_that_was_removed(tmp_path: Path, run_script: Callable[..., str]) -> None:
    (tmp_path / "gone").mkdir()
    run_script(DELETED, str(tmp_path / "gone"))


def test_an_empty_path() -> None:
    with pytest.raises(FileNotFoundError, match="path: is an empty string; pass a path"):
        tl.save(STATE, "")
    with pytest.raises(FileNotFoundError, match="directory: is an empty string; pass a path"):
        tl.Checkpointer("", process_group=False)
    with pytest.raises(FileNotFoundError, match="volumes: is an empty string; pass a path"):
        tl.Checkpointer("run", volumes=[""], process_group=False)


def test_ranks_in_different_directories(tmp_path: Path) -> None:
    with RankProcesses(2) as ranks:
        for rank in range(2):
            (tmp_path / str(rank)).mkdir()
            ranks.one(rank, "change_directory", str(tmp_path / str(rank)))
        failed = ranks.failures("open", "run", timeout=60)
        assert len(failed) == 2
        for error in failed.values():
            assert error.is_ours
            assert f"rank 1 opens {tmp_path}/1/run and rank 0 opens {tmp_path}/0/run" in error.message
        for rank in range(2):
            ranks.one(rank, "change_directory", str(tmp_path))
        ranks.all("open", "run")
        ranks.one(1, "change_directory", "/")
        ranks.all("save", 1, {"seed": 1}, block=True)
    assert tl.Checkpointer(tmp_path / "run", process_group=False).steps() == [1]


def in_thread(call: Callable[[], None]) -> BaseException | None:
    """Call it in a thread, as dcp.async_save() does with what follows the call, and return its exception."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


def test_a_checkpoint_id_of_an_async_save_does_not_follow(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = tl.dcp.StorageWriter()
    assert in_thread(lambda: writer.reset("run/last")) is None
    monkeypatch.chdir(elsewhere)
    assert in_thread(lambda: writer.reset(tmp_path / "absolute")) is None
    error = in_thread(lambda: writer.reset("run/last"))
    assert isinstance(error, ValueError)
    assert str(error).startswith(
        "checkpoint_id: run/last is relative, and while the save runs in the background it is not known "
        f"which working directory it is relative to ({elsewhere} or {tmp_path / 'here'}); pass an absolute "
        "path"
    )
    writer.reset("run/last")  # of save(), in the thread that calls it
    assert writer._directory == elsewhere / "run" / "last"


@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
def test_a_checkpoint_id_is_relative_to_where_async_save_was_called(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, reset = threading.Event(), tl.dcp.StorageWriter.reset

    def late_reset(writer: tl.dcp.StorageWriter, *args: Any) -> None:
        assert begin.wait(60)
        reset(writer, *args)

    monkeypatch.setattr(tl.dcp.StorageWriter, "reset", late_reset)
    writer = tl.dcp.StorageWriter()
    monkeypatch.chdir(elsewhere)
    save = torch_dcp.async_save(STATE, checkpoint_id="run/1", storage_writer=writer, no_dist=True)
    monkeypatch.chdir(tmp_path / "here")
    begin.set()
    save.result()
    assert (elsewhere / "run" / "1" / "dcp.manifest").exists()
    assert not Path("run").exists()

    monkeypatch.chdir(elsewhere)
    refusing = tl.dcp.StorageWriter(overwrite=False)
    failed = torch_dcp.async_save(STATE, checkpoint_id="run/1", storage_writer=refusing, no_dist=True)
    assert failed.exception() is not None  # which holds the copy
    monkeypatch.chdir(tmp_path / "here")
    torch_dcp.async_save(STATE, checkpoint_id="other", storage_writer=refusing, no_dist=True).result()
    assert (tmp_path / "here" / "other" / "dcp.manifest").exists()

    begin.clear()
    saves = []
    for directory in (elsewhere, tmp_path / "here"):
        monkeypatch.chdir(directory)
        save = torch_dcp.async_save(STATE, checkpoint_id="run/2", storage_writer=writer, no_dist=True)
        saves.append(save)
    begin.set()
    for save in saves:
        save.result()
    assert (elsewhere / "run" / "2" / "dcp.manifest").exists()
    assert (tmp_path / "here" / "run" / "2" / "dcp.manifest").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
def test_a_checkpoint_id_of_another_stager_is_of_no_other_save(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, write_data = threading.Event(), tl.dcp.StorageWriter.write_data

    def late_write(writer: tl.dcp.StorageWriter, *args: Any) -> Any:
        assert begin.wait(60)
        return write_data(writer, *args)

    monkeypatch.setattr(tl.dcp.StorageWriter, "write_data", late_write)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    writer = tl.dcp.StorageWriter()
    first = torch_dcp.async_save(STATE, checkpoint_id="last", storage_writer=writer, no_dist=True)
    monkeypatch.chdir(elsewhere)
    second = torch_dcp.async_save(
        STATE, checkpoint_id="last", storage_writer=writer, async_stager=stager, no_dist=True
    )
    with pytest.raises(ValueError, match="last is relative, and while the save runs in the background"):
        second.result(60)
    begin.set()
    first.result(60)
    assert (tmp_path / "here" / "last" / "dcp.manifest").exists()
    assert not Path("last").exists()


def test_a_writer_that_torch_sends_says_where_it_may_have_been_used(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stager that is not the writer, torch sends it some time after the call."""
    writer = tl.dcp.StorageWriter()
    sent: list[bytes] = []
    monkeypatch.chdir(elsewhere)
    assert in_thread(lambda: sent.append(pickle.dumps(writer))) is None
    with pytest.raises(ValueError, match=f"{elsewhere} or {tmp_path / 'here'}"):
        pickle.loads(sent[0]).reset("run/last")


def test_a_checkpoint_id_in_the_process_of_async_saves(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = tl.dcp.StorageWriter()
    monkeypatch.chdir(elsewhere)
    sent = pickle.dumps(writer)  # by the call of async_save()
    monkeypatch.chdir(tmp_path)  # where the other process was started
    received = pickle.loads(sent)
    received.reset("run/last")
    assert received._directory == elsewhere / "run" / "last"
    received.reset(tmp_path / "run")
    assert received._directory == tmp_path / "run"
    monkeypatch.chdir(tmp_path / "here")
    received.reset("run/last")  # this process goes where it wants
    assert received._directory == tmp_path / "here" / "run" / "last"
