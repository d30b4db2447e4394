"""Container runtimes and filesystems that refuse system calls, or know fewer of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RunScript
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


def test_a_filesystem_that_can_name_no_file_safely_is_rejected(run_script: RunScript) -> None:
    """Such as those of object stores: neither flags of rename nor hard links."""
    run_script(
        """
        import errno, sys
        sys.path.insert(0, sys.argv[1])
        from support_seccomp import forbid
        forbid({"renameat2": errno.EINVAL, "link": errno.EPERM, "linkat": errno.ENOSYS})
        import torch
        import trunkline as tl

        tl.save({"a": torch.ones(3)}, "a.pt")
        assert torch.equal(tl.load("a.pt")["a"], torch.ones(3))
        try:
            tl.Checkpointer("run").save(1, {"a": torch.ones(3)}, block=True)
        except tl.Unsupported as error:
            assert "cannot create " in str(error), error
            assert "nor make hard links" in str(error), error
            assert "use another filesystem" in str(error), error
        else:
            raise AssertionError("saved")
        """,
        str(HERE),
    )


def test_two_machines_on_one_shared_directory() -> None:
    """Neither sees the other's locks: saves may fail, and nothing that was saved is lost."""
    why = why_not("fuse2fs")
    if why:
        pytest.skip(why)
    command = ["unshare", "--mount", sys.executable, str(HERE / "two_machines.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
