"""Filesystems other than those of most disks, and those that refuse to write.

Not f2fs, nor NFS from this machine to itself: few kernels that tests run on have either. What NFS lacks
(flags of rename, preallocation, locks between machines) is taken away in test_sandboxes.py. Devices that are
slow or silent are posed by FUSE (test_checkpoint_hung.py) and by held operations (test_hung_device.py): the
device mapper, which dm-delay needs, is missing from such kernels too.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from support_loop import why_not

SCRIPT = Path(__file__).with_name("filesystem_checks.py")


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        *(("saves", kind) for kind in ("xfs", "btrfs", "vfat", "fuse2fs")),
        ("read-only", "ext4"),
        ("quota", "btrfs"),
        ("too-large", "vfat"),
    ],
)
def test_saving(check: str, kind: str) -> None:
    why = why_not(kind)
    if why:
        pytest.skip(why)
    command = ["unshare", "--mount", sys.executable, str(SCRIPT), check, kind]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
