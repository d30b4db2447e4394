#!/usr/bin/env python3
"""Runs everything that tests, and sums it up: every stage, every skip with its reason, and one last line
"N passed, N failed, N skipped".

    scripts/run_tests.py [--only release,asan,tsan,python,example,fuzz] [--build-only]

A stage that cannot be built counts as one failure and the others still run. Results:
build/results/tests.json. Expects scripts/setup.sh test to have run; the standard library suffices, so it
works with any Python 3.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fuzz as fuzzing
import outside_example
import python_tests
from junit import read_junit
from results import Outcome, report, write_results

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
RESULTS = BUILD / "results"
FUZZ_SECONDS = 6


class StageError(Exception):
    """A step before the tests themselves failed; its output is on the terminal."""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    code = run_code(*command, env=env, cwd=cwd)
    if code != 0:
        raise StageError(f"exit {code}: {' '.join(str(word) for word in command)}")


def run_code(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> int:
    sys.stdout.flush()
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL
    ).returncode


def fixed_addresses() -> list[str]:
    """The thread sanitizer of GCC 12 and 13 refuses the address layouts of kernels that randomise 32 bits."""
    command = ["setarch", platform.machine(), "-R"]
    if shutil.which("setarch") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        return command
    return []


def ctest(preset: str, build_only: bool) -> Outcome:
    prefix = fixed_addresses() if preset == "tsan" else []
    run("cmake", "--preset", preset, "-DTRUNKLINE_TESTS=ON")
    run(*prefix, "cmake", "--build", "--preset", preset)
    outcome = Outcome()
    if build_only:
        return outcome
    junit = RESULTS / f"{preset}.xml"
    junit.unlink(missing_ok=True)
    env = {
        "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "second_deadlock_stack=1",
    }
    command = ("ctest", "--preset", preset, "--no-tests=error", "--output-junit", str(junit))
    code = run_code(*prefix, *command, env=env)
    outcome = read_junit(junit)
    if code != 0 and not outcome.failed:
        outcome.fail(f"ctest --preset {preset} exited with {code}")
    return outcome


def install_sglang() -> subprocess.Popen[bytes]:
    """Begin to make the environment of the tests that need SGLang: minutes, while others build."""
    command = (ROOT / ".venv/bin/python", ROOT / "scripts/sglang_environment.py")
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def python(build_only: bool, sglang: subprocess.Popen[bytes] | None = None) -> Outcome:
    run("scripts/install_package.sh")
    outcome = Outcome()
    if build_only:
        return outcome
    if sglang and sglang.wait() != 0:
        print("SGLang could not be installed (see above): the tests that need it are skipped", flush=True)
    junit = RESULTS / "python.xml"
    junit.unlink(missing_ok=True)
    pytest = (ROOT / ".venv/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    code = python_tests.run(pytest, sorted((ROOT / "python/tests").glob("test_*.py")), junit)
    outcome = read_junit(junit)
    if code != 0 and not outcome.failed:
        outcome.fail(f"pytest exited with {code}")
    return outcome


def example(build_only: bool) -> Outcome:
    """The library as others use it, from outside the tree: outside_example.py."""
    run("cmake", "--preset", "release")
    run("cmake", "--build", "--preset", "release")
    if build_only:
        return Outcome()
    with tempfile.TemporaryDirectory(prefix="trunkline-example-") as scratch:
        return outside_example.test(Path(scratch))


def fuzz(build_only: bool) -> Outcome:
    outcome = Outcome()
    names = fuzzing.targets()
    if not shutil.which(fuzzing.CLANG):
        for name in names:
            outcome.skip(f"fuzz {name}", f"{fuzzing.CLANG} is not installed")
        return outcome
    try:
        fuzzing.build(names)
    except subprocess.CalledProcessError as error:
        raise StageError(f"exit {error.returncode}: {' '.join(map(str, error.cmd))}") from None
    if build_only:
        return outcome

    def run_target(name: str) -> fuzzing.Run:
        with tempfile.TemporaryDirectory(prefix="trunkline-fuzz-") as scratch:
            return fuzzing.run(name, Path(scratch), f"-max_total_time={FUZZ_SECONDS}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a target runs on one core
        runs = list(pool.map(run_target, names))
    for name, done in zip(names, runs, strict=True):
        print(f"{name}: {done.executions} executions, {done.coverage} edges", flush=True)
        if done.code == 0:
            outcome.passed += 1
        else:
            print(done.failure, flush=True)
            outcome.fail(f"fuzz {name}: exit {done.code}; the input is beside build/results/tests.json")
    return outcome


STAGES: dict[str, Callable[[bool], Outcome]] = {
    "release": lambda build_only: ctest("release", build_only),
    "asan": lambda build_only: ctest("asan", build_only),
    "tsan": lambda build_only: ctest("tsan", build_only),
    "python": python,
    "example": example,
    "fuzz": fuzz,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run everything that tests, and sum it up.")
    parser.add_argument("--only", default=",".join(STAGES), help="stages, separated by commas (default: all)")
    parser.add_argument("--build-only", action="store_true", help="build what the stages need, run nothing")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"unknown stage {unknown[0]!r}; there are {', '.join(STAGES)}")

    # Ignored in the background of a shell script, also in the processes that test how they end by it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    RESULTS.mkdir(parents=True, exist_ok=True)
    stages = dict(STAGES)
    if "python" in names and not options.build_only:
        stages["python"] = partial(python, sglang=install_sglang())
    outcomes: dict[str, Outcome] = {}
    for name in names:
        print(f"\n==== {name}", flush=True)
        start = time.monotonic()
        try:
            outcome = stages[name](options.build_only)
            if not options.build_only and not outcome.total:
                outcome.fail(f"{name} ran no test")
        except StageError as error:
            outcome = Outcome()
            outcome.fail(str(error))
        outcome.seconds = time.monotonic() - start
        outcomes[name] = outcome
    if options.build_only:
        return max(outcome.failed for outcome in outcomes.values()) and 1
    write_results(RESULTS / "tests.json", outcomes)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
