"""SIGKILL of a saving process: what was reported is there, whole, and saving goes on."""

from pathlib import Path

import pytest
from support_counts import counts_of

SCRIPT = Path(__file__).with_name("crash_rounds.py")
ROUNDS = 100
SEED = 20251


@pytest.mark.parametrize("options", [[], ["--incremental"]], ids=["whole", "incremental"])
def test_every_reported_save_survives_a_kill(tmp_path: Path, options: list[str]) -> None:
    counts = counts_of(
        *(SCRIPT, "kill", "--directory", str(tmp_path), *options),
        *("--rounds", str(ROUNDS), "--seed", str(SEED)),
    )
    assert counts["killed"] == ROUNDS
    # Some came while something was saved: else this shows nothing.
    assert counts["while_saving"] > 0
    assert counts["reported"] > 0
    assert (counts["linked"] > 0) == bool(options)
