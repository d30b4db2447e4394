#!/usr/bin/env python3
"""Write docs/reference/command-line.md and docs/man/trunkline.1 from what the command line says of itself.

    .venv/bin/python scripts/make_cli_reference.py [--check]

Commands are read from --help, from the list of subcommands down. --check writes nothing, and fails if a page
is not current. Expects the package to be installed (scripts/install_package.sh).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import man_page

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/command-line.md"
OF_PACKAGE = "subcommands of the python package"  # in the help of the program
INTRODUCTION = """\
# Command line

<!-- Made by scripts/make_cli_reference.py from the parsers: change the help texts, then run it. -->

`trunkline` comes with the Python package and with `cmake --install`; `pack` and `plan` need the package, with
torch and transformers, `workload` needs it with PyYAML, `checkpoint rm` and `plan` need it alone, and
`checkpoint export`, `import` and `diff` with torch. The exit status is 0 when all is well, 1 when something
failed, and 2 for wrong usage. Every command has `--help`, and all of this is in `man trunkline`.
`source <(trunkline completion bash)` lets bash complete commands and options; there are scripts for zsh and
fish, too.
[`trunkline checkpoint`](../checkpoints.md#on-the-command-line) has more exit statuses, and the fields of its
`--json`.
"""


@dataclass
class Command:
    """One command as its help describes it."""

    name: str
    description: str
    usage: str
    arguments: list[tuple[str, str]] = field(default_factory=list)
    options: list[tuple[str, str]] = field(default_factory=list)
    subcommands: list[tuple[str, str]] = field(default_factory=list)


def help_of(words: list[str]) -> str:
    """What `trunkline WORDS --help` prints."""
    command = [sys.executable, "-m", "trunkline", *words, "--help"]
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT / "build", env=environment
    ).stdout


def sections(text: str) -> dict[str, list[str]]:
    """Lines of a help text by section: "" (the description), "usage", "options", "subcommands", ..."""
    found: dict[str, list[str]] = {"": []}
    current = ""
    for line in text.splitlines():
        title = re.fullmatch(r"([A-Za-z ]+): *", line)
        if title:
            current = title[1].lower()
            found[current] = []
        elif line.lower().startswith("usage:"):
            found["usage"] = [line.partition(":")[2].strip()]
        elif line and not line.startswith(" "):  # a footer ends the sections
            current = "" if current == "" else "footer"
            found.setdefault(current, []).append(line)
        elif line.strip():
            found[current].append(line)
    return found


def rows(lines: list[str]) -> list[tuple[str, str]]:
    """Pairs of name and text: two columns, of which a long name or text goes on in the next line."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if re.match(r" {2}\S", line):
            name, _, text = line.strip().partition("  ")
            found.append((name, text.strip()))
        else:
            name, text = found[-1]
            found[-1] = (name, f"{text} {line.strip()}".strip())
    return found


def without_words(name: str, text: str) -> tuple[str, str]:
    """`--direct auto|never` as `--direct VALUE`, the words in the text: tables have bars, too."""
    words = re.search(r" (\S+(?:\|\S+)+)", name)
    if words is None:
        return name, text
    *most, last = words[1].split("|")
    value = "" if not name.startswith("-") else " VALUE"
    text, before, default = text.partition(" (default: ")
    return name.replace(words[0], value), f"{text} ({', '.join(most)} or {last}){before}{default}"


def entries(lines: list[str]) -> list[tuple[str, str]]:
    """Arguments or options, without --help, which all commands have."""
    return [without_words(name, text) for name, text in rows(lines) if not name.startswith("-h,")]


def commands_from(words: list[str]) -> list[Command]:
    """The command that the words name, and all below it."""
    parts = sections(help_of(words))
    subcommands = [*parts.get("subcommands", []), *parts.get(OF_PACKAGE, [])]
    command = Command(
        " ".join(["trunkline", *words]),
        " ".join(parts[""]).strip(),
        " ".join(parts["usage"]),
        entries(parts.get("arguments", [])),
        entries(parts.get("options", [])),
        rows(subcommands),
    )
    return [command, *(each for name, _ in command.subcommands for each in commands_from([*words, name]))]


def table(title: str, entries: list[tuple[str, str]], link: str = "") -> list[str]:
    """A table of two columns; with `link`, names lead to the sections of these commands."""
    if not entries:
        return []
    lines = ["", f"| {title} | |", "|---|---|"]
    for name, text in entries:
        shown = f"[`{name}`](#{anchor(f'{link} {name}')})" if link else f"`{name}`"
        lines.append(f"| {shown} | {text.replace('|', chr(92) + '|')} |")
    return lines


def anchor(title: str) -> str:
    """The anchor of a heading."""
    return title.lower().replace(" ", "-")


def page(commands: list[Command]) -> str:
    """The whole page."""
    lines = [INTRODUCTION.rstrip()]
    for command in commands:
        level = "##" if command.name.count(" ") < 2 else "###"
        lines += ["", f"{level} {command.name}", "", f"{command.description.rstrip('.')}."]
        lines += ["", "```text", command.usage, "```"]
        lines += table("argument", command.arguments)
        lines += table("option", command.options)
        lines += table("command", command.subcommands, link=command.name)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the reference of the command line.")
    parser.add_argument("--check", action="store_true", help="fail if a page is not current")
    options = parser.parse_args()
    commands = commands_from([])
    status = 0
    for path, text in ((PAGE, page(commands)), (man_page.PAGE, man_page.man_page(commands))):
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(
                f"{path.relative_to(ROOT)} is not current: run scripts/make_cli_reference.py", file=sys.stderr
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
