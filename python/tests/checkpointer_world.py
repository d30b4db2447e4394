"""What checkpointer_rounds.py does for real: directories of checkpoints, and Checkpointers on them."""

import contextlib
import errno
import faulthandler
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpointer_model import Op, Result
from random_states import can_be_filled, difference, fill, gaps_are_untouched, state_of
from support_program import PROGRAM

import trunkline as tl

_HANGS_SECONDS = 120
_STEP = re.compile(r"step-(\d+)")
_MANIFEST = re.compile(r"manifest-(\d+)")
_CODES = {errno.EIO: "io", errno.ENOSPC: "io", errno.EMFILE: "fds", errno.EBUSY: "busy"}

# What is on disk in a directory: the id of its descriptor, steps with the numbers of their states.
Seen = tuple[str | None, list[tuple[int, int | None]]]


def observe(directory: Path) -> Seen:
    """Read a directory without the library."""
    run = None
    descriptor = directory / "trunkline-checkpoints.json"
    if descriptor.exists():
        run = json.loads(descriptor.read_text())["id"]
    found = []
    for folder in directory.glob("step-*"):
        newest = newest_manifest(folder)
        if newest is not None:
            found.append((*newest, step_of(folder)))
    return run, [(step, _state_in(path)) for _, path, step in sorted(found)]


def step_of(folder: Path) -> int:
    """Return the number in the name of a step's directory."""
    matched = _STEP.fullmatch(folder.name)
    assert matched is not None, folder
    return int(matched[1])


def newest_manifest(folder: Path) -> tuple[int, Path] | None:
    """Return the commit and the path of the manifest that counts."""
    commits = [(int(m[1]), path) for path in folder.iterdir() if (m := _MANIFEST.fullmatch(path.name))]
    return max(commits, default=None)


def manifest_in(path: Path) -> dict[str, Any]:
    """Return the JSON of a manifest; {} where that is cut off."""
    _, _, text = path.read_bytes().partition(b"\n")
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}


def shards_of(directory: Path, manifest: dict[str, Any]) -> list[Path]:
    """Return the paths of the shards that a manifest names."""
    volumes = [directory if each == "." else Path(each) for each in manifest["volumes"]]
    step = f"step-{manifest['step']:08}"
    return [volumes[shard["volume"]] / step / shard["file"] for shard in manifest["shards"]]


def _state_in(path: Path) -> int | None:
    manifest = manifest_in(path)
    return int(manifest["state"]["dict"][1]) if manifest else None


class World:
    """Directories below `root`, and Checkpointers on them in slots."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slots: dict[str, tl.Checkpointer] = {}
        self.pending: dict[str, tuple[Op, tl.SaveHandle]] = {}
        self.trace = ""  # of the last error

    def perform(self, op: Op) -> Result:
        """Do an operation; ("pending", None) for a save that goes on in the background."""
        self.trace = ""
        try:
            with warnings.catch_warnings(), few_descriptors(op.get("fds")):
                warnings.simplefilter("ignore")
                return getattr(self, f"_{op['do']}")(op)  # type: ignore[no-any-return]
        except Exception as error:
            self.trace = traceback.format_exc()
            return "error", _kind(error)

    def settled(self, handle: tl.SaveHandle) -> Result:
        """Wait for a save that goes on in the background."""
        try:
            handle.wait()
        except Exception as error:
            self.trace = traceback.format_exc()
            return "error", _kind(error)
        return "ok", None

    def drop(self, slot: str) -> None:
        """Forget a Checkpointer."""
        self.slots.pop(slot, None)

    def _open(self, op: Op) -> Result:
        self.slots.pop(op["slot"], None)
        volumes = None if op["volumes"] is None else [self.root / each for each in op["volumes"]]
        self.slots[op["slot"]] = tl.Checkpointer(
            self.root / op["path"],
            keep=op["keep"],
            fresh=op["fresh"],
            volumes=volumes,
            process_group=False,
            incremental=op.get("incremental", False),
            full_every=op.get("full_every"),
        )
        return "ok", None

    def _save(self, op: Op) -> Result:
        checkpointer = self.slots[op["slot"]]
        state = state_of(op["state"])
        was_checked = not checkpointer._must_check_early
        with _faults(checkpointer, op.get("fault"), op.get("disturb")):
            if op["how"] == "block":
                checkpointer.save(op["step"], state, block=True)
                return "ok", None
            handle = checkpointer.save(op["step"], state)
            if op.get("cancel"):
                handle.cancel()
            else:
                handle.wait_staged()
                fill(state)
            if op["how"] == "pending":
                self.pending[op["slot"]] = op, handle
                return "pending", None
            try:
                handle.wait()
            except FileExistsError:
                if not was_checked and not op.get("racing"):
                    return "error", "exists, which the first save has not said itself"
                raise
        return "ok", None

    def _load(self, op: Op) -> Result:
        checkpointer = self.slots[op["slot"]]
        into = self._into(checkpointer, op.get("step")) if op.get("into") else None
        with _faults(checkpointer, op.get("fault"), op.get("disturb")):
            state = checkpointer.load(op.get("step"), into, verify=op.get("verify", True))
        why = difference(state, state_of(state["seed"]), filled=into is not None)
        if why is None and into is not None and not gaps_are_untouched(into):
            why = "what is between the elements of `into` has changed"
        if why is not None and op.get("verify") is False:
            return "ok", "damaged"
        return ("ok", state["seed"]) if why is None else ("error", f"another state: {why}")

    def _into(self, checkpointer: tl.Checkpointer, step: int | None) -> Any:
        seen = observe(Path(checkpointer.directory))[1]
        states = [state for at, state in seen if step in (None, at)]
        if not states or states[-1] is None:
            return None
        into = state_of(states[-1])
        if not can_be_filled(into):
            return None
        fill(into)
        return into

    def _verify(self, op: Op) -> Result:
        self.slots[op["slot"]].verify(op["step"])
        return "ok", None

    def _steps(self, op: Op) -> Result:
        return "ok", self.slots[op["slot"]].steps()

    def _latest(self, op: Op) -> Result:
        return "ok", self.slots[op["slot"]].latest()

    def _delete(self, op: Op) -> Result:
        self.slots[op["slot"]].delete(op["step"])
        return "ok", None

    def _gc(self, op: Op) -> Result:
        directory = self.root / op["path"]
        if op.get("program"):
            done = subprocess.run(
                [str(PROGRAM), "checkpoint", "gc", str(directory), "--json"],
                capture_output=True,
                text=True,
                timeout=_HANGS_SECONDS,
                check=False,
            )
            report = json.loads(done.stdout)
            if "error" in report:
                return "error", report["error"]["kind"]
            return "ok", "busy" if report["busy"] else None
        swept = tl._core.CheckpointStore(directory).collect()
        return "ok", "busy" if swept["busy"] else None

    def run_child(self, script: list[Op], end: Any, meanwhile: Op | None) -> tuple[list[Any], Result | None]:
        """Do a script in a forked process, which is ended as `end` says.

        Returns its operations with their results (None for one that was cut off), and that of `meanwhile`,
        which this process does at the same time.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self._be_child(script, end, writing)
        os.close(writing)
        try:
            result = self.perform(meanwhile) if meanwhile is not None else None
            is_killed = bool(end) and "kill" in end
            heard, is_over = _listen(reading, end["kill"] if is_killed else _HANGS_SECONDS)
            assert is_over or is_killed, "a process hangs"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        text = heard + _rest(reading)
        os.close(reading)
        expected = (-signal.SIGKILL, 0) if is_killed else (0,)
        assert os.waitstatus_to_exitcode(status) in expected, f"a process ended with {status}"
        lines = [json.loads(line) for line in text.split(b"\n")[:-1]]
        results = {number: tuple(value) for number, value in lines if value is not None}
        return [(script[number], results.get(number)) for number, value in lines if value is None], result

    def _be_child(self, script: list[Op], end: Any, writing: int) -> None:
        try:
            faulthandler.dump_traceback_later(_HANGS_SECONDS - 20, exit=True)
            for number, op in enumerate(script):
                os.write(writing, json.dumps([number, None]).encode() + b"\n")
                result = self.perform(op)
                if self.trace and ":" in str(result[1]):
                    result = ("error", self.trace)
                os.write(writing, json.dumps([number, result]).encode() + b"\n")
                if end and "exit" in end and op["do"] == "open" and result[0] == "ok":
                    place = self.slots[op["slot"]]._context
                    place.store = _Ending(place.store, *end["exit"])  # type: ignore[assignment]
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)


