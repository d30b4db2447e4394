"""Random operations on directories of checkpoints agree with a model: see checkpointer_rounds.py."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("checkpointer_rounds.py")
ROUNDS = 12
KINDS = ("save: ok", "load: ok", "child")


@pytest.mark.parametrize("seed", [1, random.SystemRandom().getrandbits(32)], ids=["fixed", "random"])
def test_a_directory_of_checkpoints_is_what_the_model_says(tmp_path: Path, seed: int) -> None:
    where = ["--directory", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", str(ROUNDS), "--seed", str(seed), *where],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    missing = [kind for kind in KINDS if f'"{kind}"' not in done.stdout]
    assert not missing, f"seed {seed}: this shows nothing of {missing}"
