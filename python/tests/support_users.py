"""Programs that run as other users, and directories that these reach."""

import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import support_warm

NOBODY = 65534

# Everything is imported before the privileges go: the interpreter may lie where other users see nothing.
_DROP_PRIVILEGES = """
import os, sys, tempfile
import torch
import trunkline as tl
import trunkline.dcp
with tempfile.TemporaryDirectory() as directory:
    for name in ("a.pt", "a.safetensors"):
        tl.save({"weight": torch.ones(9)}, os.path.join(directory, name))
        tl.load(os.path.join(directory, name))
user, groups, umask = int(sys.argv[1]), [int(group) for group in sys.argv[2].split(",")], int(sys.argv[3])
del sys.argv[1:4]
os.chdir("/")
os.umask(umask)
if user != os.geteuid():
    os.setgroups(groups[1:])
    os.setresgid(*groups[:1] * 3)
    os.setresuid(user, user, user)
"""


@contextmanager
def open_directory() -> Iterator[Path]:
    """Make a directory that every user reaches; pytest's own are for its user alone."""
    directory = Path(tempfile.mkdtemp(prefix="trunkline-users-"))
    try:
        directory.chmod(0o755)
        yield directory
    finally:
        shutil.rmtree(directory)


def run_as(
    code: str,
    *arguments: "str | Path",
    user: int = NOBODY,
    groups: Sequence[int] = (NOBODY,),
    umask: int = 0o022,
) -> str:
    """Run Python code as another user (root only), `groups[0]` being his own; returns what it printed.

    `os`, `sys`, `torch` and `tl` are imported.
    """
    identity = [str(user), ",".join(map(str, groups)), str(umask)]
    program = _DROP_PRIVILEGES + textwrap.dedent(code)
    result = support_warm.run(["-c", program, *identity, *arguments], modules=support_warm.TORCH_DCP)
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def run_without_privileges(code: str, *arguments: "str | Path", directory: Path) -> str:
    """Run Python code as run_as() does, as a user whom permissions bind, and who owns `directory`."""
    if os.geteuid() != 0:
        return run_as(code, *arguments, user=os.geteuid(), groups=[os.getegid()])
    os.chown(directory, NOBODY, NOBODY)
    return run_as(code, *arguments)
