"""`trunkline completion`: what shells offer at a TAB."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support_program import PROGRAM

# What each shell is asked, with the script in $1 and a command line in the arguments that follow.
BASH = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_trunkline
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source $argv[1]; complete -C "$argv[2..]" | string split -f 1 \\t'
ZSH = """
compdef() { }
compadd() { shift; print -l -- "$@" }
_describe() { print -l -- "${(@)${(P)@[-1]}%%:*}" }
_files() { print -l -- * }
source $1; shift
words=("$@") CURRENT=$#
_trunkline
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the scripts for the shells."""
    folder = tmp_path_factory.mktemp("completion")
    found = {}
    for shell in ("bash", "zsh", "fish"):
        found[shell] = folder / shell
        found[shell].write_text(run("completion", shell).stdout)
    return found


def run(*arguments: str, expect: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run the command of the package; its exit status must be `expect`."""
    done = subprocess.run(
        [sys.executable, "-m", "trunkline", *arguments],
        env=os.environ | {"TRUNKLINE_CLI": str(PROGRAM)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return done


def offered(shell: str, script: Path, words: list[str], folder: Path) -> set[str]:
    """Return what a shell offers for the last of the words, after filtering by what it begins with."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (folder / "step.pt").touch()
    command = {
        "bash": ["bash", "--norc", "-c", BASH, "bash", str(script), *words],
        "zsh": ["zsh", "-f", "-c", ZSH, "zsh", str(script), *words],
        "fish": ["fish", "--no-config", "-c", FISH, str(script), *words],
    }[shell]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return {word for word in done.stdout.split() if word.startswith(words[-1])}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trunkline", "b"], {"bench"}),
        (["trunkline", "p"], {"pack", "plan"}),
        (["trunkline", "checkpoint", "e"], {"export"}),
        (["trunkline", "checkpoint", "verify", "run", "--a"], {"--all", "--all-nodes"}),
        (["trunkline", "workload", "g"], {"generate"}),
        (["trunkline", "bench", ".", "--back"], {"--backend"}),
        (["trunkline", "bench", "--backend", "l"], {"libaio"}),
        (["trunkline", "bench", "--lanes", "s"], set()),
        (["trunkline", "plan", "model", "--memory-"], {"--memory-budget"}),
        (["trunkline", "plan", "--dtype", "b"], {"bfloat16"}),
        (["trunkline", "bench", "--output", "st"], {"step.pt"}),
        (["trunkline", "bench", "d"], {"diff"}),
        (["trunkline", "bench", "diff", "st"], {"step.pt"}),
        (["trunkline", "checkpoint", "export", "st"], {"step.pt"}),
        (["trunkline", "completion", "f"], {"fish"}),
        (["trunkline", "workload", "run", "unet3d_h"], {"unet3d_h100"}),
        (["trunkline", "workload", "plan", "st"], {"step.pt"}),
    ],
)
def test_a_shell_completes(
    scripts: dict[str, Path], tmp_path: Path, shell: str, words: list[str], expected: set[str]
) -> None:
    assert offered(shell, scripts[shell], words, tmp_path) == expected


def test_bash_completes_after_an_equals_sign(scripts: dict[str, Path], tmp_path: Path) -> None:
    words = ["trunkline", "bench", "--direct", "=", "al"]  # as bash splits --direct=al
    assert offered("bash", scripts["bash"], words, tmp_path) == {"always"}


def test_the_program_alone_completes_its_own_commands() -> None:
    done = subprocess.run([str(PROGRAM), "completion", "bash"], capture_output=True, text=True, check=True)
    assert "'trunkline bench --backend'" in done.stdout
    assert "--memory-budget" not in done.stdout


def test_another_shell_is_an_error() -> None:
    assert '"tcsh" is not one of bash, zsh, fish' in run("completion", "tcsh", expect=2).stderr
    assert "SHELL is required" in run("completion", expect=2).stderr
