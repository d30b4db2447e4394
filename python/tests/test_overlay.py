"""overlayfs, the filesystem of containers: over a disk and over memory, whichever way the bytes go there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
import trunkline as tl

merged = Path(sys.argv[1])
data = os.urandom(3_000_001)
with tl.open(merged / "new", "w") as file:
    file.pwrite(data)
    file.sync()
    back = bytearray(len(data))
    file.pread(back)
    assert back == data
# A file of the layer below moves up when it is opened for writing, and both descriptors must be of the copy.
with tl.open(merged / "below", "r+") as file:
    file.pwrite(data[:1_500_000], 10_000)
    file.sync()
expected = b"b" * 10_000 + data[:1_500_000] + b"b" * (2_000_000 - 1_510_000)
with tl.open(merged / "below") as file:
    back = bytearray(file.size)
    file.pread(back)
    assert back == expected
assert (merged / "below").read_bytes() == expected
# One that is replaced keeps its mode, and is not copied up before.
tl.save({"weight": torch.ones(9)}, merged / "below.pt")
assert (merged / "below.pt").stat().st_mode & 0o777 == 0o600
assert torch.equal(tl.load(merged / "below.pt")["weight"], torch.ones(9))
print(json.dumps(tl.default_engine().explain(merged / "new")))
"""


@pytest.mark.parametrize("upper", ["disk", "memory"])
def test_files_on_overlayfs(tmp_path: Path, upper: str) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting an overlay needs root and unshare")
    for name in ("lower", "merged", "top"):
        (tmp_path / name).mkdir()
    (tmp_path / "lower/below").write_bytes(b"b" * 2_000_000)
    (tmp_path / "lower/below.pt").write_bytes(b"b" * 1000)
    (tmp_path / "lower/below.pt").chmod(0o600)
    (tmp_path / "script.py").write_text(SCRIPT)
    mount_top = "mount -t tmpfs none top && " if upper == "memory" else ""
    layers = "lowerdir=lower,upperdir=top/upper,workdir=top/work"
    mount = f"{mount_top}mkdir top/upper top/work && mount -t overlay none -o {layers} merged"
    unshared = ["unshare", "--mount", "sh", "-c"]
    possible = subprocess.run([*unshared, mount], cwd=tmp_path, capture_output=True, text=True)
    if possible.returncode != 0:
        pytest.skip(f"no overlay can be mounted here: {possible.stderr.strip()}")
    shutil.rmtree(tmp_path / "top")
    (tmp_path / "top").mkdir()
    result = subprocess.run(
        [*unshared, f'{mount} && exec "$0" script.py merged', sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    way = json.loads(result.stdout)
    assert way["filesystem"] == "overlay"
    assert way["why"]
    assert (tmp_path / "lower/below").read_bytes() == b"b" * 2_000_000
