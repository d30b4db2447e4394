#!/usr/bin/env python3
"""Write docs/reference/command-line.md and docs/man/trunkline.1 from what the command line says of itself.

    .venv/bin/python scripts/make_cli_reference.py [--check]

Commands of the C++ program are read from its --help, from the list of subcommands down; `pack`, `plan` and
`workload` from their argparse parsers. --check writes nothing, and fails if a page is not current. Expects
the package to be installed (scripts/install_package.sh).
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
INTRODUCTION = """\
# Command line

<!-- Made by scripts/make_cli_reference.py from the parsers: change the help texts, then run it. -->

`trunkline` comes with the Python package and with `cmake --install`; `pack` and `plan` need the package, with
torch and transformers, `workload` needs it with PyYAML, and `checkpoint export`, `import`, `rm` and `diff`
need it with torch. The exit status is 0 when all is well, 1 when something failed, and 2 for wrong usage.
Every command has `--help`, and all of this is in `man trunkline`. In brackets: what holds unless you say
otherwise. `source <(trunkline completion bash)` lets bash complete commands and options; there are
scripts for zsh and fish, too.
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
    summary: str = ""  # in the list of commands


def program_help(words: list[str]) -> str:
    """What the program prints for `trunkline WORDS --help`."""
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


def entry(name: str, text: str) -> tuple[str, str]:
    """`--block TEXT=1MiB` as a pair of `--block TEXT` and a text that ends with [1MiB]."""
    name, _, excluded = name.replace(" REQUIRED", "").partition(" Excludes: ")
    name, _, default = name.partition("=")
    name, text = without_words(name, text)
    text += f" (not with {excluded})" if excluded else ""
    text += f" [{default}]" if default else ""
    return name.replace(",--", ", --"), text


def without_words(name: str, text: str) -> tuple[str, str]:
    """`--direct auto|never` as `--direct VALUE`, the words in the text: tables have bars, too."""
    words = re.search(r" (\S+(?:\|\S+)+)", name)
    if words is None:
        return name, text
    *most, last = words[1].split("|")
    value = "" if not name.startswith("-") else " VALUE"
    return name.replace(words[0], value), f"{text} ({', '.join(most)} or {last})"


def entries(lines: list[str]) -> list[tuple[str, str]]:
    """Arguments or options, without --help, which all commands have."""
    return [entry(name, text) for name, text in rows(lines) if not name.startswith("-h,")]


def program_commands(words: list[str]) -> list[Command]:
    """The command that the words name, and all below it."""
    parts = sections(program_help(words))
    command = Command(
        " ".join(["trunkline", *words]),
        " ".join(parts[""]).strip(),
        " ".join(parts["usage"]),
        entries(parts.get("positionals", [])),
        entries(parts.get("options", [])),
        rows(parts.get("subcommands", [])),
    )
    below = [each for name, _ in command.subcommands for each in program_commands([*words, name])]
    return [command, *below]


def parser_commands() -> list[Command]:
    """The commands of the package that argparse parses."""
    from trunkline.stream import cli
    from trunkline.workload.cli import make_parser

    workload = make_parser()
    summary = "emulate trainings, checkpoints and inferences: how busy storage keeps the accelerators"
    below = subcommands("workload ", workload)
    command = Command("trunkline workload", (workload.description or "").strip(), "", summary=summary)
    command.usage = "trunkline workload COMMAND"
    command.subcommands = [(each.name.split()[-1], each.summary.capitalize()) for each in below]
    return [*subcommands("", cli.make_parser()), command, *below]


def add_checkpoint_commands(program: list[Command]) -> None:
    """Add the commands of `trunkline checkpoint` that argparse parses after those of the program."""
    from trunkline._checkpoint_tools.cli import make_parser

    more = subcommands("checkpoint ", make_parser())
    [group] = [each for each in program if each.name == "trunkline checkpoint"]
    group.subcommands += [(each.name.split()[-1], each.summary.capitalize()) for each in more]
    last = program.index(group) + len(group.subcommands) - len(more)
    program[last + 1 : last + 1] = more


def subcommands(prefix: str, parser: argparse.ArgumentParser) -> list[Command]:
    """The subcommands of a parser of argparse."""
    [group] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    helps = {action.dest: action.help or "" for action in group._choices_actions}
    return [parser_command(f"{prefix}{name}", each, helps[name]) for name, each in group.choices.items()]


def parser_command(name: str, parser: argparse.ArgumentParser, summary: str) -> Command:
    """One command of argparse; its summary is what the list of commands says."""
    command = Command(f"trunkline {name}", (parser.description or summary).strip(), "", summary=summary)
    usage = [f"trunkline {name} [OPTIONS]"]
    for action in parser._actions:
        value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
        several = " ..." if action.nargs in ("+", "*") else ""
        if action.dest == "help":
            continue
        if action.option_strings:
            shown = ",".join(action.option_strings).replace(",--", ", --")
            command.options.append(without_words(f"{shown} {value}{several}".strip(), sentence(action.help)))
        else:
            command.arguments.append((f"{value}{several}", sentence(action.help)))
            usage.append(f"{value}{several.strip()}")
    command.usage = " ".join(usage)
    return command


def sentence(text: str | None) -> str:
    """Help of argparse as CLI11 would show it."""
    return f"{(text or ' ')[0].upper()}{(text or '')[1:]}"


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
    program = program_commands([])
    add_checkpoint_commands(program)
    package = parser_commands()
    program[0].subcommands += [
        (each.name.split()[1], each.summary.capitalize()) for each in package if each.name.count(" ") == 1
    ]
    commands = [*program, *package]
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
