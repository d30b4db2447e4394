#!/usr/bin/env python3
"""Checks that no function of python/trunkline is longer than MOST_LINES, its docstring not counted.

Blank lines, comments and the signature count. Prints each longer one as FILE:LINE and exits with 1 when there
is one.

    scripts/check_python_sizes.py [ROOT]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MOST_LINES = 70


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its decorators and its docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def longer(file: Path) -> list[str]:
    """What to print of the functions of a file."""
    return [
        f"{file}:{node.lineno}: {node.name}() has {lines_of(node)} lines; split it: {MOST_LINES} are allowed"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > MOST_LINES
    ]


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    files = sorted((root / "python/trunkline").rglob("*.py"))
    if not files:
        print(f"{root}: no Python files in python/trunkline", file=sys.stderr)
        return 1
    found = [line for file in files for line in longer(file)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
