"""Full disks: saves fail cleanly, what was there before stays, and saving works when there is room again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("space_levels.py")


@pytest.mark.parametrize("filesystem", ["ext4", "tmpfs"])
def test_a_full_disk_at_twenty_levels(filesystem: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    probe = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"mounting is refused here: {probe.stderr.decode()}")
    result = subprocess.run(
        ["unshare", "--mount", sys.executable, SCRIPT, filesystem],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for way, counts in json.loads(result.stdout).items():
        # The levels are where it matters: most fail, and there is one at which it fits.
        assert counts["failed"] >= 10, way
        assert counts["failed"] + counts.get("saved", 0) == 20, way
