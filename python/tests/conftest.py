"""Engines on every backend, and scripts in processes of their own."""

import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trunkline as tl

BACKENDS = ["io_uring", "libaio", "threads", "memory"]

# Runs a script in a fresh interpreter, with arguments; returns what it printed. It must exit with 0.
RunScript = Callable[..., str]


def make_engine(backend: str, **options: object) -> tl.Engine:
    """An engine on `backend`; skips the test where this machine refuses it."""
    try:
        return tl.Engine(backend, **options)  # type: ignore[arg-type]
    except tl.Unsupported as error:
        pytest.skip(f"{backend} is refused here: {error}")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend's name; skips those that this machine refuses."""
    name = str(request.param)
    make_engine(name).close()
    return name


@pytest.fixture
def new_engine(backend: str) -> Callable[..., tl.Engine]:
    """Make engines on each backend, with options as those of Engine."""
    return functools.partial(make_engine, backend)


@pytest.fixture
def engine(backend: str) -> Iterator[tl.Engine]:
    """A small engine on each backend: small blocks, so that short tests make many transfers."""
    with make_engine(backend, block_bytes="64KiB", queue_depth=4) as made:
        yield made


@pytest.fixture
def run_script(tmp_path: Path) -> RunScript:
    """Run Python code in a process of its own, in a temporary directory."""

    def run(code: str, *arguments: str, expect: int = 0) -> str:
        result = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == expect, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        assert result.stderr == "" or expect != 0, result.stderr
        return result.stdout

    return run
