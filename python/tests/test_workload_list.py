"""The command `trunkline workload list`."""

import json
import subprocess
import sys

import pytest

from trunkline.workload import builtin_names, cli


def test_list_has_every_built_in_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["workload", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["schema"]) == ("workload list", 1)
    assert [row["name"] for row in document["workloads"]] == builtin_names()
    [unet] = [row for row in document["workloads"] if row["name"] == "unet3d_h100"]
    assert unet["totals"]["steps"] == 120
    [llama] = [row for row in document["workloads"] if row["name"] == "llama3-8b"]
    assert (llama["ranks"], llama["checkpoint_bytes"]) == (8, 112425623552)
    assert cli.main(["workload", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines[1:-2] if line]
    assert sorted(shown) == sorted([*builtin_names(), "name"])  # a second heading
    assert ["llama3-8b", "112", "GB", "8", "2.01", "GB", "12", "GB"] in [line.split() for line in lines]


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["workload", "lisst", "--json"]) == 2
    captured = capsys.readouterr()
    assert "unknown subcommand 'lisst'. Did you mean 'list'?" in captured.err
    assert json.loads(captured.out)["error"]["kind"] == "invalid_argument"
    for arguments, message in (
        ([], "workload: a subcommand is required, one of list, generate, run, compare, plan\n"),
        (["run"], "workload run: NAME_OR_FILE is required\nSee trunkline workload run --help.\n"),
        (["run", "bert", "--ranks", "two"], 'workload run: --ranks: must be a whole number, not "two"\n'),
        (["run", "bert", "--rank=2", "--nope"], "workload run: unknown option '--nope'\n"),
        (["run", "bert", "--device-gb-s", "x"], 'workload run: --device-gb-s: must be a number, not "x"\n'),
    ):
        assert cli.main(["workload", *arguments]) == 2
        assert f"trunkline {message}" in capsys.readouterr().err


def test_without_yaml_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['yaml'] = None; from trunkline.cli import main; "
        "sys.exit(main(['workload', 'list']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("workload files require the package PyYAML: pip install pyyaml")
