#!/usr/bin/env python3
"""Use an installed trunkline as a user would: import it, save and load, read a file, run the command.

    python scripts/check_wheel.py

Run it with the interpreter of an environment that has the wheel and numpy, and nothing else of this project;
scripts/release.sh does. Prints one line; exits with 1 and a traceback if something is wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import trunkline as tl
from trunkline import _core


def check_files(folder: Path) -> None:
    """Tensors in a file and in a checkpoint, and raw bytes, come back as they were."""
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {
        "weight": rng.random((1000, 300), np.float32),
        "step": np.arange(7),
        "empty": np.zeros((0, 3)),
    }
    tl.save(state, folder / "state.safetensors")
    loaded = tl.load(folder / "state.safetensors", framework="numpy")
    assert sorted(loaded) == sorted(state)
    assert all(np.array_equal(loaded[key], value) for key, value in state.items())
    checkpoints = tl.Checkpointer(folder / "run", keep=2)
    for step in range(3):
        checkpoints.save(step, {"model": state, "step": step})
    checkpoints.wait()
    assert checkpoints.latest() == 2
    assert np.array_equal(checkpoints.load()["model"]["weight"], state["weight"])

    with tl.open(folder / "raw", "w") as file:
        file.pwrite(state["weight"])
    back = np.empty_like(state["weight"])
    with tl.open(folder / "raw") as file:
        futures = [file.async_pread(back[at : at + 100], at * back.strides[0]) for at in range(0, 1000, 100)]
        assert sum(future.result() for future in futures) == back.nbytes
    assert np.array_equal(back, state["weight"])


def check_errors(folder: Path) -> None:
    """Errors that the extension module raises have their own texts, also those of calls."""
    message = error_of(FileNotFoundError, lambda: tl.open(folder / "missing"))
    assert "missing" in message, message
    with tl.open(folder / "raw") as file:
        call: Any = file.pread
        message = error_of(TypeError, lambda: call(bytearray(8), wrong=1))
    assert "wrong" in message, message
    assert "incompatible function arguments" not in message, message


def error_of(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the error that the call must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def check_command(folder: Path) -> None:
    """The program in the wheel runs."""
    command = [sys.executable, "-m", "trunkline"]
    subprocess.run([*command, "--version"], check=True, capture_output=True)
    arguments = ["bench", str(folder), "--size", "4MiB", "--block", "64KiB", "--repeat", "1", "--json"]
    done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
    assert len(json.loads(done.stdout)["results"]) == 4


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="trunkline-check-") as name:
        folder = Path(name)
        check_files(folder)
        check_errors(folder)
        check_command(folder)
    module = Path(_core.__file__).name
    print(f"Python {sys.version.split()[0]}, numpy {np.__version__}: {module} works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
