"""Files that may be written but not replaced by a rename: the error comes before anything is written."""

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support_users import open_directory, run_as

import trunkline as tl

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and changing owners need root")

# What save_async() raises, and not its handle, was found before anything was written.
ATTEMPTS = """
import errno, os, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
import trunkline as tl

warnings.simplefilter("ignore")
def attempts(path):
    state = {"weight": torch.ones(1000)}
    for save in (tl.save, tl.save_async):
        try:
            handle = save(state, path)
        except tl.Error as error:
            print(errno.errorcode[error.errno], error.filename, error)
            continue
        if handle is not None:
            handle.wait()
        print("saved")
def sharded(directory):
    before = sorted(os.listdir(directory))
    writer = tl.dcp.StorageWriter(directory, overwrite=True)
    # What the save calls before it writes; dcp.save would wrap the error.
    writer.set_up_storage_writer(True)
    try:
        writer.prepare_local_plan(dcp.SavePlan([]))
        print("prepared")
    except tl.Error as error:
        print(errno.errorcode[error.errno], error.filename, error)
    assert sorted(os.listdir(directory)) == before
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with open_directory() as directory:
        yield directory


@root_only
def test_a_file_that_is_mounted_by_itself(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    source, path = tmp_path / "source.pt", tmp_path / "inside" / "a.pt"
    manifest = path.with_name("dcp.manifest")
    path.parent.mkdir()
    tl.save({"weight": torch.zeros(9)}, source)
    before = source.read_bytes()
    for each in (path, manifest):
        each.touch()
    script = tmp_path / "script.py"
    script.write_text(f"{ATTEMPTS}\nattempts(sys.argv[1])\nsharded(os.path.dirname(sys.argv[1]))\n")
    command = 'mount --bind "$0" "$1" && mount --bind "$0" "$2" && exec "$3" "$4" "$1"'
    arguments = [source, path, manifest, sys.executable, script]
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "mount:" in result.stderr:
        pytest.skip(f"no bind mounts here: {result.stderr}")
    assert result.returncode == 0, result.stderr
    *single, sharded = result.stdout.splitlines()
    assert [line.split()[:2] for line in single] == [["EBUSY", str(path)]] * 2
    assert sharded.split()[:2] == ["EBUSY", str(manifest)]
    for line in (*single, sharded):
        assert "is a mount point" in line
        assert "mount the directory" in line
    assert source.read_bytes() == before
    assert sorted(each.name for each in path.parent.iterdir()) == ["a.pt", "dcp.manifest"]


STICKY = """
for name, directory_owner, file_owner, user in CASES:
    directory = os.path.join(sys.argv[1], name)
    path, manifest = (os.path.join(directory, file) for file in ("a.pt", "dcp.manifest"))
    os.mkdir(directory)
    tl.save({}, path)
    tl.save({}, manifest + ".pt")
    os.rename(manifest + ".pt", manifest)
    for each in (path, manifest):
        os.chown(each, file_owner, file_owner)
        os.chmod(each, 0o666)
    os.chown(directory, directory_owner, directory_owner)
    os.chmod(directory, 0o1777)
    before = open(path, "rb").read()
    os.seteuid(user)  # of all threads
    print("case", name)
    attempts(path)
    sharded(directory)
    os.seteuid(0)
    print("kept" if open(path, "rb").read() == before else "replaced", *sorted(os.listdir(directory)))
"""
CASES = [
    ("as-in-tmp", 0, 1001, 1002),
    ("own-file", 0, 1002, 1002),
    ("own-directory", 1002, 1001, 1002),
    ("root", 1001, 1001, 0),
]


@root_only
def test_another_users_file_in_a_sticky_directory(place: Path) -> None:
    printed = run_as(f"CASES = {CASES!r}\n{ATTEMPTS}{STICKY}", place, user=0, groups=[0])
    refused, *allowed = (case.splitlines() for case in printed.split("case ")[1:])
    assert [lines[0] for lines in allowed] == ["own-file", "own-directory", "root"]
    for lines in allowed:
        assert lines[1:] == ["saved", "saved", "prepared", "replaced a.pt dcp.manifest"]
    directory = place / refused[0]
    assert refused[-1] == "kept a.pt dcp.manifest"
    assert [line.split()[:2] for line in refused[1:-1]] == [
        ["EPERM", str(directory / name)] for name in ("a.pt", "a.pt", "dcp.manifest")
    ]
    for line in refused[1:-1]:
        assert f"in the sticky directory {directory} " in line
        assert "another user (uid 1001)" in line


ASIDE = """
import errno
checkpointer = tl.Checkpointer(sys.argv[1], fresh=True, process_group=False)
os.seteuid(1002)
try:
    checkpointer.save(1, {"x": 1}, block=True)
except tl.Error as error:
    print(errno.errorcode[error.errno], error)
"""


@root_only
def test_fresh_moves_nothing_where_it_cannot_move_all(place: Path) -> None:
    run = place / "run"
    for step in (1, 2):
        tl.Checkpointer(run, keep=None, process_group=False).save(step, {"x": 0}, block=True)
    for path in (run, *run.rglob("*")):
        os.chown(path, 1002, 1002)
    os.chown(run, 0, 0)
    run.chmod(0o1777)
    os.chown(run / "step-00000002", 1001, 1001)
    before = sorted(run.rglob("*"))
    printed = run_as(ASIDE, run, user=0, groups=[0])
    assert printed.startswith(f"EPERM saving step 1 to {run}: cannot set the checkpoints in {run} aside")
    assert "step-00000002: it belongs to another user (uid 1001)" in printed
    assert sorted(run.rglob("*")) == before


@root_only
def test_a_directory_that_is_append_only_gets_no_temporary_file(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.ioctl(directory, 0x40086602, struct.pack("l", 0x20))  # FS_IOC_SETFLAGS, FS_APPEND_FL
        except OSError as error:
            pytest.skip(f"no file attributes on this filesystem: {error}")
        try:
            with pytest.raises(tl.Error, match="append-only") as caught:
                tl.save({"weight": torch.ones(9)}, tmp_path / "a.pt")
        finally:
            fcntl.ioctl(directory, 0x40086602, struct.pack("l", 0))
    finally:
        os.close(directory)
    assert caught.value.errno == errno.EPERM
    assert not list(tmp_path.iterdir())
