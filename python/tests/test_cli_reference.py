"""The page on the command line, which scripts/make_cli_reference.py makes from the help texts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/make_cli_reference.py"
HELP = """\
Measure reading and writing of files
Usage: trunkline bench [OPTIONS] PATH...

Positionals:
  PATH TEXT ... REQUIRED      Directories to make files in

Options:
  -h,--help                   Print this help message and exit
  --block TEXT=1MiB           Size of a transfer
  --duration FLOAT:FLOAT in [0 - 86400]
                              Seconds that each measurement
                              goes on
  --step UINT:STEP Excludes: --all
                              Number of the step

Subcommands:
  ls                          List the checkpoints

A footer that is no part of them
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cli_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_cli_reference", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_help_is_read(script: ModuleType) -> None:
    parts = script.sections(HELP)
    assert parts[""] == ["Measure reading and writing of files"]
    assert parts["usage"] == ["trunkline bench [OPTIONS] PATH..."]
    assert script.entries(parts["positionals"]) == [("PATH ...", "Directories to make files in")]
    assert script.entries(parts["options"]) == [
        ("--block TEXT", "Size of a transfer [1MiB]"),
        ("--duration FLOAT", "Seconds that each measurement goes on"),
        ("--step UINT", "Number of the step (not with --all)"),
    ]
    assert script.rows(parts["subcommands"]) == [("ls", "List the checkpoints")]


def test_the_page_links_each_command_to_its_section(script: ModuleType) -> None:
    command = script.Command("trunkline checkpoint", "Look after them.", "trunkline checkpoint SUBCOMMAND")
    command.subcommands.append(("ls", "List | them"))
    page = script.page([command])
    assert "| [`ls`](#trunkline-checkpoint-ls) | List \\| them |" in page
    assert "\n## trunkline checkpoint\n\nLook after them.\n" in page


def test_commands_of_the_package_are_read_from_their_parsers(script: ModuleType) -> None:
    pytest.importorskip("transformers")
    commands = {each.name: each for each in script.parser_commands()}
    plan = commands["trunkline plan"]
    assert plan.usage == "trunkline plan [OPTIONS] MODEL"
    assert ("--volumes DIR ...", "Directories on other disks, measured all at once") in plan.options
