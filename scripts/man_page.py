"""The manual page of the command line, from what scripts/make_cli_reference.py reads of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/man/trunkline.1"
VARIABLES = ROOT / "docs/engine.md"  # its table of environment variables
DESCRIPTION = r"""
Each command has \fB\-\-help\fR. With \fB\-\-json\fR, results and errors are JSON documents on standard
output.
""".strip()
EXIT_STATUS = [
    ("0", "All is well."),
    ("1", "Something failed; what, is on standard error. Of diff commands: there is a difference."),
    ("2", "Wrong usage: nothing was done. Also: what was named does not exist."),
    ("130, 143", "Ended by Ctrl-C (SIGINT) or by SIGTERM, as shells show it."),
]
EXAMPLES = [
    ("trunkline doctor /mnt/ssd", "What the disk below a directory can do, and what to change."),
    ("trunkline bench /mnt/ssd --size 4GB --json > ssd.json", "Measure reading and writing there."),
    ("trunkline tune /mnt/ssd", "Find the fastest settings, and save them for engines to use."),
    ("trunkline checkpoint ls run", "The checkpoints of a directory, and which are incomplete."),
    ("trunkline checkpoint verify run --all", "Compare every byte of them with its checksum."),
    ("trunkline checkpoint export run model.safetensors --key model", "Write the weights of the latest one."),
    (
        "trunkline checkpoint plan --bytes 1.2TB --bandwidth 20GB --nodes 256",
        "How often to save on 256 nodes, and what saving and failures cost.",
    ),
    (
        "trunkline plan Qwen/Qwen3-8B --memory-budget 8GB",
        "Tokens per second of a model with 8 GB for its weights.",
    ),
    (
        "trunkline workload generate unet3d_h100 --directories /mnt/ssd/data",
        "Write the data set of a workload; then trunkline workload run emulates the training.",
    ),
    ("source <(trunkline completion bash)", "Let bash complete commands, options and names of workloads."),
]
FILES = [
    (
        "~/.config/trunkline/tuning.json",
        "Settings that trunkline tune has saved; in $XDG_CONFIG_HOME if that is set. TRUNKLINE_TUNING names "
        "another file.",
    ),
    (
        "~/.cache/trunkline",
        "Packs of models, and indexes of samples whose own folder is not writable; in $XDG_CACHE_HOME if "
        "that is set. TRUNKLINE_CACHE names another directory for packs.",
    ),
    ("DIR/trunkline-checkpoints.json", "What makes DIR a directory of checkpoints."),
]


class Described(Protocol):
    """A command, as make_cli_reference.Command."""

    name: str
    description: str
    usage: str
    arguments: list[tuple[str, str]]
    options: list[tuple[str, str]]
    subcommands: list[tuple[str, str]]


def man_page(commands: Sequence[Described]) -> str:
    """Return the page; the first command is the program."""
    program, *others = commands
    version = re.search(
        r"project\(trunkline VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    )
    assert version is not None
    lines = [
        '.\\" Made by scripts/make_cli_reference.py from the parsers: change the help texts, then run it.',
        f'.TH TRUNKLINE 1 "" "trunkline {version[1]}" "User Commands"',
        ".SH NAME",
        f"trunkline \\- {text(program.description.rstrip('.'))}",
        ".SH SYNOPSIS",
        ".B trunkline",
        r"[\fIOPTIONS\fR] \fISUBCOMMAND\fR",
        ".SH DESCRIPTION",
        DESCRIPTION,
        ".SH OPTIONS",
        *entries(program.options),
        ".SH SUBCOMMANDS",
        *entries(program.subcommands),
    ]
    for command in others:
        lines += [f".SH {text(command.name).upper()}", text(command.description), ".PP", text(command.usage)]
        lines += [*entries(command.arguments), *entries(command.options), *entries(command.subcommands)]
    for title, rows in (
        ("EXIT STATUS", EXIT_STATUS),
        ("ENVIRONMENT", environment()),
        ("FILES", FILES),
        ("EXAMPLES", EXAMPLES),
    ):
        lines += [f".SH {title}", *entries(rows)]
    return "\n".join(lines) + "\n"


def environment() -> list[tuple[str, str]]:
    """Return the variables that users set, and their effects, from the table in the documentation."""
    rows = re.findall(r"(?m)^\| `(TRUNKLINE_\w+)` \| (.+) \|$", VARIABLES.read_text(encoding="utf-8"))
    without_pages = [(name, re.sub(r" \(\[[^\]]*\.md\]\([^)]*\)\)", "", effect)) for name, effect in rows]
    plain = [(name, re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", effect)) for name, effect in without_pages]
    shown = [(name, f"{effect[:1].upper()}{effect[1:]}.") for name, effect in plain]
    return [(name, effect) for name, effect in shown if not effect.startswith("For ")]  # tests, development


def entries(rows: list[tuple[str, str]]) -> list[str]:
    """Return a paragraph for each option, argument or command."""
    lines: list[str] = []
    for name, description in rows:
        lines += [".TP", f"\\fB{text(name)}\\fR", text(description) or "\\&"]
    return lines


def text(plain: str) -> str:
    """Escape a text for roff."""
    escaped = plain.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return re.sub(r"(?m)^([.'])", r"\\&\1", escaped)
