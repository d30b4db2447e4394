"""What releases are made with: the script, the recipe for hosted machines, and what wheels depend on."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/release.sh"

# Of the C API of Python, what the stable ABI lacks: macros that look into objects, and fields of types.
NOT_IN_STABLE_ABI = re.compile(
    r"\bPy[A-Z]\w*_(?:AS|GET|SET)_[A-Z]+\b|\bPyObject_Call(?:One|NoArgs|MethodNoArgs|MethodOneArg)\w*"
    r"|\bPyInterpreterState_Main\b|->(?:tp|ob)_\w+"
)
# An index need not have the package; what is said to users may not send them there.
FROM_AN_INDEX = re.compile(r"pip3? install [^\n`]*?(?<![\w/*.-])trunkline(?![\w-])")


def sources(*folders: str) -> list[Path]:
    found = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".cpp", ".h", ".md", ".py", ".sh"}
    ]
    assert len(found) > len(folders)
    return found


def found_in(name: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"))
    assert found is not None, f"{name} no longer says which Python is the oldest: {pattern}"
    return found[1]


def test_all_name_the_same_oldest_python() -> None:
    to_build = found_in("scripts/setup.sh", r"default: python3; at least ([\d.]+)")
    assert found_in("scripts/setup.sh", r"sys\.version_info < \((\d+, \d+)\)").replace(", ", ".") == to_build
    assert found_in("README.md", r"with Python ([\d.]+) or later") == to_build
    to_run = found_in("pyproject.toml", r'requires-python = ">=([\d.]+)"')
    assert found_in("scripts/release.sh", r"sys\.version_info >= \((\d+, \d+)\)").replace(", ", ".") == to_run
    assert found_in("README.md", r"also makes a wheel for ([\d.]+\d)") == to_run
    assert f"for minor in {to_run.partition('.')[2]} " in (ROOT / "scripts/release.sh").read_text("utf-8")


def test_bindings_use_the_stable_abi_only() -> None:
    for path in sources("python/bindings"):
        found = NOT_IN_STABLE_ABI.findall(path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found} are not in the stable ABI, of which the wheel for 3.12 is made"
    assert NOT_IN_STABLE_ABI.search("PyTuple_SET_ITEM(a, 0, b)")
    assert NOT_IN_STABLE_ABI.search("Py_TYPE(a)->tp_name")


def test_nothing_sends_users_to_an_index_for_the_package() -> None:
    for path in [ROOT / "README.md", *sources("docs", "python/trunkline", "src", "scripts")]:
        found = FROM_AN_INDEX.findall(path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found}"
    assert FROM_AN_INDEX.search("pip install 'trunkline[report]'")
    assert FROM_AN_INDEX.search("pip install trunkline")
    assert not FROM_AN_INDEX.search("pip install dist/trunkline-*.whl")


# The recipe for hosted machines -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workflow() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


def steps(job: Any) -> list[dict[str, Any]]:
    found = list(job["steps"])
    assert all(("uses" in step) != ("run" in step) for step in found)
    return found


def test_the_recipe_publishes_only_what_all_other_jobs_made_of_a_tag(workflow: Any) -> None:
    triggers = workflow[True]  # "on" is a boolean of YAML 1.1
    assert triggers["push"] == {"tags": ["v*"]}
    jobs = workflow["jobs"]
    publish = jobs["publish"]
    assert sorted(publish["needs"]) == sorted(set(jobs) - {"publish"})
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    publishing = [
        name for name, job in jobs.items() for step in steps(job) if "publish" in step.get("uses", "")
    ]
    assert publishing == ["publish"]


def test_the_recipe_has_no_secrets_and_few_permissions(workflow: Any) -> None:
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {})
        for step in steps(job):
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+(\.\d+)*|release/v1)", step["uses"])


def test_the_recipe_builds_every_version_and_machine_and_tests_it(workflow: Any) -> None:
    wheels = workflow["jobs"]["wheels"]
    assert {each["machine"] for each in wheels["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}
    [environment] = [step["env"] for step in steps(wheels) if "env" in step]
    built = environment["CIBW_BUILD"].split()
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in project
    assert 'wheel.py-api = "cp312"' in project
    assert built[:3] == ["cp310-manylinux_*", "cp311-manylinux_*", "cp312-manylinux_*"]
    test = environment["CIBW_TEST_COMMAND"]
    assert (ROOT / test.removeprefix("python {project}/")).is_file()


# The script -------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the script and nothing that could be built."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "Begin"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def release(repository: Path, *pythons: str) -> str:
    """What the script prints when it fails."""
    done = subprocess.run(
        [repository / "scripts/release.sh", *pythons], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert not (repository / "dist").exists()
    return done.stderr


def test_a_release_is_made_of_commits(repository: Path) -> None:
    with (repository / "scripts/release.sh").open("a") as file:
        file.write("# changed\n")
    assert "there are changes that are not committed" in release(repository, sys.executable)


def test_a_release_names_what_is_not_an_interpreter(repository: Path) -> None:
    assert "/bin/false is not Python 3.10 or later" in release(repository, sys.executable, "/bin/false")
