"""Runs the Python tests in one process more than there are cores, each on the next few files until all ran.

A test notices nothing but a busier machine: each process is pytest as one would call it, for some files.
Tests that look at how much memory the machine has left run when all others have ended.
"""

from __future__ import annotations

import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ALONE = ("test_large.py",)
# The files that take longest, the longest first.
LONGEST = (
    "test_checkpointer_ranks.py",
    "test_local_checkpoints.py",
    "test_transformers.py",
    "test_dcp_faults.py",
    "test_lightning.py",
    "test_examples.py",
    "test_ranks.py",
    "test_crash_power.py",
    "test_types.py",
    "test_workload_checkpoints.py",
    "test_filesystems.py",
    "test_crash_kill.py",
    "test_checkpointer_model.py",
)
# Of the other files: small enough that all processes end together, large enough to import torch rarely, and
# those that import transformers, which takes longer, by themselves.
_IMPORTS_TRANSFORMERS = re.compile(
    r"^(from|import) (transformers|support_models|test_streaming|test_routed_experts)\b"
    r"|importorskip\(\"(transformers|peft|trl)",
    re.MULTILINE,
)
_GROUPS_WITH_TRANSFORMERS = 4
_GROUPS_OF_THE_OTHERS = 9
_SLOWEST = 10  # tests that are named at the end


def groups_of(files: Sequence[Path]) -> list[list[Path]]:
    """Divide files into groups, in the order in which they should start, without those that run alone."""
    longest = [[file] for name in LONGEST for file in files if file.name == name]
    others = [file for file in files if file.name not in (*LONGEST, *ALONE)]
    others.sort(key=lambda file: (-file.stat().st_size, file.name))
    with_transformers = [file for file in others if _IMPORTS_TRANSFORMERS.search(file.read_text("utf-8"))]
    others = [file for file in others if file not in with_transformers]
    return [
        *longest,
        *_divided(with_transformers, _GROUPS_WITH_TRANSFORMERS),
        *_divided(others, _GROUPS_OF_THE_OTHERS),
    ]


def _divided(files: Sequence[Path], groups: int) -> list[list[Path]]:
    return [list(group) for n in range(groups) if (group := files[n::groups])]


def run(pytest: Sequence[str | Path], files: Sequence[Path], junit: Path) -> int:
    """Run the tests of the files with the command `pytest`, and write their results to `junit`.

    Returns the first exit status of pytest that is not 0. What a process prints appears when it ends, and
    one that leaves no results is a failure in `junit`.
    """
    printing = Lock()
    groups = groups_of(files)
    alone = [file for file in files if file.name in ALONE]
    results = [junit.with_name(f"{junit.stem}-{number}.xml") for number in range(len(groups) + bool(alone))]
    for path in results:
        path.unlink(missing_ok=True)

    def run_group(group: Sequence[Path], result: Path) -> int:
        done = subprocess.run(
            [*pytest, "--junitxml", result, *group],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with printing:
            print(f"-- {names_of(group)}\n{done.stdout}", flush=True)
        return done.returncode

    with ThreadPoolExecutor((os.cpu_count() or 1) + 1) as pool:  # tests wait for disks and other processes
        codes = list(pool.map(run_group, groups, results))
    if alone:
        codes.append(run_group(alone, results[-1]))
    merge(dict(zip(results, [*groups, alone], strict=False)), junit)
    return next((code for code in codes if code), 0)


def names_of(files: Sequence[Path]) -> str:
    return " ".join(file.name for file in files)


def suites_of(result: Path, files: Sequence[Path]) -> list[ElementTree.Element]:
    """Return the suites in a file of results; where it cannot be read, one with an error."""
    try:
        return list(ElementTree.parse(result).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError) as error:
        suite = ElementTree.Element("testsuite")
        case = ElementTree.SubElement(suite, "testcase", name=f"{names_of(files)} left no results")
        ElementTree.SubElement(case, "error", message=str(error))
        return [suite]


def merge(results: Mapping[Path, Sequence[Path]], junit: Path) -> None:
    """Make one file of the results of each group of files, and print the slowest tests."""
    whole = ElementTree.Element("testsuites")
    for path, files in results.items():
        whole.extend(suites_of(path, files))
        path.unlink(missing_ok=True)
    ElementTree.ElementTree(whole).write(junit, encoding="utf-8", xml_declaration=True)

    def seconds(case: ElementTree.Element) -> float:
        return float(case.get("time", 0))

    print("the slowest tests:")
    for case in sorted(whole.iter("testcase"), key=seconds, reverse=True)[:_SLOWEST]:
        print(f"  {seconds(case):6.1f} s  {case.get('classname')}.{case.get('name')}", flush=True)
