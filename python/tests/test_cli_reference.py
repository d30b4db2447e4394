"""The page on the command line, which scripts/make_cli_reference.py makes from the help texts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/make_cli_reference.py"
HELP = """\
Measure reading and writing of files
Usage: trunkline bench [OPTIONS] PATH...

Positionals:
  PATH ... REQUIRED      Directories to make files in

Options:
  -h,--help                   Print this help message and exit
  --block SIZE=1MiB           Size of a transfer
  --duration TIME             Seconds that each measurement
                              goes on
  --direct auto|never=auto    Whether to bypass it
  --step N Excludes: --all
                              Number of the step

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
    assert parts[""] == ["Measure reading and writing of files"]
    assert parts["usage"] == ["trunkline bench [OPTIONS] PATH..."]
    assert script.entries(parts["positionals"]) == [("PATH ...", "Directories to make files in")]
    assert script.entries(parts["options"]) == [
        ("--block SIZE", "Size of a transfer [1MiB]"),
        ("--duration TIME", "Seconds that each measurement goes on"),
        ("--direct VALUE", "Whether to bypass it (auto or never) [auto]"),
        ("--step N", "Number of the step (not with --all)"),
    ]
    assert script.rows(parts["subcommands"]) == [("ls", "List the checkpoints")]
    assert script.rows(parts["subcommands of the python package"]) == [("rm", "Remove a checkpoint")]


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


def test_the_program_lists_the_commands_of_the_package_as_these_describe_themselves(
    script: ModuleType,
) -> None:
    pytest.importorskip("transformers")
    listed = dict(script.rows(script.sections(script.program_help([]))["subcommands of the python package"]))
    assert listed == {
        each.name.split()[1]: each.summary[:1].upper() + each.summary[1:]
        for each in script.parser_commands()
        if each.name.count(" ") == 1
    }
    text = script.program_help(["checkpoint"])
    listed = dict(script.rows(script.sections(text)["subcommands of the python package"]))
    group = script.Command("trunkline checkpoint", "", "")
    script.add_checkpoint_commands([group])
    assert listed == {name: summary[:1].upper() + summary[1:] for name, summary in group.subcommands}


def test_a_manual_page_has_all_of_a_command(script: ModuleType) -> None:
    program = script.Command("trunkline", "Moves tensors", "trunkline SUBCOMMAND")
    bench = script.Command("trunkline bench", "Measure it", "trunkline bench PATH")
    bench.options.append(("--block-bytes SIZE", ".5MiB of `it`"))
    page = script.man_page.man_page([program, bench])
    assert "\ntrunkline \\- Moves tensors\n" in page
    assert "\n.SH TRUNKLINE BENCH\nMeasure it\n.PP\ntrunkline bench PATH\n" in page
    assert "\n.TP\n\\fB\\-\\-block\\-bytes SIZE\\fR\n\\&.5MiB of it\n" in page


def test_the_pages_are_current() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
