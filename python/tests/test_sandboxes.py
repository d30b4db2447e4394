"""Container runtimes and filesystems that refuse system calls, or know fewer of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from sandboxed import SANDBOXES
from support_loop import why_not

HERE = Path(__file__).parent


@pytest.mark.parametrize("sandbox", [name for name in SANDBOXES if name != "two-machines"])
def test_saving_and_loading(tmp_path: Path, sandbox: str) -> None:
    for volume in ("v0", "v1"):
        (tmp_path / volume).mkdir()
    command = [sys.executable, str(HERE / "sandboxed.py"), str(tmp_path), sandbox]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_two_machines_on_one_shared_directory() -> None:
    """Neither sees the other's locks: saves may fail, and nothing that was saved is lost."""
    why = why_not("fuse2fs")
    if why:
        pytest.skip(why)
    command = ["unshare", "--mount", sys.executable, str(HERE / "two_machines.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
