"""The example of generating within half the memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_example_says_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/larger_than_memory.py"), "--size", "100MB", "--json"]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env=os.environ | {"TRUNKLINE_CACHE": str(tmp_path / "cache")},  # where no pack may stay
    )
    result = json.loads(done.stdout)
    assert result["budget_bytes"] == result["weight_bytes"] // 2
    stats = result["streamed"]["stats"]
    assert stats["memory_bytes"] <= result["budget_bytes"]
    assert stats["streamed_bytes"] >= result["weight_bytes"] // 2
    assert result["streamed"]["memory_bytes"] < result["in_memory"]["memory_bytes"]
    assert list(tmp_path.iterdir()) == []
