"""The `trunkline` command: the bundled program, and the commands and reports that need Python."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trunkline import report
from trunkline._cli_errors import report_error
from trunkline._command import INTERRUPTED
from trunkline._errors import Cancelled, Error, errno_reason
from trunkline._formats.dcp_names import is_dcp_directory
from trunkline._formats.node_names import ALL_NODES, is_node_directory
from trunkline._html import check_page_name, check_writable, why_not_writable

_OK, _FAILED, _USAGE = 0, 1, 2  # the exit statuses of src/cli
# Of `trunkline checkpoint`, those in Python; the program has the others.
_CHECKPOINT_COMMANDS = ("export", "import", "rm", "diff", "plan")
# Those in Python for directories of trunkline.dcp and of nodes, and in the program for others.
_ALSO_IN_PYTHON = ("ls", "show", "verify", "gc")


def _program() -> Path:
    """Return the program in this package, or the one that TRUNKLINE_CLI names (for development)."""
    named = os.environ.get("TRUNKLINE_CLI")
    return Path(named) if named else Path(__file__).parent / "bin" / "trunkline"


class _UsageError(ValueError):
    """The command line is not valid; nothing was started."""


def _take_option(arguments: list[str], name: str) -> tuple[str | None, list[str]]:
    """Return the value of the last `--name VALUE` or `--name=VALUE`, and the arguments without it."""
    value: str | None = None
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == name:
            value = next(remaining, None)
            if not value:
                raise _UsageError(f"{name} requires a file name")
            if value.startswith("--"):
                raise _UsageError(
                    f"{name} requires a file name, and {value} is an option; for a file of that name write "
                    f"{name}={value}"
                )
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
            if not value:
                raise _UsageError(f"{name} requires a file name")
        else:
            rest.append(argument)
    return value, rest


def _reason_of(error: OSError) -> str:
    return str(error) if error.errno is None else errno_reason(error.errno)


def _check_report(path: Path, arguments: list[str]) -> None:
    """Raise _UsageError, before the benchmark runs, if the report could not be written."""
    if any(_is_same_file(argument, path) for argument in arguments):
        raise _UsageError(f"--report {path} is the file to be measured; name another file")
    check_page_name(str(path))
    if not report.available():
        raise _UsageError(report.MISSING_MATPLOTLIB)
    try:
        check_writable(path)
    except OSError as error:
        raise _UsageError(f"--report: cannot write {path}: {why_not_writable(error, path)}") from error


def _is_same_file(argument: str, path: Path) -> bool:
    try:
        return path.samefile(argument)
    except (OSError, ValueError):
        return False


def _run(command: list[str]) -> int:
    """Run the program with our standard streams; forward signals to it."""
    process: subprocess.Popen[bytes] | None = None
    pending: list[int] = []

    def forward(signum: int, _frame: FrameType | None) -> None:
        if process is None:
            pending.append(signum)
        else:
            process.send_signal(signum)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, forward) for each in signals}
    try:
        process = subprocess.Popen(command)
        for signum in pending:
            process.send_signal(signum)
        return process.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _end_by(signum: int) -> NoReturn:
    """End by the same signal as the program, so that a shell recognizes an interrupt."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    raise SystemExit(128 + signum)


def _bench_with_report(arguments: list[str], path: Path) -> int:
    _check_report(path, arguments)
    output, arguments = _take_option(arguments, "--output")
    with tempfile.TemporaryDirectory(prefix="trunkline-") as directory:
        results = Path(output) if output else Path(directory) / "bench.json"
        status = _run([str(_program()), *arguments, "--output", str(results)])
        if status < 0:
            _end_by(-status)
        if status != _OK:
            return status
        if not results.exists():  # --help: nothing was measured
            return _OK
        document = json.loads(results.read_text())
    try:
        report.write_report(document, path)
    except OSError as error:
        # The results are on stdout already; a second document would make them unreadable.
        print(f"trunkline bench: cannot write the report {path}: {_reason_of(error)}", file=sys.stderr)
        return _FAILED
    print(f"report: {path}", file=sys.stderr)
    return _OK


def _complete(arguments: list[str]) -> int:
    """Run `completion`, which is in the program; the commands in Python are passed to it."""
    from trunkline._checkpoint_tools.cli import make_parser as checkpoint_parser
    from trunkline._completion import package_commands
    from trunkline.stream.cli import make_parser as stream_parser
    from trunkline.workload import builtin_names
    from trunkline.workload.cli import make_parser as workload_parser

    words = {"NAME_OR_FILE": builtin_names()}
    commands = package_commands(stream_parser(), workload_parser(), checkpoint_parser(), words)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(commands, file)
        file.flush()
        return _run([str(_program()), *arguments, "--package-commands", file.name])


def _is_in_python(command: str, arguments: list[str]) -> bool:
    """Whether a command of `trunkline checkpoint` is in Python: some are for directories of certain kinds."""
    if command in _CHECKPOINT_COMMANDS:
        return True
    return command in _ALSO_IN_PYTHON and any(
        each == ALL_NODES or is_dcp_directory(each) or is_node_directory(each) for each in arguments
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status, unless the program replaces this process."""
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["bench"]:
            target, rest = _take_option(arguments, "--report")
            if target is not None:
                return _bench_with_report(rest, Path(target))
        if arguments[:1] in (["pack"], ["plan"]):
            from trunkline.stream import cli as stream

            return stream.main(arguments)
        if arguments[:1] == ["checkpoint"] and arguments[1:2] and _is_in_python(arguments[1], arguments[2:]):
            from trunkline._checkpoint_tools import cli as checkpoint

            return checkpoint.main(arguments[1:])
        if arguments[:1] == ["workload"]:
            from trunkline.workload import cli as workload

            return workload.main(arguments)
        if arguments[:1] == ["completion"]:
            return _complete(arguments)
        program = str(_program())
        if sys.stdout is not None:  # None: it is closed (cron, `>&-`)
            sys.stdout.flush()
        os.execv(program, [program, *arguments])
    except ValueError as error:
        report_error("bench", error, "--json" in arguments)
        return _USAGE
    except FileNotFoundError:
        missing = f"the program {_program()} is missing; reinstall the package"
        report_error(arguments[0] if arguments else "", Error(errno.ENOENT, missing), "--json" in arguments)
        return _FAILED
    except KeyboardInterrupt:  # while the command's modules were imported, which may take seconds
        report_error(arguments[0], Cancelled(errno.ECANCELED, "interrupted"), "--json" in arguments)
        return INTERRUPTED
