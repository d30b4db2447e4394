"""Traces of routing: which experts each step of a model used. docs/formats/routing-trace.md.

They are recorded on request, to be replayed over sizes of memory: cache_sizes.py.
"""

import errno
import fcntl
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from trunkline import _core
from trunkline._errors import Corrupt, CutOff, Error, Format, exception_of, system_error, system_errors
from trunkline._logging import Log

VARIABLE = "TRUNKLINE_ROUTING_TRACE"
_FORMAT = "trunkline routing trace"
_VERSION = 1
_BEGINNING = f'{{"format": "{_FORMAT}", '.encode()
_MAX_LINE = 16 << 20
_OPTIONS = os.O_RDWR | os.O_CLOEXEC
_CHECKSUM = re.compile(rb"(.*) ([0-9a-f]{8})\n", re.DOTALL)

_log = Log("stream")
_models = itertools.count(1)  # of this process that the environment variable holds for

# An expert, and how many of the step's tokens use it.
Use: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """What the tokens of one step of a module used, in the order of the experts."""

    module: int
    tokens: int
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class RoutingTrace:
    """The steps of a model in their order. `modules`: the name of each, and how many experts it has."""

    path: str
    model: str
    modules: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]


class TraceWriter:
    """Writes a trace as the model runs. For one thread at a time, like the model.

    Each pass through the modules is written when it ends, so that a process that is killed loses one at most.
    A write that fails ends the trace, with a logged warning, and not the pass.
    """

    def __init__(self, path: str, model: str, modules: Sequence[tuple[str, int]]) -> None:
        """Open the file. Raises OSError, FileExistsError for one that is not a trace."""
        self._path = path
        self._last = len(modules) - 1
        self._process = os.getpid()
        self._file, self._is_new = _opened(path)
        self._size = 0
        self._checksum = 0
        self._lines: list[bytes] = []
        self._header = {"format": _FORMAT, "version": _VERSION, "model": model, "modules": modules}

    def begin(self) -> None:
        """Replace what is in the file. Raises OSError."""
        os.ftruncate(self._file, 0)
        self._add(json.dumps(self._header))
        self._write()

    def record(self, module: int, tokens: int, uses: Sequence[Use]) -> None:
        """Record a step."""
        if self._file < 0 or os.getpid() != self._process:
            return
        experts, counts = [expert for expert, _ in uses], [count for _, count in uses]
        step = [module, tokens, experts] if max(counts, default=1) == 1 else [module, tokens, experts, counts]
        self._add(json.dumps(step, separators=(",", ":")))
        if module == self._last:
            self._write()

    def discard(self) -> None:
        """Leave things as they were before the file was opened; only before begin()."""
        if self._is_new:
            with suppress(OSError):
                os.unlink(self._path)  # noqa: PTH108 - as it was opened
        self._close()

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._file >= 0 and os.getpid() == self._process:
            self._write()
            self._close()

    def _add(self, text: str) -> None:
        line = text.encode()
        self._checksum = _core.crc32c(line, self._checksum)
        self._lines.append(b"%b %08x\n" % (line, self._checksum))

    def _write(self) -> None:
        left = memoryview(b"".join(self._lines))
        self._lines.clear()
        try:
            while left and self._file >= 0:
                left = left[os.write(self._file, left) :]
            self._size = os.lseek(self._file, 0, os.SEEK_CUR)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)  # whole passes only
            _log.warn("%s: the trace of routing ends here: %s", self._path, error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, -1
        with suppress(OSError):  # closing alone would not release it while a forked child has a copy
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def path_from_environment() -> str | None:
    """Return where TRUNKLINE_ROUTING_TRACE says that the next model's trace goes; None if it is not set.

    "%p" in it is the process id. To the names of all models but the first, their number is appended.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    number = next(_models)
    return name.replace("%p", str(os.getpid())) + (f".{number}" if number > 1 else "")


def read(path: Path) -> RoutingTrace:
    """Read a trace.

    Raises Format for a file of another format or version; Corrupt for a damaged one, CutOff for one that ends
    within a line, which name the line; OSError.
    """
    with system_errors(f"read the trace of routing {path}", path), path.open("rb") as file:
        return parse(iter(lambda: file.readline(_MAX_LINE), b""), str(path))


def parse(lines: Iterable[bytes], path: str) -> RoutingTrace:
    """Parse the lines of the file at `path`, each with its end. Raises as read() does."""
    number, checksum = 0, 0
    model = ""
    modules: tuple[tuple[str, int], ...] = ()
    steps: list[Step] = []
    for number, line in enumerate(lines, 1):
        where = f"{path}: line {number}"
        if number == 1 and not line.startswith(_BEGINNING):
            break
        text, checksum = _checked(line, checksum, where, path)
        try:
            if number == 1:
                model, modules = _parse_header(text)
            else:
                steps.append(_parse_step(text, modules))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise Format(None, f"{where} is not valid in a trace of routing: {error}", path) from error
    if not modules:
        raise Format(
            None, f"{path} is not a trace of routing, which from_pretrained(routing_trace=) records", path
        )
    return RoutingTrace(path, model, modules, tuple(steps))


def _checked(line: bytes, before: int, where: str, path: str) -> tuple[bytes, int]:
    """Return a line without its checksum, and the checksum, which is that of all lines until here."""
    if not line.endswith(b"\n"):
        what = "is cut off" if len(line) < _MAX_LINE else f"has more than {_MAX_LINE} bytes"
        raise CutOff(
            None, f"{where} {what}; remove that line to use those before it: head -n -1 {path}", path
        )
    found = _CHECKSUM.fullmatch(line)
    checksum = _core.crc32c(found[1], before) if found else None
    if found is None or int(found[2], 16) != checksum:
        raise Corrupt(
            None, f"{where} is damaged, or lines before it are missing: its checksum does not match", path
        )
    return found[1], int(found[2], 16)


def _parse_header(text: bytes) -> tuple[str, tuple[tuple[str, int], ...]]:
    document = json.loads(text)
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']!r} is not supported; upgrade trunkline")
    model = document["model"]
    modules = tuple((name, _whole(count, "the number of experts", 1)) for name, count in document["modules"])
    if not isinstance(model, str) or not all(isinstance(name, str) for name, _ in modules):
        raise TypeError("a name is not a string")
    if not modules:
        raise ValueError("there are no modules")
    return model, modules


def _parse_step(text: bytes, modules: Sequence[tuple[str, int]]) -> Step:
    values = json.loads(text)
    if not isinstance(values, list) or len(values) not in (3, 4):
        raise ValueError("a step has three or four elements")
    module = _whole(values[0], "the module", 0, len(modules) - 1)
    tokens = _whole(values[1], "the number of tokens", 1)
    last = modules[module][1] - 1
    experts = [_whole(expert, "an expert", 0, last) for expert in values[2]]
    if any(first >= second for first, second in itertools.pairwise(experts)):
        raise ValueError("the experts are not in their order")
    counts = values[3] if len(values) == 4 else [1] * len(experts)
    uses = tuple(
        (expert, _whole(count, "the use of an expert", 1))
        for expert, count in zip(experts, counts, strict=True)
    )
    return Step(module, tokens, uses)


def _whole(value: Any, what: str, least: int, most: int = 2**63 - 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {value!r}, not a whole number from {least} to {most}")
    return value


def _opened(path: str) -> tuple[int, bool]:
    """Return a file for a trace, which no other model can write as long as it is open; and whether it is new.

    An earlier trace in it is still there.
    """
    action = f"record the trace of routing {path}"
    file, is_new = -1, True
    try:
        try:
            file = os.open(path, _OPTIONS | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            file, is_new = os.open(path, _OPTIONS), False
        _lock(file, action, path)
        if os.pread(file, len(_BEGINNING), 0) not in (b"", _BEGINNING):
            message = f"cannot {action}: the file exists, and is not such a trace; choose another name"
            raise exception_of("system", errno.EEXIST, message, path)
    except OSError as error:
        if file >= 0:
            os.close(file)
        if isinstance(error, Error):
            raise
        raise system_error(error, action, path) from error
    return file, is_new


def _lock(file: int, action: str, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"cannot {action}: another model is writing it; choose another name"
        raise exception_of("system", errno.EBUSY, message, path) from None
    except OSError as error:  # a filesystem without locks
        _log.debug("%s: not locked: %s", path, error)
