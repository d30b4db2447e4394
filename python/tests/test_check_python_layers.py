"""scripts/check_python_layers.py on good and bad trees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_python_layers.py"

# A tree has every package that the script knows, however many are added.
sys.path.insert(0, str(SCRIPT.parent))
from check_python_layers import LAYERS  # noqa: E402

PACKAGES = [layer.replace(".", "/") for layer in LAYERS if layer]
GOOD = {
    "__init__.py": "from trunkline.checkpoint.save import save\n",
    "_errors.py": "from trunkline._core import x\n",
    "cli.py": "from trunkline import report\n",
    "report.py": "",
    **{f"{package}/__init__.py": "" for package in PACKAGES},
    "_tensor_io/memory.py": (
        "from typing import TYPE_CHECKING\nfrom trunkline._errors import Error\n"
        "if TYPE_CHECKING:\n    from trunkline.checkpoint.save import save\n"
    ),
    "_formats/pt.py": "from trunkline._tensor_io import memory\nimport torch\n",
    "checkpoint/save.py": "from trunkline._formats import pt\nfrom trunkline.checkpoint._own import x\n",
    "checkpoint/_own.py": "import trunkline.checkpoint.state\n",
}


def run(root: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        path = root / "python" / "trunkline" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, check=False)


def test_a_tree_that_only_imports_downward_passes(tmp_path: Path) -> None:
    result = run(tmp_path, GOOD)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "_tensor_io/bad.py",
            "\nfrom trunkline._formats import pt\n",
            "python/trunkline/_tensor_io/bad.py:2: imports _formats.pt, but _tensor_io stands below _formats",
        ),
        ("_bad.py", "import trunkline._tensor_io.memory\n", "what lies beside the packages stands below"),
        (
            "dcp/bad.py",
            "def f():\n    from trunkline.checkpoint import _own\n",
            "_own is private to checkpoint",
        ),
        ("dcp/bad.py", "from trunkline.checkpoint._own import x\n", "_own is private to checkpoint"),
        ("lightning.py", "from trunkline.checkpoint._own import x\n", "_own is private to checkpoint"),
        ("stream/bad.py", "from trunkline import cli\n", "nothing imports the public modules"),
        ("util/__init__.py", "", "is in no known layer"),
    ],
)
def test_a_bad_import_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    result = run(tmp_path, GOOD | {name: text})
    assert result.returncode == 1
    (line,) = result.stdout.splitlines()
    assert complaint in line
    assert name in line


def test_a_layer_without_a_package_is_named(tmp_path: Path) -> None:
    files = {name: text for name, text in GOOD.items() if not name.startswith("dcp")}
    assert "there is no package dcp" in run(tmp_path, files).stdout


def test_a_folder_without_a_package_is_a_usage_error(tmp_path: Path) -> None:
    assert run(tmp_path / "empty", {}).returncode == 2


def test_the_project_itself_passes() -> None:
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")
