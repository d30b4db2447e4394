#!/usr/bin/env python3
"""Formatting, static analysis, types, layers, documentation. Checks that object print what they object to.

    scripts/lint.py [--only CHECK,...] [--fresh] [--fix]

clang-tidy leaves out the files that it has found clean as they are, with all that they include (records in
~/.cache/trunkline/clang-tidy); --fresh makes it read every file. --fix brings C++ and Python into the
project's layout instead. Expects scripts/setup.sh lint to have run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clean_records import CleanRecords
from results import Outcome, report, write_results

ROOT = Path(__file__).resolve().parent.parent
TIDY_BUILD = ROOT / "build/tidy"
UNITED = re.compile(r'^#include "(/.+)"$', re.MULTILINE)
# GCC's flags that clang does not know must not count as findings. -H prints what is included.
TIDY = ("clang-tidy-19", "--quiet", "--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-H")
INCLUDED = re.compile(r"\.+ (/.+)$")
VENV = ROOT / ".venv/bin"
CPP_FOLDERS = ("include", "src", "tests", "examples", "python/bindings")
PYTHON_FOLDERS = [
    folder for folder in ("python", "scripts", "examples", "benchmarks", "tests") if (ROOT / folder).is_dir()
]


def cpp_files(*suffixes: str) -> list[Path]:
    return sorted(
        file for folder in CPP_FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in suffixes
    )


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def check(command: Sequence[str | Path]) -> list[str]:
    """The complaint of a command: nothing when it exits with 0."""
    done = run(command)
    if done.returncode == 0:
        return []
    return [f"{Path(command[0]).name} exited with {done.returncode}\n{done.stdout}{done.stderr}".rstrip()]


def clang_format() -> list[str]:
    return check(["clang-format-19", "--dry-run", "-Werror", *cpp_files(".h", ".cpp")])


def configure_tidy() -> list[str]:
    """What a folder's sources include costs many times what is in them: they are read as one."""
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DTRUNKLINE_UNITY=ON", "-DTRUNKLINE_TESTS=ON")
    return check(["cmake", "-S", ROOT, "-B", TIDY_BUILD, "-G", "Ninja", *options])


def clang_tidy(fresh: bool = False) -> list[str]:
    """All sources but those of tests, half of the time, for code that nobody runs but us.

    Longest files first, so that no core waits at the end.
    """
    if complaint := configure_tidy():
        return complaint
    commands = json.loads((TIDY_BUILD / "compile_commands.json").read_text())
    files = {Path(entry["file"]): entry["command"] for entry in commands}
    of_sources = {tuple(sources): file for file in files if (sources := sources_in(file))}
    read = {source for sources in of_sources for source in sources}
    if missing := [
        source for source in (ROOT / "src").rglob("*.cpp") if is_tidied(source) and source not in read
    ]:
        return [f"no compile command names {', '.join(map(str, missing))}"]
    own = sorted(of_sources.values(), key=bytes_read, reverse=True)
    records = CleanRecords(tidy_records_folder(), ROOT)
    version = subprocess.run(["clang-tidy-19", "--version"], capture_output=True, text=True).stdout

    def one(file: Path) -> list[str]:
        key = f"{version}\n{' '.join(TIDY)}\n{files[file]}"
        if not fresh and records.holds(key):
            return []
        started = time.time()
        done = run([*TIDY, "-p", TIDY_BUILD, file])
        if done.returncode == 0:
            records.add(key, [file, ROOT / ".clang-tidy", *included(done.stderr)], started)
            return []
        messages = "".join(line for line in done.stderr.splitlines(keepends=True) if not INCLUDED.match(line))
        return [f"clang-tidy-19 exited with {done.returncode}\n{done.stdout}{messages}".rstrip()]

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        complaints = [complaint for complaints in pool.map(one, own) for complaint in complaints]
    records.prune()
    return complaints


def sources_in(file: Path) -> list[Path]:
    """Return the sources that a file to compile consists of; none for tests and what only the build has."""
    united = file.is_relative_to(TIDY_BUILD)
    sources = [Path(name) for name in UNITED.findall(file.read_text())] if united else [file]
    return sources if all(map(is_tidied, sources)) else []


def is_tidied(source: Path) -> bool:
    return source.is_relative_to(ROOT) and not source.stem.endswith("_test")


