"""The manual page of the command line, from what scripts/make_cli_reference.py reads of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/man/trunkline.1"
DESCRIPTION = r"""
The exit status is 0 when all is well, 1 when something failed, and 2 for wrong usage. Every command has
\fB\-\-help\fR. In brackets: what holds unless you say otherwise. With \fB\-\-json\fR, results and errors are
JSON documents on standard output.
""".strip()
ENVIRONMENT = [
    ("TRUNKLINE_TUNING", "off: use no saved settings; a path: the file that holds them."),
    ("TRUNKLINE_LOG", "What is logged to standard error, such as info or engine=debug."),
    ("TRUNKLINE_TRACE", "A file to which a trace of the process is written."),
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
        f"trunkline \\- {text(program.description)}",
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
    lines += [".SH ENVIRONMENT", *entries(ENVIRONMENT)]
    return "\n".join(lines) + "\n"


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
