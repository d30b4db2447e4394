"""Where the command line lies."""

import importlib.util
import os
from pathlib import Path


def _program() -> Path:
    named = os.environ.get("TRUNKLINE_CLI")
    if named:
        return Path(named)
    found = importlib.util.find_spec("trunkline")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "bin" / "trunkline"


PROGRAM = _program()
