"""A Python environment that has this package and numpy, and nothing else."""

import os
import subprocess
import textwrap
import venv
from pathlib import Path

import numpy

import trunkline as tl


class NumpyOnly:
    """The environment, in a folder."""

    def __init__(self, folder: Path) -> None:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
        [packages] = folder.glob("lib/python*/site-packages")
        for module in (numpy, tl):
            assert module.__file__ is not None
            package = Path(module.__file__).parent
            for each in (package, package.with_name(f"{package.name}.libs")):
                if each.exists():
                    (packages / each.name).symlink_to(each)
        self._python = folder / "bin" / "python"
        self._packages = packages

    def without_ml_dtypes(self) -> None:
        """As it is made."""
        (self._packages / "ml_dtypes").unlink(missing_ok=True)

    def with_ml_dtypes(self) -> None:
        """Add ml_dtypes."""
        import ml_dtypes

        assert ml_dtypes.__file__ is not None
        if not (self._packages / "ml_dtypes").exists():
            (self._packages / "ml_dtypes").symlink_to(Path(ml_dtypes.__file__).parent)

    def run(self, code: str, folder: Path) -> str:
        """Run code in a folder, and return what it prints."""
        done = subprocess.run(
            [self._python, "-c", PRELUDE + textwrap.dedent(code)],
            cwd=folder,
            # What PYTHONPATH names would be found too.
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        assert done.stderr == "", done.stderr
        return done.stdout


PRELUDE = """
import importlib.util
assert importlib.util.find_spec("torch") is None
import numpy as np
import trunkline as tl

def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    raise AssertionError("no error")

"""
