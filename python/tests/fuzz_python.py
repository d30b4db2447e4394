"""Runs one target of fuzz_targets.py, led by coverage: `scripts/fuzz.py --python` does.

fuzz_python.py TARGET [options] CORPUS...    mutate the inputs of all folders; new ones go into the first
fuzz_python.py --seeds DIR                   print the targets, and write the seeds of each into DIR/TARGET

Options and output are those of libFuzzer that scripts/fuzz.py uses: -runs=N, -max_total_time=SECONDS,
-artifact_prefix=PATH, -seed=N, and -merge=1 or -set_cover_merge=1, which write a few inputs (of -max_len=N
bytes at most) with the coverage of all folders into the first.

Tracing every line costs many times what a parser does. So only these inputs are traced: one of _TRACED, and
each that is rejected at a place where none was before.
"""

import gc
import hashlib
import random
import signal
import sys
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_TRACED = 64
_HANGS_SECONDS = 60  # of processor time for _BATCH inputs
_BATCH = 1024

Arc = tuple[CodeType, int, int]  # two lines of a function, one after the other


class Hung(BaseException):
    """The parser takes too long."""


class Tracer:
    """The lines of the package that inputs reach."""

    def __init__(self, folder: str) -> None:
        """`folder`: of the source files that count."""
        self._folder = folder
        self._arcs: set[Arc] = set()

    def arcs_of(self, target: Any, data: bytes) -> set[Arc]:
        """Run the target, and return the arcs that it takes."""
        self._arcs = set()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            target(data)
        finally:
            sys.settrace(before)
        return self._arcs

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._folder):
            return None
        add = self._arcs.add
        before = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            if event == "line":
                add((code, before, frame.f_lineno))
                before = frame.f_lineno
            return line

        return line


def place_of(error: BaseException) -> tuple[int, CodeType] | None:
    """Return where an error was raised."""
    last = error.__traceback__
    if last is None:
        return None
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_lasti, last.tb_frame.f_code


class Fuzzer:
    """One target, the inputs that reach something of their own, and what they reach."""

    def __init__(self, name: str, tracer: Tracer, rng: random.Random) -> None:
        from fuzz_targets import TARGETS, new_mutator

        self.executions = 0
        self.arcs: set[Arc] = set()
        self.current = b""  # the input that was tried last
        self._target = TARGETS[name]
        self._mutator = new_mutator(name, rng, [])
        self._tracer = tracer
        self._places: set[Any] = set()

    def try_traced(self, data: bytes) -> bool:
        """Run an input, and return whether it reached something new: then it is mutated from now on."""
        self.current = data
        self.executions += 1
        found = self._tracer.arcs_of(self._target, data)
        if found <= self.arcs:
            return False
        self.arcs |= found
        self._mutator.add(data)
        return True

    def run(self, executions: int, seconds: float, new_inputs: Path) -> None:
        """Try mutations, and write those that reach something new into a folder."""
        until = time.monotonic() + seconds
        end = self.executions + executions
        while self.executions < end and time.monotonic() < until:
            signal.setitimer(signal.ITIMER_PROF, _HANGS_SECONDS)
            for _ in range(_BATCH // _TRACED):
                self._try_some(min(_TRACED, end - self.executions) - 1, new_inputs)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _try_some(self, untraced: int, new_inputs: Path) -> None:
        """Try some mutations, and one that is traced."""
        mutation, target, places = self._mutator.mutation, self._target, self._places
        for _ in range(untraced):
            self.current = data = mutation()
            error = target(data)
            if error is not None and (place := place_of(error)) not in places:
                places.add(place)
                self._try_new(data, new_inputs)
        self.executions += max(untraced, 0)
        self._try_new(mutation(), new_inputs)

    def _try_new(self, data: bytes, new_inputs: Path) -> None:
        if self.try_traced(data):
            (new_inputs / hashlib.sha1(data).hexdigest()).write_bytes(data)


def inputs_of(folders: list[Path], max_bytes: int) -> list[bytes]:
    """Return the inputs in the folders, the smallest first."""
    found = {path.read_bytes() for folder in folders for path in folder.iterdir()}
    return sorted((data for data in found if len(data) <= max_bytes), key=lambda data: (len(data), data))


def merge(fuzzer: Fuzzer, folders: list[Path], max_bytes: int) -> None:
    """Write the inputs that are needed for the coverage of all into the first folder."""
    for data in inputs_of(folders[1:], max_bytes):
        if fuzzer.try_traced(data):
            (folders[0] / hashlib.sha1(data).hexdigest()).write_bytes(data)


def write_seeds(folder: Path) -> None:
    """Write the seeds of all targets, and print their names."""
    from fuzz_targets import TARGETS, seeds

    for name in TARGETS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds(name)):
            (folder / name / f"seed-{number}").write_bytes(data)
        print(name)


def _hung(*_: Any) -> None:
    raise Hung


def main() -> None:
    """Run what the arguments say."""
    if sys.argv[1] == "--seeds":
        write_seeds(Path(sys.argv[2]))
        return
    import trunkline

    name, *arguments = sys.argv[1:]
    options = dict(each[1:].split("=", 1) for each in arguments if each.startswith("-"))
    folders = [Path(each) for each in arguments if not each.startswith("-")]
    fuzzer = Fuzzer(name, Tracer(str(Path(trunkline.__file__).parent)), random.Random(options.get("seed")))
    signal.signal(signal.SIGPROF, _hung)
    gc.freeze()  # the modules: nothing of them becomes garbage
    try:
        run(fuzzer, folders, options)
    except BaseException:
        path = Path(f"{options.get('artifact_prefix', '')}crash-{hashlib.sha1(fuzzer.current).hexdigest()}")
        path.write_bytes(fuzzer.current)
        print(f"{fuzzer.current!r}\nTest unit written to {path}", file=sys.stderr)
        raise
    print(f"cov: {len(fuzzer.arcs)}\nstat::number_of_executed_units: {fuzzer.executions}", file=sys.stderr)


def run(fuzzer: Fuzzer, folders: list[Path], options: dict[str, str]) -> None:
    """Fuzz or merge."""
    max_bytes = int(options.get("max_len", 1 << 20))
    if "merge" in options or "set_cover_merge" in options:
        merge(fuzzer, folders, max_bytes)
        return
    for data in inputs_of(folders, max_bytes):
        fuzzer.try_traced(data)
    executions = int(options.get("runs", 1 << 62))
    fuzzer.run(executions, float(options.get("max_total_time", "inf")), folders[0])


if __name__ == "__main__":
    main()