class _Ending:
    """A store that ends the process before or after one of its functions, or of those of its saves."""

    def __init__(self, store: Any, function: str, when: str) -> None:
        self._store, self._function, self._when = store, function, when

    def __getattr__(self, name: str) -> Any:
        wrapped = getattr(self._store, name)
        if name != self._function and name == "begin":
            return lambda *arguments: _Ending(wrapped(*arguments), self._function, self._when)
        if name != self._function:
            return wrapped

        def call(*arguments: Any, **options: Any) -> Any:
            if self._when == "before":
                os._exit(0)
            wrapped(*arguments, **options)
            os._exit(0)

        return call


def _listen(reading: int, seconds: float) -> tuple[bytes, bool]:
    """Return what comes in so many seconds, and whether that is all."""
    text = b""
    deadline = time.monotonic() + seconds
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            return text, True
        text += part
    return text, False


def _rest(reading: int) -> bytes:
    text = b""
    while part := os.read(reading, 1 << 16):
        text += part
    return text


def _kind(error: Exception) -> str:
    code = getattr(error, "errno", None)
    for of, kind in (
        (tl.Cancelled, "cancelled"),
        (FileExistsError, "exists"),
        (FileNotFoundError, "missing"),
        (tl.Corrupt, "corrupt"),
        (tl.Unsupported, "unsupported"),
    ):
        if isinstance(error, of):
            return kind
    if code in _CODES and isinstance(error, (tl.Error, OSError)):
        return _CODES[code]
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _faults(checkpointer: tl.Checkpointer, fault: Any, disturb: int | None) -> Iterator[None]:
    """Let a command of the engine fail ([op, number, errno]), or disturb all (a seed)."""
    if fault is None and disturb is None:
        yield
        return
    faults = tl.Faults()
    if fault is not None:
        faults.fail(*fault)
    if disturb is not None:
        faults.disturb(disturb, 0.2, 0.2)
    before = checkpointer._engine, checkpointer._context.engine
    with tl.Engine("threads", faults=faults, block_bytes="64KiB", lanes=1) as engine:
        checkpointer._engine = checkpointer._context.engine = engine
        try:
            yield
        finally:
            checkpointer._engine, checkpointer._context.engine = before


@contextlib.contextmanager
def few_descriptors(count: int | None) -> Iterator[None]:
    """Leave this process so many file descriptors more."""
    if count is None:
        yield
        return
    used = {int(each) for each in os.listdir("/proc/self/fd")}  # noqa: PTH208
    limit = next(n for n in range(4096) if sum(each not in used for each in range(n)) == count)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def copy_directory(source: Path, target: Path) -> None:
    """Copy as cp -a does."""
    shutil.copytree(source, target, symlinks=True)
