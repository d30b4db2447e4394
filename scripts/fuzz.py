#!/usr/bin/env python3
"""Fuzzes the parsers of untrusted bytes: tests/fuzz has one file for each C++ target, built with libFuzzer.

    scripts/fuzz.py                                    every target for a few seconds, as `make test` does
    scripts/fuzz.py --executions 100000000             the long run: every target as often as that in total
    scripts/fuzz.py --seconds 600 strict_json units    these two, for ten minutes each
    scripts/fuzz.py --python --executions 1000000      the parsers in Python (python/tests/fuzz_targets.py)
    scripts/fuzz.py --keep [--python]                  no run: what long runs found, into tests/fuzz/kept

Inputs that reach something new stay in build/fuzz-corpus/TARGET, merged to the smallest set with the same
coverage, and so does the count of executions: a run that was interrupted goes on from there.
Every run starts from the few seeds in tests/fuzz/corpus, and from tests/fuzz/kept: for each target a file
with an input a line, escaped as in a Python string. An input that fails is written to build/results; make
it a test beside the parser.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/fuzz"
LONG_BUILD = ROOT / "build/fuzz-long"
CORPUS = ROOT / "build/fuzz-corpus"
RESULTS = ROOT / "build/results"
SEEDS = ROOT / "tests/fuzz/corpus"
KEPT = ROOT / "tests/fuzz/kept"
CLANG = "clang++-19"
SLICE_SECONDS = 300  # a long run is merged and counted that often
_MAX_KEPT_BYTES = 512  # of a kept input
_MAX_KEPT_PYTHON_BYTES = 2048  # the smallest archive of torch.save has more than a kilobyte
_SANITIZERS = "address,undefined"
# A long run tries inputs with what costs a quarter as much; what it keeps is tried again with all of the
# checks, and short runs look for more with them.
_LONG_SANITIZERS = "undefined"
_LONG_CHECKS = (
    "-D_GLIBCXX_ASSERTIONS",  # of the bounds of containers and views
    "-fno-sanitize-coverage=trace-cmp",  # the short runs learn from what is compared
)
_LONG_LIMITS = (
    "-max_len=1024",  # bytes of an input
    # More executions a second of a small parser: it matters whether an edge is reached, not how often, and
    # all inputs are mutated alike. The short runs and the merges count.
    *("-use_counters=0", "-entropic=0", "-reduce_inputs=0"),
)
# What a target does not call is left out of it: libFuzzer looks at every counter after every execution.
_SECTIONS = ("-ffunction-sections", "-fdata-sections")
_DROP_SECTIONS = ("-Wl,--gc-sections", "-Wl,-z,start-stop-gc")


@dataclass
class Run:
    """What one run of a target came to."""

    code: int
    executions: int
    coverage: int  # edges
    failure: str = ""


def targets() -> list[str]:
    return sorted(path.stem.removesuffix("_fuzz") for path in (ROOT / "tests/fuzz").glob("*_fuzz.cpp"))


def command_of(name: str, build: Path = BUILD) -> list[str | Path]:
    """Return what runs a target, with the options of libFuzzer after it."""
    if name in targets():
        return [build / f"fuzz_{name}"]
    return [ROOT / ".venv/bin/python", ROOT / "python/tests/fuzz_python.py", name]


def python_targets() -> list[str]:
    """Return the targets in Python, and write their seeds into their corpora."""
    program: list[str | Path] = [ROOT / ".venv/bin/python", ROOT / "python/tests/fuzz_python.py"]
    done = subprocess.run([*program, "--seeds", CORPUS], check=True, capture_output=True, text=True)
    return done.stdout.split()


def build(
    names: list[str], folder: Path = BUILD, sanitizers: str = _SANITIZERS, checks: tuple[str, ...] = ()
) -> None:
    """Build the targets into a folder; raises CalledProcessError."""
    flags = (*_SECTIONS, *checks)
    configure: list[str | Path] = [
        *("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja"),
        f"-DCMAKE_CXX_COMPILER={CLANG}",
        *("-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DTRUNKLINE_SANITIZE=fuzzer-no-link,{sanitizers}"),
        *(f"-DCMAKE_CXX_FLAGS={' '.join(flags)}", f"-DCMAKE_EXE_LINKER_FLAGS={' '.join(_DROP_SECTIONS)}"),
        *("-DTRUNKLINE_FUZZ=ON", "-DTRUNKLINE_TESTS=OFF", "-DTRUNKLINE_CLI=OFF"),
    ]
    subprocess.run(configure, check=True)
    programs = [f"fuzz_{name}" for name in names]
    subprocess.run(["cmake", "--build", folder, "--target", *programs], check=True)


def kept_inputs(name: str) -> list[bytes]:
    """Return the inputs of tests/fuzz/kept of a target."""
    path = KEPT / f"{name}.txt"
    lines = path.read_text("ascii").split("\n")[:-1] if path.exists() else []
    return [line.encode().decode("unicode_escape").encode("latin-1") for line in lines]


def starting_corpora(name: str, scratch: Path) -> list[Path]:
    """Return the folders that a run starts from; the kept inputs are unpacked into `scratch`."""
    for number, data in enumerate(kept_inputs(name)):
        (scratch / str(number)).write_bytes(data)
    seeds = [SEEDS / name] if (SEEDS / name).is_dir() else []
    return [*seeds, scratch]


def keep(name: str) -> bool:
    """Write the fewest inputs that reach all that the corpus, the seeds and the kept inputs reach."""
    restore(CORPUS / name)
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="trunkline-fuzz-") as first,
        tempfile.TemporaryDirectory() as second,
    ):
        corpora = [CORPUS / name, *starting_corpora(name, Path(first))]
        max_bytes = _MAX_KEPT_BYTES if name in targets() else _MAX_KEPT_PYTHON_BYTES
        limits = ("-set_cover_merge=1", f"-max_len={max_bytes}")
        failure = merge_into(name, Path(second), corpora, *limits)
        inputs = {path.read_bytes() for path in Path(second).iterdir()}
    if failure:
        print(failure)
        return False
    KEPT.mkdir(exist_ok=True)
    lines = [
        data.decode("latin-1").encode("unicode_escape") for data in sorted(inputs, key=lambda x: (len(x), x))
    ]
    (KEPT / f"{name}.txt").write_bytes(b"".join(line + b"\n" for line in lines))
    print(f"{name}: {len(lines)} inputs kept, {sum(map(len, inputs))} bytes", flush=True)
    return True


def run(name: str, corpus: Path, *limits: str, build: Path = BUILD) -> Run:
    """Run a target from its seeds, its kept inputs and `corpus`, into which new inputs go."""
    corpus.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    options = ("-print_final_stats=1", f"-artifact_prefix={RESULTS}/{name}-")
    command = (*command_of(name, build), *limits, *options)
    with tempfile.TemporaryDirectory(prefix="trunkline-fuzz-") as scratch:
        corpora = [corpus, *starting_corpora(name, Path(scratch))]
        done = subprocess.run([*command, *corpora], capture_output=True, text=True, errors="replace")
    executions = re.findall(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    coverage = re.findall(r"\bcov: (\d+)", done.stderr)
    return Run(
        done.returncode,
        int(executions[-1]) if executions else 0,
        int(coverage[-1]) if coverage else 0,
        done.stderr[-4000:] if done.returncode else "",
    )


def merge_into(name: str, folder: Path, corpora: list[Path], *options: str) -> str:
    """Write the inputs into a folder that are needed for the coverage of all; return what failed.

    An input that ends the target does not end the merge, which leaves it out and exits with 0.
    """
    command = [*command_of(name), *options, f"-artifact_prefix={RESULTS}/{name}-", folder, *corpora]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return done.stderr[-4000:] if done.returncode != 0 or "Test unit written to" in done.stderr else ""


def merge(name: str, corpus: Path) -> str:
    """Leave the inputs in the corpus that are needed for its coverage; return what failed, if anything."""
    merged, before = corpus.with_suffix(".merged"), corpus.with_suffix(".before")
    for left in (merged, before):  # by a merge that was killed
        shutil.rmtree(left, ignore_errors=True)
    merged.mkdir(parents=True)
    failure = merge_into(name, merged, [corpus], "-merge=1")
    if failure:
        shutil.rmtree(merged)
        return failure
    corpus.rename(before)  # restore() undoes this where the run ends here
    merged.rename(corpus)
    shutil.rmtree(before)
    return ""


def restore(corpus: Path) -> None:
    """Bring back a corpus that a merge which was killed had moved away."""
    for left in (corpus.with_suffix(".before"), corpus.with_suffix(".merged")):
        if left.exists() and not corpus.exists():
            left.rename(corpus)


def fuzz(name: str, executions: int | None, seconds: int) -> bool:
    """Run a target up to that many executions in all, or for some seconds, and print the result."""
    corpus, record = CORPUS / name, CORPUS / f"{name}.json"
    restore(corpus)
    total = json.loads(record.read_text())["executions"] if record.exists() else 0
    while True:
        limits = [f"-max_total_time={SLICE_SECONDS if executions else seconds}"]
        if executions:
            if total >= executions:
                print(f"{name}: {total} executions, which is what was wanted", flush=True)
                return True
            limits.append(f"-runs={executions - total}")
            limits += _LONG_LIMITS if name in targets() else ()
        done = run(name, corpus, *limits, build=LONG_BUILD if executions else BUILD)
        total += done.executions
        record.write_text(json.dumps({"executions": total, "coverage": done.coverage}) + "\n")
        if executions and done.code == 0 and name in targets():
            done = run(name, corpus, "-runs=0")  # what it kept, with all of the checks
        failure = done.failure if done.code != 0 else ""
        if done.code == 0:
            failure = merge(name, corpus)
        if done.code != 0 or failure:
            print(failure)
            print(f"{name}: failed after {total} executions; the input is in {RESULTS}", flush=True)
            return False
        kept = len(list(corpus.iterdir()))
        print(f"{name}: {total} executions, coverage {done.coverage}, {kept} inputs kept", flush=True)
        if not executions:
            return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the parsers of untrusted bytes.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="(all)")
    parser.add_argument("--python", action="store_true", help="the targets in Python, not those in C++")
    parser.add_argument("--executions", type=int, help="of each target in all runs together")
    parser.add_argument("--seconds", type=int, default=5, help="for each target, without --executions (5)")
    parser.add_argument("--keep", action="store_true", help="no run: write tests/fuzz/kept")
    options = parser.parse_args()
    try:
        known = python_targets() if options.python else targets()
        names = options.targets or known
        if unknown := [name for name in names if name not in known]:
            parser.error(f"unknown target {unknown[0]!r}; there are {', '.join(known)}")
        if not options.python:
            build(names)
            if options.executions:
                build(names, LONG_BUILD, _LONG_SANITIZERS, _LONG_CHECKS)
    except subprocess.CalledProcessError as error:
        print(f"fuzz: exit {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    os.nice(19)
    if options.keep:
        passed = [keep(name) for name in names]
    else:
        passed = [fuzz(name, options.executions, options.seconds) for name in names]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
