"""What a type checker sees: the examples of the README and of docs/, and the types of results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import BLOCKS, ROOT

import trunkline as tl

pytest.importorskip("mypy")
pytest.importorskip("torch")
pytest.importorskip("transformers")

# Strict, except for what examples leave out for brevity, and what libraries do not declare.
OPTIONS = (
    *("--strict", "--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls"),
    *("--implicit-reexport", "--allow-subclassing-any", "--allow-any-generics"),
    *("--disable-error-code", "import-untyped", "--disable-error-code", "import-not-found"),
)
# Errors about annotations of torch, and dicts whose values mypy joins to `object`. None concerns our names.
OF_LIBRARIES = re.compile(
    r'"FSDPModule"|type "object"|\("object" and "int"\)|"DistributedDataParallel"|"Dataset\[Never\]"'
)


def errors(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "mypy", *OPTIONS, "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--no-error-summary"]
    done = subprocess.run(
        [*command, *sorted(each.name for each in folder.glob("*.py"))],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": note: " not in line]


def test_examples_have_no_type_errors(tmp_path: Path) -> None:
    for place, code in BLOCKS:
        (tmp_path / (re.sub(r"\W", "_", place) + ".py")).write_text(code, encoding="utf-8")
    found = errors(tmp_path)
    assert [line for line in found if not OF_LIBRARIES.search(line)] == []


def test_results_have_types(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        """
from typing import Any, assert_type

import numpy
import torch
import transformers
import trunkline as tl

Array = numpy.ndarray[Any, numpy.dtype[Any]]
arrays = tl.load("x.safetensors", framework="numpy")
assert_type(arrays, dict[str, Array])
assert_type(tl.open_tensors("x")["a"], torch.Tensor)
tl.save({"a": torch.ones(1), "b": arrays["b"]}, "y.safetensors")
writer = tl.dcp.StorageWriter("x")
assert_type(tl.Checkpointer("x").latest(), int | None)
try:
    tl.load("x")
except tl.FileNotFoundError as error:
    assert_type(error.errno, int | None)
    print(error.filename)
except tl.Corrupt as error:
    assert_type(error.tensor, str | None)
tl.load("x", framework="jax")
"""
    )
    [found] = errors(tmp_path)
    assert 'No overload variant of "load" matches' in found
    assert found.startswith("user.py:23: ")


ERRORS = (
    *("Error", "Cancelled", "Corrupt", "CutOff", "EndOfFile", "Format", "OutOfBudget", "Timeout"),
    *("Unsupported", "DeviceError", "RankError", "FileExistsError", "FileNotFoundError"),
    *("IsADirectoryError", "NotADirectoryError", "PermissionError"),
)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_public_names(name: str) -> None:
    kind = getattr(tl, name)
    assert (kind.__module__, kind.__qualname__) == ("trunkline", name)
