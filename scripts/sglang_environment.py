#!/usr/bin/env python3
"""Makes an environment with SGLang for python/tests/test_sglang.py, and prints the path of its Python.

It is kept in the cache directory (~/.cache/trunkline/sglang-...) under the digest of what is installed, which
has 1.5 GB and takes 75 seconds. Trunkline itself is not installed there: the tests add it.

    scripts/sglang_environment.py [--offline]      --offline: only one that is there; else exits with 1
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = [ROOT / "requirements" / name for name in ("torch.txt", "sglang.txt")]


def folder() -> Path:
    """Where the environment for the present requirements is, or would be."""
    contents = b"".join(each.read_bytes() for each in LISTS) + sys.version.encode()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "trunkline" / f"sglang-{hashlib.sha256(contents).hexdigest()[:16]}"


def make(target: Path) -> None:
    """Make the environment; it has its name only once it is complete."""
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    subprocess.run([sys.executable, "-m", "venv", partial], check=True, stdout=sys.stderr)
    try:
        constraints = ROOT / "requirements" / "constraints.txt"
        for each in LISTS:
            # torch as constraints.txt pins it, and nothing that SGLang asks for besides these lists.
            limits: list[str | Path] = ["-c", constraints] if each.name == "torch.txt" else []
            options: list[str | Path] = [
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                *limits,
                "-r",
                each,
            ]
            subprocess.run(
                [partial / "bin/python", "-m", "pip", "install", *options], check=True, stdout=sys.stderr
            )
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def main() -> int:
    """Print the interpreter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--offline", action="store_true")
    arguments = parser.parse_args()
    target = folder()
    if not target.is_dir():
        if arguments.offline:
            return 1
        target.parent.mkdir(parents=True, exist_ok=True)
        make(target)
    print(target / "bin/python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
