"""Scripts that print what they counted as JSON."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def counts_of(script: Path, *arguments: str, own_mounts: bool = False) -> Any:
    """Run it, with mounts of its own if asked to; it must succeed."""
    result = subprocess.run(
        [*(["unshare", "--mount"] if own_mounts else []), sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
