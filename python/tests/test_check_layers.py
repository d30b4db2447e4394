"""scripts/check_layers.py on good and bad trees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_layers.py"

GOOD = {
    "include/trunkline/error.h": "#include <string>\n",
    "include/trunkline/file.h": '#include "trunkline/error.h"\n',
    "src/base/error.cpp": '#include "trunkline/error.h"\n',
    "src/os/fd.h": '#include "trunkline/file.h"\n',
    "src/os/fd.cpp": '#include "fd.h"\n#include "os/fd.h"\n',
    "src/io/lane/lane.h": '#include "os/fd.h"\n',
    "src/io/backends/threads.cpp": '#include "io/lane/lane.h"\n#include "../lane.h"\n',
    "src/cli/main.cpp": '#include "io/lane/lane.h"\n',
    "python/bindings/module.cpp": '#include "io/lane/lane.h"\n#include <nanobind/nanobind.h>\n',
}


def run(root: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, check=False)


def test_a_tree_that_only_includes_downward_passes(tmp_path: Path) -> None:
    result = run(tmp_path, GOOD)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "src/os/up.cpp",
            '#include "io/lane/lane.h"\n',
            'src/os/up.cpp:1: includes "io/lane/lane.h", but os stands below io',
        ),
        ("src/os/up.cpp", '\n#  include "../io/lane/lane.h"\n', "src/os/up.cpp:2"),
        ("src/os/up.cpp", "#include <io/lane/lane.h>\n", "os stands below io"),
        ("include/trunkline/bad.h", '#include "os/fd.h"\n', "a public header must not include a private one"),
        (
            "include/trunkline/bad.h",
            '#include "../../src/os/fd.h"\n',
            "a public header must not include a private one",
        ),
        ("src/io/bad.cpp", '#include "../cli/command.h"\n', "nothing includes from cli"),
        ("src/util/new.cpp", "int x;\n", "is in no known layer"),
        ("src/loose.cpp", "int x;\n", "is in no known layer"),
        ("src/cli/bad.cpp", '#include "util/strings.h"\n', '"util/strings.h" is in no known layer'),
    ],
)
def test_a_bad_include_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    extra = {"src/cli/command.h": ""} | ({"src/util/strings.h": ""} if "util" in text else {})
    result = run(tmp_path, GOOD | extra | {name: text})
    assert result.returncode == 1
    assert complaint in result.stdout
    assert all(name in line or "util" in line for line in result.stdout.splitlines())


def test_a_folder_without_sources_is_a_usage_error(tmp_path: Path) -> None:
    assert run(tmp_path, {}).returncode == 2


def test_the_project_itself_passes() -> None:
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")