def bytes_read(file: Path) -> int:
    return sum(source.stat().st_size for source in sources_in(file))


def included(printed: str) -> list[Path]:
    """Return the headers that clang printed for -H."""
    return [Path(match[1]) for match in map(INCLUDED.match, printed.splitlines()) if match]


def tidy_records_folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "trunkline/clang-tidy"


def ruff_check() -> list[str]:
    return check([VENV / "ruff", "check", *PYTHON_FOLDERS])


def ruff_format() -> list[str]:
    return check([VENV / "ruff", "format", "--check", "--diff", *PYTHON_FOLDERS])


def mypy() -> list[str]:
    """The installed package as its users' type checkers see it; then what stands around it."""
    if complaint := check(["scripts/install_package.sh"]):
        return complaint
    # From build/, so that no source folder stands in for the installed package.
    config: list[str | Path] = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    command: list[str | Path] = [VENV / "python", "-m", "mypy", "--strict", *config]
    package = check(["env", "-C", ROOT / "build", *command, "-p", "trunkline"])
    around = [ROOT / "examples/demo.py", *sorted((ROOT / "benchmarks").glob("*.py"))]
    scripts = sorted((ROOT / "scripts").glob("*.py"))
    return [
        *package,
        *check(["env", "-C", ROOT / "build", f"MYPYPATH={ROOT}/python/tests", *command, *around]),
        *check(["env", "-C", ROOT / "build", f"MYPYPATH={ROOT}/scripts", *command, *scripts]),
    ]


def layers() -> list[str]:
    return [
        *check([sys.executable, "scripts/check_layers.py"]),
        *check([sys.executable, "scripts/check_python_layers.py"]),
    ]


def python_sizes() -> list[str]:
    return check([sys.executable, "scripts/check_python_sizes.py"])


def docs() -> list[str]:
    """The documentation site, built strictly, and what is generated into docs/."""
    return check(["scripts/install_package.sh"]) or check(["scripts/build_docs.sh"])


def shellcheck() -> list[str]:
    return check(["shellcheck", *sorted((ROOT / "scripts").glob("*.sh")), ".ci/run"])


# The slowest last, so that what is quick to put right is told first. Two run at a time: mypy uses one core.
CHECKS: dict[str, Callable[[], list[str]]] = {
    "clang-format": clang_format,
    "ruff-check": ruff_check,
    "ruff-format": ruff_format,
    "layers": layers,
    "python-sizes": python_sizes,
    "shellcheck": shellcheck,
    "docs": docs,
    "mypy": mypy,
    "clang-tidy": clang_tidy,
}


def fix() -> int:
    commands: list[Sequence[str | Path]] = [
        ["clang-format-19", "-i", *cpp_files(".h", ".cpp")],
        [VENV / "ruff", "check", "--fix", "--quiet", *PYTHON_FOLDERS],
        [VENV / "ruff", "format", *PYTHON_FOLDERS],
    ]
    codes = [subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands]
    return max(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description="Formatting, static analysis, types, layers, documentation.")
    parser.add_argument("--only", default=",".join(CHECKS), help="checks, separated by commas (default: all)")
    parser.add_argument("--fresh", action="store_true", help="clang-tidy reads files found clean before, too")
    parser.add_argument("--fix", action="store_true", help="reformat instead of checking")
    options = parser.parse_args()
    if options.fix:
        return fix()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"unknown check {unknown[0]!r}; there are {', '.join(CHECKS)}")

    def timed(name: str) -> tuple[list[str], float]:
        start = time.monotonic()
        complaints = clang_tidy(fresh=True) if name == "clang-tidy" and options.fresh else CHECKS[name]()
        return complaints, time.monotonic() - start

    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(2) as pool:
        for name, (complaints, seconds) in zip(names, pool.map(timed, names), strict=True):
            outcome = Outcome(passed=0 if complaints else 1, seconds=seconds)
            for complaint in complaints:
                print(f"---- {name}\n{complaint}")
                outcome.fail(complaint.splitlines()[0])
            print(f"{name:<14}{'ok' if outcome.passed else 'objects'} ({seconds:.1f} s)", flush=True)
            outcomes[name] = outcome
    write_results(ROOT / "build/results/lint.json", outcomes)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
