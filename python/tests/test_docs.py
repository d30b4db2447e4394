"""Every Python block of the README and of docs/ runs unchanged, each in a separate process."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import support_warm

import trunkline as tl

_STRICT = "import warnings; warnings.simplefilter('error', DeprecationWarning)\n"
ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\((?P<page>[^)#:]*)#(?P<anchor>[^)]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(?P<title>.+?) *$", re.MULTILINE)
QUOTED = re.compile(r"\"(?P<title>[A-Z][^\"\\\n]*)\\?\" in (?P<page>docs/[\w/-]+\.md)")
CHECKPOINTER = re.compile(r"(?:Checkpointer|TrainingArguments)\(\"(?P<directory>[^\"]+)\"")
OPTIONAL = ("torch", "torchdata", "transformers", "lightning", "PIL")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, ROOT / "CHANGELOG.md"]
SOURCES = [
    path
    for folder in ("python/trunkline", "python/bindings", "src", "include")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".h", ".cpp")
]


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


def run(place: str, code: str, folder: Path) -> None:
    for library in OPTIONAL:
        if re.search(rf"\b{library}\b", code) and importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}")
    done = support_warm.run(["-c", _STRICT + code], cwd=folder)
    assert done.returncode == 0, f"{place}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(("place", "code"), BLOCKS, ids=[place for place, _ in BLOCKS])
def test_example_runs(place: str, code: str, tmp_path: Path) -> None:
    run(place, code, tmp_path)
    if CHECKPOINTER.search(code):  # a training is restarted with the checkpoints that are there
        run(place, code, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
def test_the_training_with_fsdp_continues_whatever_its_length(tmp_path: Path) -> None:
    """A shorter second run must not replace steps of the first: the newest would then be an older run's."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    [(place, code)] = [(place, code) for place, code in BLOCKS if '"fsdp-run"' in code]
    for length in (4, 2):
        assert code.count("first + 3") == 1
        assert code.count("keep=3") == 1
        run(place, code.replace("first + 3", f"first + {length}").replace("keep=3", "keep=None"), tmp_path)
    steps = sorted((tmp_path / "fsdp-run").iterdir())
    assert [step.name for step in steps] == [f"step-{step:08d}" for step in range(6)]
    for number, step in enumerate(steps):
        state = {"optimizer": {"state": {"weight": {"step": torch.tensor(-1.0)}}}, "step": -1}
        dcp.load(state, storage_reader=tl.dcp.StorageReader(step), no_dist=True)
        assert state["step"] == number
        assert state["optimizer"]["state"]["weight"]["step"] == number + 1  # each continued the one before


def test_examples_use_directories_of_their_own() -> None:
    """Who follows the pages in one working directory does not save a run into that of another example."""
    users: dict[str, set[str]] = {}
    for place, code in BLOCKS:
        for m in CHECKPOINTER.finditer(code):
            users.setdefault(m["directory"], set()).add(place)
    assert len(users) >= 4
    assert all(len(places) == 1 for places in users.values()), users


@pytest.mark.parametrize("page", LINKING, ids=[str(page.relative_to(ROOT)) for page in LINKING])
def test_links_lead_somewhere(page: Path) -> None:
    missing = [
        m["target"]
        for m in LINK.finditer(page.read_text(encoding="utf-8"))
        if not (page.parent / m["target"]).exists()
    ]
    assert not missing


def titles(page: Path) -> list[str]:
    """Return the titles of the headings of a page."""
    return [m["title"] for m in HEADING.finditer(FENCE.sub("", page.read_text(encoding="utf-8")))]


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", LINKING, ids=[str(page.relative_to(ROOT)) for page in LINKING])
def test_anchors_lead_to_headings(page: Path) -> None:
    missing = []
    for m in ANCHOR.finditer(page.read_text(encoding="utf-8")):
        target = page.parent / m["page"] if m["page"] else page
        if m["anchor"] not in {anchor(title) for title in titles(target)}:
            missing.append(m[0])
    assert not missing


def test_anchors_are_found() -> None:
    assert sum(len(ANCHOR.findall(page.read_text(encoding="utf-8"))) for page in LINKING) >= 5


def test_anchors_quoted_by_messages_exist() -> None:
    """The sections that error messages and pages quote by title are there."""
    quoted = [
        (source, m["title"], m["page"])
        for source in [*SOURCES, *LINKING]
        for m in QUOTED.finditer(" ".join(source.read_text(encoding="utf-8").split()))
    ]
    assert any(source.suffix == ".py" for source, _, _ in quoted)
    missing = [
        (source.name, title, page) for source, title, page in quoted if title not in titles(ROOT / page)
    ]
    assert not missing


PUBLIC_ERRORS = {
    name: value for name, value in vars(tl).items() if isinstance(value, type) and issubclass(value, tl.Error)
}
# What no call of docs/checkpoints.md raises.
NOT_OF_CHECKPOINTS = {"EndOfFile"}


def named_in_table(page: Path, header: str) -> str:
    """Return the first cells of the table whose first row begins with `header`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(f"| {header} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return "\n".join(row.split("|")[1] for row in rows)


@pytest.mark.parametrize(
    ("page", "header", "missing"),
    [("docs/engine.md", "class", set()), ("docs/checkpoints.md", "exception", NOT_OF_CHECKPOINTS)],
)
def test_every_public_error_is_in_the_tables(page: str, header: str, missing: set[str]) -> None:
    table = named_in_table(ROOT / page, header)
    assert len(PUBLIC_ERRORS) > 10
    found = {name for name in PUBLIC_ERRORS if re.search(rf"`(tl\.)?{name}`", table)}
    assert found == PUBLIC_ERRORS.keys() - missing
