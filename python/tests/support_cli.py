"""Runs commands of `trunkline checkpoint` that are in Python in this process: importing torch takes long."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from trunkline import cli


def command(*arguments: "str | Path", expect: int = 0) -> str:
    """Run `trunkline checkpoint`; return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = cli.main(["checkpoint", *map(str, arguments)])
    assert status == expect, printed.getvalue()
    return printed.getvalue()


def document(*arguments: "str | Path", expect: int = 0) -> dict[str, Any]:
    """What it prints with --json."""
    printed = command(*arguments, "--json", expect=expect)
    parsed: dict[str, Any] = json.JSONDecoder().raw_decode(printed)[0]
    return parsed
