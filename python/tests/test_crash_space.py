"""Full disks: saves fail cleanly, what was there before stays, and saving works when there is room again."""

import os
import subprocess
from pathlib import Path

import pytest
from support_counts import counts_of

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
    for way, counts in counts_of(SCRIPT, filesystem, own_mounts=True).items():
        # The levels are where it matters: most fail, and there is one at which it fits.
        assert counts["failed"] >= 10, way
        assert counts["failed"] + counts.get("saved", 0) == 20, way
