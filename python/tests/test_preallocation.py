"""Writes that find no room: what was there before is there after."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support_loop import why_not

TESTS = Path(__file__).parent

# A filesystem of 96 MB or more, a third of it filled by others: a write of 400 MB finds room for a part.
BEGIN = """
import errno, os, sys
from contextlib import suppress
import trunkline as tl
from support_loop import LoopFilesystem

def room(path):
    os.sync()
    status = os.statvfs(path)
    return status.f_bfree * status.f_bsize

def used(path):
    return os.stat(path).st_blocks * 512

kind = sys.argv[1]
"""


def run_on_small_filesystem(body: str, kind: str) -> str:
    """Run a script with a separate mount namespace; return its output."""
    if reason := why_not(kind):
        pytest.skip(reason)
    result = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", BEGIN + textwrap.dedent(body), kind],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("old", [0, 3_000_001])
@pytest.mark.parametrize("submit", ["async_pwrite", "pwrite"])
def test_a_plain_file_is_as_long_as_before(kind: str, old: int, submit: str) -> None:
    printed = run_on_small_filesystem(
        f"""
        with LoopFilesystem(kind) as filesystem:
            path = filesystem.path / "file"
            with tl.open(path, "w") as file:
                if {old}:
                    file.pwrite(b"o" * {old})
                file.sync()
                before = room(filesystem.path), file.size
                data = bytes(400_000_000)
                for _ in range(3):
                    try:
                        moved = file.{submit}(data, {old})
                        print(moved if isinstance(moved, int) else moved.result())
                    except tl.Error as error:
                        assert error.errno == errno.ENOSPC, error
                        assert "cannot allocate" in str(error), error
                    assert file.size == before[1] == os.path.getsize(path)
                assert room(filesystem.path) >= before[0] - 65536, (room(filesystem.path), before)
                # The room that is there can be used, and nothing was cut off.
                assert file.pwrite(b"n" * 5_000_000, {old}) == 5_000_000
            with open(path, "rb") as file:
                assert file.read() == b"o" * {old} + b"n" * 5_000_000
            print("same")
        """,
        kind,
    )
    assert printed == "same\n"


@pytest.mark.parametrize("known_to_fail", [True, False])
def test_what_another_handle_wrote_stays(known_to_fail: bool) -> None:
    printed = run_on_small_filesystem(
        f"""
        with LoopFilesystem(kind) as filesystem:
            path = filesystem.path / "file"
            with tl.open(path, "w") as first, tl.open(path, "r+") as second:
                first.pwrite(b"a" * 20_000_001)  # the other handle was opened when the file was empty
                first.sync()
                before = room(filesystem.path), used(path)
                # ext4 counts some blocks as free to root that nobody can allocate. A write that needs some
                # of them passes the comparison with the free space, and its allocation stops half-way.
                status = os.statvfs(filesystem.path)
                reserved = status.f_bfree - status.f_bavail
                assert reserved > 100, reserved
                nbytes = (status.f_bavail + reserved // 2) * status.f_bsize
                if {known_to_fail}:
                    nbytes = 400_000_000
                try:
                    second.async_pwrite(bytes(nbytes), 20_000_001).result()
                    print("written")
                except tl.Error as error:
                    assert error.errno == errno.ENOSPC, error
                    assert "cannot allocate" in str(error), error
                assert first.size == second.size == os.path.getsize(path) == 20_000_001
                if {known_to_fail}:
                    assert (room(filesystem.path), used(path)) == before
                else:
                    assert used(path) > before[1] + 30_000_000  # it did get half-way
                # The next write of the same range uses the blocks that were allocated.
                assert second.async_pwrite(b"b" * 30_000_000, 20_000_001).result() == 30_000_000
                assert first.size == 50_000_001
            with open(path, "rb") as file:
                assert file.read() == b"a" * 20_000_001 + b"b" * 30_000_000
            print("same")
        """,
        "ext4",
    )
    assert printed == "same\n"


def test_members_of_a_striped_file_are_as_long_as_before() -> None:
    printed = run_on_small_filesystem(
        """
        with LoopFilesystem(kind) as small, LoopFilesystem(kind, 400 << 20) as large:
            volume = tl.Volume([large.path, small.path], stripe_bytes="64KiB")
            file = volume.open("file", "w")
            file.pwrite(b"o" * 3_000_001)
            file.sync()
            before = room(small.path), room(large.path)
            for _ in range(2):
                try:
                    file.async_pwrite(bytes(300_000_000), 1_000_000).result()
                except tl.Error as error:
                    assert error.errno == errno.ENOSPC, error
                assert file.size == 3_000_001
            for was, now in zip(before, (room(small.path), room(large.path))):
                assert now >= was - 65536, (was, now)
            file.close()
            with volume.open("file", "r+") as file:  # their sizes fit each other
                target = bytearray(3_000_001)
                file.pread(target)
                assert target == b"o" * 3_000_001
                assert file.pwrite(b"n" * 5_000_000) == 5_000_000
            print("same")
        """,
        "ext4",
    )
    assert printed == "same\n"
