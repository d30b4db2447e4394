"""Power failures during saves: what was reported is there, whole, and saving goes on."""

import errno
import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support_counts import counts_of

TESTS = Path(__file__).parent
# Chosen anew by hand: python/tests/crash_rounds.py. Here the same in each run, but for what timing brings.
SEED = 20250


@functools.cache
def why_not(kind: str) -> str:
    """Check, in a process with a separate mount namespace, whether such filesystems can be mounted."""
    code = f"import support_loop; print(support_loop.why_not({kind!r}))"
    try:
        result = subprocess.run(
            ["unshare", "--mount", sys.executable, "-c", code],
            cwd=TESTS,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except OSError as error:
        return str(error)
    return result.stdout.strip() if result.returncode == 0 else result.stderr.strip() or "unshare failed"


@pytest.mark.parametrize(
    ("scenario", "kinds", "rounds", "options"),
    [
        ("ext4", ["ext4"], 40, []),
        ("ext4", ["ext4"], 30, ["--incremental"]),
        ("xfs", ["xfs"], 36, []),
        ("xfs", ["xfs"], 24, ["--incremental"]),
        ("volumes", ["ext4", "xfs"], 24, []),
        ("volumes", ["ext4", "xfs"], 24, ["--incremental"]),
    ],
)
def test_every_reported_save_survives_a_power_failure(
    scenario: str, kinds: list[str], rounds: int, options: list[str]
) -> None:
    for kind in kinds:
        if reason := why_not(kind):
            pytest.skip(reason)
    counts = counts_of(
        *(TESTS / "crash_rounds.py", scenario, *options, "--rounds", str(rounds), "--seed", str(SEED)),
        own_mounts=True,
    )
    cuts = sum(counts.get(how, 0) for how in ("flush_all", "flush_log", "flush_nothing"))
    assert cuts == rounds
    # Some came while something was saved: else this shows nothing.
    assert counts["while_saving"] > 0
    assert counts["reported"] > 0
    assert (counts["linked"] > 0) == bool(options)


def test_a_directory_of_a_filesystem_that_is_down_is_not_durable() -> None:
    """XFS that has shut itself down finds nothing left to write, and fsync(2) of a directory succeeds."""
    if reason := why_not("xfs"):
        pytest.skip(reason)
    code = """
        from support_loop import FLUSH_NOTHING, LoopFilesystem
        from trunkline import Error, _core

        with LoopFilesystem("xfs") as filesystem:
            (filesystem.path / "old").write_text("1")
            _core.fsync_directory(filesystem.path)
            (filesystem.path / "new").write_text("2")
            (filesystem.path / "new").rename(filesystem.path / "old")
            filesystem.shut_down(FLUSH_NOTHING)
            try:
                _core.fsync_directory(filesystem.path)
            except Error as error:
                print(error.errno, error.filename == str(filesystem.path))
    """
    result = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", textwrap.dedent(code)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == f"{errno.EIO} True\n", result.stderr
