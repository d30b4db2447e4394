#!/usr/bin/env python3
"""Checks that every folder of the C++ sources includes only what stands below it.

The order is LAYERS, lowest first. A file may include private headers of its own folder and of those before
it, and every public header (include/trunkline). Public headers include public ones only. Prints each
violation as FILE:LINE and exits with 1 when there is one.

    scripts/check_layers.py [ROOT]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

LAYERS = (
    *("base", "os", "mem", "device", "tuning", "io", "volume"),
    *("format", "tensor_file", "checkpoint", "stream", "records", "workload"),
)
TOP = ("cli", "bindings")  # above all layers, and apart from each other
PUBLIC = "include/trunkline"
INCLUDE = re.compile(r'^\s*#\s*include\s+(?P<quote>["<])(?P<path>[^">]+)[">]')


def sources(root: Path) -> list[tuple[str, Path]]:
    """(folder, file) of every C++ file; the folder of a public header is PUBLIC."""
    found: list[tuple[str, Path]] = []
    folders = (root / "include/trunkline", root / "src", root / "python/bindings")
    for file in sorted(file for folder in folders for file in folder.rglob("*")):
        if file.suffix not in (".h", ".cpp") or not file.is_file():
            continue
        parts = file.relative_to(root).parts
        if parts[:2] == ("include", "trunkline"):
            found.append((PUBLIC, file))
        elif parts[0] == "src":
            found.append((parts[1] if len(parts) > 2 else "", file))
        else:
            found.append(("bindings", file))
    return found


def target_folder(root: Path, file: Path, path: str) -> str | None:
    """The folder that an include leads to; None for what is not the project's."""
    first = path.split("/", 1)[0]
    if first == "trunkline" and "/" in path:
        return PUBLIC
    if (root / "src" / path).is_file() and "/" in path:
        return first
    neighbour = (file.parent / path).resolve()
    if neighbour.is_file() and neighbour.is_relative_to(root.resolve()):
        parts = neighbour.relative_to(root.resolve()).parts
        if parts[:2] == ("include", "trunkline"):
            return PUBLIC
        if parts[0] == "src" and len(parts) > 2:
            return parts[1]
        if parts[:2] == ("python", "bindings"):
            return "bindings"
    return None


def objection(folder: str, target: str) -> str | None:
    """Why `folder` may not include from `target`; None when it may."""
    if target in (PUBLIC, folder):
        return None
    if folder == PUBLIC:
        return "a public header must not include a private one"
    if target in TOP:
        return f"nothing includes from {target}"
    if folder in TOP:
        return None
    if LAYERS.index(target) < LAYERS.index(folder):
        return None
    return f"{folder} stands below {target}"


def check(root: Path) -> list[str]:
    """All violations under `root`, as lines to print."""
    violations: list[str] = []
    for folder, file in sources(root):
        name = file.relative_to(root)
        if folder not in (*LAYERS, *TOP, PUBLIC):
            violations.append(
                f"{name}: is in no known layer; add its folder to LAYERS in scripts/check_layers.py"
            )
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            target = target_folder(root, file, match["path"])
            if target is None:
                continue
            if target not in (*LAYERS, *TOP, PUBLIC):
                violations.append(f'{name}:{number}: "{match["path"]}" is in no known layer')
                continue
            why = objection(folder, target)
            if why:
                violations.append(f'{name}:{number}: includes "{match["path"]}", but {why}')
    return violations


def main(arguments: list[str], folder: str, check_tree: Callable[[Path], list[str]]) -> int:
    """Print the violations in the tree that is named, or in the project, and return the exit status."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    if not (root / folder).is_dir():
        print(f"{Path(sys.argv[0]).stem}: {root} has no folder {folder}", file=sys.stderr)
        return 2
    violations = check_tree(root)
    for line in violations:
        print(line)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "src", check))
