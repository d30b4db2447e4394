"""What a killed save leaves beside its target goes with the next save there, and nothing else does."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import trunkline as tl

TEMPORARY = re.compile(r"\.trunkline-[0-9a-f]{16}\.tmp")

# Begins a save whose writes are held, and says so.
SAVER = """
import sys, torch, trunkline as tl
faults = tl.Faults()
engine = tl.Engine("threads", faults=faults)
faults.hold("write", 0, 1 << 40)
handle = tl.save_async({"x": torch.ones(3_000_000)}, "PATH", engine=engine)
handle.wait_staged()
print("saving", flush=True)
sys.stdin.readline()
faults.release()
handle.wait()
"""


@contextmanager
def saver(directory: Path, name: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a process in the midst of a save; it ends when it is told to."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER.replace("PATH", name)],
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def temporaries(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if TEMPORARY.fullmatch(path.name)]


def require_removal(directory: Path) -> None:
    """Skip where nothing is removed: the filesystem has no locks, or is not this machine's alone."""
    probe = directory / ".trunkline-00000000000000aa.tmp"
    probe.touch()
    tl.save({"x": torch.ones(3)}, directory / "probe.pt")
    (directory / "probe.pt").unlink()
    if probe.exists():
        probe.unlink()
        pytest.skip("nothing is removed on this filesystem")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("name", ["next.pt", "next.safetensors"])
def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path, how: int, name: str) -> None:
    require_removal(tmp_path)
    tl.save({"x": torch.zeros(3)}, tmp_path / "big.pt")
    with saver(tmp_path, "big.pt") as process:
        assert len(temporaries(tmp_path)) == 1
        process.send_signal(how)
        process.wait(60)
    assert len(temporaries(tmp_path)) == 1
    tl.save({"x": torch.ones(3)}, tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"big.pt", name}
    assert torch.equal(tl.load(tmp_path / "big.pt")["x"], torch.zeros(3))


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    require_removal(tmp_path)
    with saver(tmp_path, "theirs.pt") as process:
        written = temporaries(tmp_path)
        assert len(written) == 1
        for _ in range(3):
            tl.save({"x": torch.ones(3)}, tmp_path / "mine.pt")
        assert temporaries(tmp_path) == written
        process.communicate("go on\n", timeout=60)
        assert process.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"mine.pt", "theirs.pt"}
    assert torch.equal(tl.load(tmp_path / "theirs.pt")["x"], torch.ones(3_000_000))


def test_a_save_leaves_another_of_the_same_process_alone(tmp_path: Path) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        faults.hold("write", 0, 1 << 40)
        handle = tl.save_async({"x": torch.ones(3_000_000)}, tmp_path / "first.pt", engine=engine)
        tl.save({"x": torch.zeros(3)}, tmp_path / "second.pt")
        faults.release()
        handle.wait(60)
    assert {path.name for path in tmp_path.iterdir()} == {"first.pt", "second.pt"}
    assert torch.equal(tl.load(tmp_path / "first.pt")["x"], torch.ones(3_000_000))


def test_a_forked_child_leaves_what_its_parent_saves_alone(tmp_path: Path) -> None:
    code = SAVER.replace("PATH", "theirs.pt").replace(
        "sys.stdin.readline()",
        """
import os
child = os.fork()
if child == 0:
    tl.save({"x": torch.zeros(3)}, "childs.pt")
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
""",
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert {path.name for path in tmp_path.iterdir()} == {"childs.pt", "theirs.pt"}
    assert torch.equal(tl.load(tmp_path / "theirs.pt")["x"], torch.ones(3_000_000))


def test_nothing_but_temporary_files_is_removed(tmp_path: Path) -> None:
    foreign = [
        *(".trunkline-0123456789abcde.tmp", ".trunkline-0123456789abcdef.tmp.bak", ".trunkline-x.tmp"),
        *("trunkline-0123456789abcdef.tmp", ".trunkline-0123456789ABCDEF.tmp"),
    ]
    for name in foreign:
        (tmp_path / name).write_text("not of a save")
    (tmp_path / ".trunkline-00000000000000ff.tmp").mkdir()
    (tmp_path / ".trunkline-00000000000000fe.tmp").symlink_to("file.pt")
    before = {path.name for path in tmp_path.iterdir()}
    tl.save({"x": torch.ones(3)}, tmp_path / "file.pt")
    assert {path.name for path in tmp_path.iterdir()} == before | {"file.pt"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list any directory")
def test_a_directory_that_cannot_be_listed_can_be_saved_to(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o300)
    try:
        tl.save({"x": torch.ones(3)}, folder / "file.pt", durable=False)
        assert (folder / "file.pt").exists()
    finally:
        folder.chmod(0o700)
