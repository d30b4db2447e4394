"""scripts/check_python_sizes.py, which make lint runs."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/check_python_sizes.py"


def check(root: Path, *functions: str) -> subprocess.CompletedProcess[str]:
    folder = root / "python/trunkline"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text("\n".join(functions))
    return subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, check=False)


def function(name: str, lines: int, docstring: int = 0) -> str:
    quotes = ['    """', *["    text"] * (docstring - 2), '    """'] if docstring else []
    return "\n".join([f"def {name}():", *quotes, *["    pass"] * (lines - 1)])


def test_a_long_function_is_named(tmp_path: Path) -> None:
    found = check(tmp_path, function("fits", 70), function("is_long", 71))
    assert found.returncode == 1
    (line,) = found.stdout.splitlines()
    assert line.startswith(f"{tmp_path}/python/trunkline/module.py:71: is_long() has 71 lines")


def test_docstrings_do_not_count(tmp_path: Path) -> None:
    found = check(tmp_path, function("fits", 70, docstring=50))
    assert (found.returncode, found.stdout) == (0, "")


def test_a_tree_without_the_package_is_an_error(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert found.returncode == 1
