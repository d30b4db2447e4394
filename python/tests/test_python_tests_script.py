"""scripts/python_tests.py: every file runs once, and what fails in any process fails the whole."""

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "python_tests.py"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trunkline_python_tests_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_is_in_one_group(script: ModuleType) -> None:
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    groups = script.groups_of(files)
    grouped = [file for group in groups for file in group]
    assert sorted([*grouped, *(file for file in files if file.name in script.ALONE)]) == files
    assert all(groups)
    assert {*script.LONGEST, *script.ALONE} <= {file.name for file in files}  # none that was renamed


def test_results_of_all_processes(script: ModuleType, tmp_path: Path) -> None:
    bodies = {
        "test_a.py": "def test_passes(): pass",
        "test_b.py": "def test_fails(): assert False",
        "test_c.py": "import os\ndef test_ends_the_process(): os._exit(0)",
        "test_large.py": "def test_alone(): pass",
    }
    for name, body in bodies.items():
        (tmp_path / name).write_text(body)
    junit = tmp_path / "python.xml"
    command = [*PYTEST, "--rootdir", tmp_path]
    assert script.run(command, sorted(tmp_path.glob("test_*.py")), junit) == 1
    cases = {
        case.get("name"): [child.tag for child in case if child.tag in ("failure", "error")]
        for case in ElementTree.parse(junit).getroot().iter("testcase")
    }
    assert cases == {
        "test_passes": [],
        "test_fails": ["failure"],
        "test_c.py left no results": ["error"],
        "test_alone": [],
    }


def test_a_file_without_tests_fails(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("")
    status = script.run(
        [*PYTEST, "--rootdir", tmp_path], [tmp_path / "test_nothing.py"], tmp_path / "python.xml"
    )
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED
    assert subprocess.run([*PYTEST, tmp_path], capture_output=True).returncode == status
