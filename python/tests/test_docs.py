"""Every Python block of the README and of docs/ runs as it stands, each in an interpreter of its own."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#:]+)(?:#[^)]*)?\)")
OPTIONAL = ("torch", "transformers", "lightning")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", match["code"]))
    return found


BLOCKS = blocks()


def test_there_are_examples() -> None:
    assert len(BLOCKS) >= 10


@pytest.mark.parametrize(("place", "code"), BLOCKS, ids=[place for place, _ in BLOCKS])
def test_example_runs(place: str, code: str, tmp_path: Path) -> None:
    for library in OPTIONAL:
        if re.search(rf"\b{library}\b", code) and importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}")
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{place}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    missing = [
        m["target"]
        for m in LINK.finditer(page.read_text(encoding="utf-8"))
        if not (page.parent / m["target"]).exists()
    ]
    assert not missing
