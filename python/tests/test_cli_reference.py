"""The page on the command line, which scripts/make_cli_reference.py makes from the help texts."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trunkline._checkpoint_tools.cli import make_parser as checkpoint_parser
from trunkline._help import sentence
from trunkline.stream.cli import make_parser as stream_parser

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/make_cli_reference.py"
HELP = """\
Measure reading and
writing of files.

Usage: trunkline bench [OPTIONS] PATH...

Arguments:
  PATH ...                    Directories to make files in

Options:
  -h, --help                  Print this help message and exit
  --block-bytes, --block SIZE
                              Size of a transfer (default: 1MiB)
  --duration TIME             Seconds that each measurement
                              goes on
  --direct auto|never         Whether to bypass it (default: auto)

Subcommands:
  ls                          List the checkpoints

Subcommands of the Python package:
  rm                          Remove a checkpoint

A footer that is no part of them
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cli_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # of the modules that it imports
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_cli_reference", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_help_is_read(script: ModuleType) -> None:
    parts = script.sections(HELP)
    assert parts[""] == ["Measure reading and", "writing of files."]
    assert parts["usage"] == ["trunkline bench [OPTIONS] PATH..."]
    assert script.entries(parts["arguments"]) == [("PATH ...", "Directories to make files in")]
    assert script.entries(parts["options"]) == [
        ("--block-bytes, --block SIZE", "Size of a transfer (default: 1MiB)"),
        ("--duration TIME", "Seconds that each measurement goes on"),
        ("--direct VALUE", "Whether to bypass it (auto or never) (default: auto)"),
    ]
    assert script.rows(parts["subcommands"]) == [("ls", "List the checkpoints")]
    assert script.rows(parts["subcommands of the python package"]) == [("rm", "Remove a checkpoint")]


def test_the_page_links_each_command_to_its_section(script: ModuleType) -> None:
    command = script.Command("trunkline checkpoint", "Look after them.", "trunkline checkpoint SUBCOMMAND")
    command.subcommands.append(("ls", "List | them"))
    page = script.page([command])
    assert "| [`ls`](#trunkline-checkpoint-ls) | List \\| them |" in page
    assert "\n## trunkline checkpoint\n\nLook after them.\n" in page


def summaries(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return what a parser says of its subcommands."""
    [group] = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return {each.dest: sentence(each.help or "") for each in group._choices_actions}


def test_the_program_lists_the_commands_of_the_package_as_these_describe_themselves(
    script: ModuleType,
) -> None:
    listed = dict(script.rows(script.sections(script.help_of([]))[script.OF_PACKAGE]))
    assert "emulate" in listed.pop("workload").lower()
    assert listed == summaries(stream_parser())
    listed = dict(script.rows(script.sections(script.help_of(["checkpoint"]))[script.OF_PACKAGE]))
    assert listed == summaries(checkpoint_parser())


def test_commands_in_both_languages_have_one_layout(script: ModuleType) -> None:
    """The same headings, and defaults that are written in one way."""
    commands = {each.name: each for each in script.commands_from([])}
    assert {"trunkline bench diff", "trunkline checkpoint plan", "trunkline workload run"} <= commands.keys()
    titles = {"", "usage", "arguments", "options", "subcommands", script.OF_PACKAGE, "footer"}
    for name, command in commands.items():
        text = script.help_of(name.split()[1:])
        assert set(script.sections(text)) <= titles, text
        assert re.match(r"[A-Z`][^\n]*", text), text
        assert re.search(rf"(?m)^Usage: {name}( |$)", text), text
        assert re.search(r"(?m)^  -h, --help +Print this help message and exit$", text), text
        assert command.description.endswith("."), text
        for option, meaning in [*command.arguments, *command.options, *command.subcommands]:
            assert meaning[:1].isupper() or not meaning[:1].isalpha(), (name, option, meaning)
            assert "[" not in meaning, (name, option, meaning)
            assert not re.search(r"\bdefaults? (is|to|of)\b", meaning), (name, option, meaning)


def test_a_manual_page_has_all_of_a_command(script: ModuleType) -> None:
    program = script.Command("trunkline", "Moves tensors", "trunkline SUBCOMMAND")
    bench = script.Command("trunkline bench", "Measure it", "trunkline bench PATH")
    bench.options.append(("--block-bytes SIZE", ".5MiB of `it`"))
    page = script.man_page.man_page([program, bench])
    assert "\ntrunkline \\- Moves tensors\n" in page
    assert "\n.SH TRUNKLINE BENCH\nMeasure it\n.PP\ntrunkline bench PATH\n" in page
    sections = [line.removeprefix(".SH ") for line in page.splitlines() if line.startswith(".SH ")]
    assert sections[-4:] == ["EXIT STATUS", "ENVIRONMENT", "FILES", "EXAMPLES"]
    assert "TRUNKLINE_TUNING" in page
    assert "TRUNKLINE_CUFILE" not in page  # for tests
    assert "](" not in page
    assert "\n.TP\n\\fB\\-\\-block\\-bytes SIZE\\fR\n\\&.5MiB of it\n" in page


def test_the_pages_are_current() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
