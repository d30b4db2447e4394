#!/usr/bin/env python3
"""Checks that every package of python/trunkline imports only what stands below it.

The order is LAYERS, lowest first. A module may import from its own package and from those before it. Modules
whose names begin with an underscore belong to their package: no other imports them. What only type checkers
import does not count. Prints each violation as FILE:LINE and exits with 1 when there is one.

    scripts/check_python_layers.py [ROOT]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import check_layers

LAYERS = (
    "",  # modules beside the packages whose names begin with an underscore
    *("_tensor_io", "_formats", "_export"),
    *("checkpoint.state", "checkpoint.ranks", "checkpoint", "checkpoint.tiers", "checkpoint.nodes"),
    "checkpoint.directory",
    *(
        "dcp",
        "_checkpoint_tools",
        "_streaming",
        "transformers",
        "stream",
        "data",
        "deepspeed",
        "sglang",
        "vllm",
        "workload",
    ),
)
TOP = "top"  # the package itself and its public modules, above all layers
PACKAGE = "trunkline"


def module_of(root: Path, file: Path) -> str:
    """The dotted name of a module below the package; that of a package is its own."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def layer_of(modules: set[str], module: str) -> str:
    """The layer that a module belongs to."""
    if module in LAYERS and module:
        return module
    if module == "__main__":
        return TOP
    parent, _, name = module.rpartition(".")
    if parent in LAYERS and (parent or name.startswith("_")):
        return parent
    return TOP if not parent else layer_of(modules, parent)


def imported(tree: ast.Module, modules: set[str]) -> list[tuple[int, str]]:
    """(line, module) of each module of the package that is imported when the code runs."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for otherwise in node.orelse:
                visit(otherwise)
            return
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            base = node.module.partition(".")[2]
            for alias in node.names:
                name = f"{base}.{alias.name}" if base else alias.name
                found.append((node.lineno, name if name in modules or not base else base))
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, _, rest = alias.name.partition(".")
                if first == PACKAGE and rest:
                    found.append((node.lineno, rest))
        for each in ast.iter_child_nodes(node):
            visit(each)

    visit(tree)
    return found


def objection(modules: set[str], importer: str, target: str) -> str | None:
    """Why `importer` may not import `target`; None when it may."""
    ours, theirs = layer_of(modules, importer), layer_of(modules, target)
    if ours == theirs:
        return None
    name = target.rpartition(".")[2]
    if theirs and name.startswith("_") and target not in LAYERS:
        return f"{name} is private to {theirs}"
    if ours == TOP:
        return None
    if theirs == TOP:
        return "nothing imports the public modules"
    if LAYERS.index(theirs) < LAYERS.index(ours):
        return None
    return f"{ours or 'what lies beside the packages'} stands below {theirs}"


def check(root: Path) -> list[str]:
    """All violations in the package below `root`, as lines to print."""
    package = root / "python" / PACKAGE
    files = sorted(package.rglob("*.py"))
    modules = {module_of(package, file) for file in files} | {"_core"}
    violations: list[str] = []
    known = {layer for layer in LAYERS if layer}
    violations += [
        f"scripts/check_python_layers.py: there is no package {layer}" for layer in sorted(known - modules)
    ]
    for file in files:
        module = module_of(package, file)
        if (
            file.name == "__init__.py"
            and module
            and module.split(".")[0] not in {layer.split(".")[0] for layer in known}
        ):
            violations.append(
                f"{file.relative_to(root)}: is in no known layer; add its package to LAYERS in "
                "scripts/check_python_layers.py"
            )
            continue
        for line, target in imported(ast.parse(file.read_text(encoding="utf-8")), modules):
            why = objection(modules, module, target)
            if why:
                violations.append(f"{file.relative_to(root)}:{line}: imports {target}, but {why}")
    return violations


if __name__ == "__main__":
    sys.exit(check_layers.main(sys.argv[1:], f"python/{PACKAGE}", check))
