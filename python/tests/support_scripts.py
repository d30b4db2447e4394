"""Runs Python code in a separate process, since modules read the environment when they are imported."""

import os
import subprocess
import sys


def run_code(code: str, *, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with further environment variables; with `check` its exit status must be 0."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not check or result.returncode == 0, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result
