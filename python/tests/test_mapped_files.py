"""Files that tl.load(mmap=True) has mapped: truncating them in place, and saving over them.

A page beyond the end of a mapped file cannot be read: the kernel ends the process with SIGBUS. No library can
make an error of it without a signal handler for the whole process. So the test holds what the documentation
says, and that the files of before are whole after such an end.
"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import trunkline as tl

FLOATS = 1 << 20


def test_saving_over_a_mapped_file_leaves_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "mapped.pt"
    tl.save({"x": torch.ones(FLOATS)}, path)
    mapped = tl.load(path, mmap=True)["x"]
    tl.save({"x": torch.zeros(3)}, path)
    assert torch.equal(mapped, torch.ones(FLOATS))
    assert torch.equal(tl.load(path)["x"], torch.zeros(3))


def test_mapped_tensors_are_saved_over_their_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mapped.pt"
    tl.save({"x": torch.arange(float(FLOATS))}, path)
    mapped = tl.load(path, mmap=True)
    mapped["y"] = torch.ones(3)
    tl.save(mapped, path)
    assert torch.equal(tl.load(path)["x"], torch.arange(float(FLOATS)))


@pytest.mark.parametrize(
    "use",
    [
        "float(mapped['x'].sum())",
        "tl.save(mapped, 'before.pt')",
        "tl.Checkpointer('run', process_group=False, keep=1).save(2, mapped, block=True)",
    ],
)
def test_a_truncated_mapping_ends_the_process_and_nothing_else(tmp_path: Path, use: str) -> None:
    before = {"x": torch.full((3,), 7.0)}
    tl.save({"x": torch.ones(FLOATS)}, tmp_path / "mapped.pt")
    tl.save(before, tmp_path / "before.pt")
    tl.Checkpointer(tmp_path / "run", process_group=False).save(1, before, block=True)
    code = f"""
        import os
        import resource
        import trunkline as tl
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        mapped = tl.load("mapped.pt", mmap=True)
        os.truncate("mapped.pt", {FLOATS})
        {use}
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, check=False, timeout=120)
    assert done.returncode == -signal.SIGBUS
    assert torch.equal(tl.load(tmp_path / "before.pt")["x"], before["x"])
    tl.save(before, tmp_path / "after.pt")  # and removes what the dead process was writing
    assert sorted(os.listdir(tmp_path)) == ["after.pt", "before.pt", "mapped.pt", "run"]  # noqa: PTH208
    checkpointer = tl.Checkpointer(tmp_path / "run", process_group=False)
    assert torch.equal(checkpointer.load()["x"], before["x"])
