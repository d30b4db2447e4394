"""SIGKILL of a saving process: what was reported is there, whole, and saving goes on."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("crash_rounds.py")
ROUNDS = 100
SEED = 20251


def test_every_reported_save_survives_a_kill(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, SCRIPT, "kill", "--directory", str(tmp_path)),
            *("--rounds", str(ROUNDS), "--seed", str(SEED)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert counts["killed"] == ROUNDS
    # Some came while something was saved: else this shows nothing.
    assert counts["while_saving"] > 0
    assert counts["reported"] > 0
