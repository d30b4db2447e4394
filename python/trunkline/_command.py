"""What the commands in Python share: how arguments are parsed, results printed and failures reported."""

import argparse
import difflib
import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from trunkline._cli_errors import print_error_document, report_error
from trunkline._errors import Cancelled
from trunkline._help import help_text

OK, FAILED, USAGE = 0, 1, 2  # the exit statuses of src/cli
INTERRUPTED = 130


class _UsageError(ValueError):
    """The parser rejects the arguments."""

    def __init__(self, message: str, command: str) -> None:
        super().__init__(message)
        self.command = command


class Parser(argparse.ArgumentParser):
    """Raises ValueError for wrong arguments. The defaults of each command have `run`.

    `run` takes the parsed arguments; it returns the JSON document and the text that says the same. Where
    another process prints both, the text is None.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject unknown arguments of a subcommand here, so that the error refers to its own --help."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            self.error(f"unrecognized arguments: {unknown[0]}{_meant(unknown[0], known)}")
        return options, unknown

    def format_help(self) -> str:
        """Return the help text, in the layout of all commands."""
        return help_text(self)

    def error(self, message: str) -> NoReturn:
        """Raise what run_command() reports."""
        raise _UsageError(_reworded(message, self._subcommands()), self.prog)

    def _subcommands(self) -> list[str]:
        actions = self._subparsers._group_actions if self._subparsers is not None else []
        return [name for action in actions for name in action.choices or ()]


def _reworded(message: str, subcommands: Sequence[str]) -> str:
    """Say what argparse says as the other commands say it."""
    message = re.sub(r"^(argument --[^/: ]+)(/[^: ]+)+", r"\1", message)  # without the other names
    number = re.fullmatch(r"argument (\S+): invalid int value: '(.*)'", message)
    if number:
        return f'{number[1]}: must be a whole number, not "{number[2]}"'
    real = re.fullmatch(r"argument (\S+): invalid float value: '(.*)'", message)
    if real:
        return f'{real[1]}: must be a number, not "{real[2]}"'
    choice = re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
    if choice:
        known = choice[3].replace("'", "")
        if choice[1].startswith("-"):
            return f'{choice[1]}: "{choice[2]}" is not one of {known}'
        meant = _meant(choice[2], known.split(", "))
        return f"unknown subcommand '{choice[2]}'{meant or f'; there are {known}'}"
    both = re.fullmatch(r"argument ([^/:]+)(?:/\S+)?: not allowed with argument ([^/:]+)(?:/\S+)?", message)
    if both:
        return f"{both[2]} and {both[1]} cannot be combined"
    one = re.fullmatch(r"one of the arguments (.*) is required", message)
    if one:
        return f"one of {', '.join(one[1].split())} is required"
    lacking = re.fullmatch(r"the following arguments are required: (.*)", message)
    if lacking and subcommands:
        return f"a subcommand is required: one of {', '.join(subcommands)}"
    if lacking:
        names = re.sub(r"(--[^/, ]+)/[^, ]+", r"\1", lacking[1])  # without the other names
        return f"{names} {'are' if ', ' in names else 'is'} required"
    unknown = re.fullmatch(r"unrecognized arguments: (.*?)(\. Did you mean .*)?", message)
    if unknown:
        what = "option" if unknown[1].startswith("-") else "argument"
        return f"unknown {what} '{unknown[1]}'{unknown[2] or ''}"
    return message.removeprefix("argument ")


def _meant(given: str, known: Sequence[str]) -> str:
    """Return a question for the known name that is most like the given one; empty if none is."""
    other = {"ls": "list", "list": "ls"}.get(given)
    if other in known:
        return f". Did you mean '{other}'?"
    nearest = difflib.get_close_matches(given.partition("=")[0], known, n=1, cutoff=0.7)
    return f". Did you mean '{nearest[0]}'?" if nearest else ""


@contextmanager
def _warnings_as_lines(command: str) -> Iterator[None]:
    """Let warnings be printed as errors are: where in Python they come from says nothing to the user."""
    before = warnings.formatwarning

    def line_of(message: Warning | str, *_: Any, **__: Any) -> str:
        return f"trunkline {command}: warning: {message}\n"

    warnings.formatwarning = line_of
    try:
        yield
    finally:
        warnings.formatwarning = before


def run_command(
    name: str,
    parser: Parser,
    arguments: Sequence[str],
    interrupted: Callable[[argparse.Namespace], str],
    finish: Callable[[argparse.Namespace, dict[str, Any]], object] = lambda options, document: None,
    option_names: Mapping[str, str] | None = None,
    *,
    status_of: Callable[[dict[str, Any]], int] = lambda document: OK,
    usage_errors: tuple[type[OSError], ...] = (),
    failed: int = FAILED,
    is_first: bool = True,
) -> int:
    """Parse the arguments, run the command that they name, and print its result; return the exit status.

    `interrupted`: what Ctrl-C has left, for the message. `finish`: what comes after the document is printed,
    which it cannot take back. `status_of`: the exit status of a command that has not failed, by its document.
    `usage_errors`: errors that count as wrong usage. `failed`: the exit status of
    other errors. `option_names`: the option for each argument that an error may name. `is_first`: False on
    the ranks that leave the document to rank 0.
    """
    wants_json = "--json" in arguments and is_first
    options = argparse.Namespace(command="")
    try:
        options = parser.parse_args(arguments)
        action: Callable[[argparse.Namespace], tuple[dict[str, Any], str | None]] = options.run
        with _warnings_as_lines(name):
            document, text = action(options)
    except _UsageError as error:
        report_error(name, error, wants_json, option_names)
        print(f"See {error.command} --help.", file=sys.stderr)
        return USAGE
    except ValueError as error:
        report_error(name, error, wants_json, option_names)
        return USAGE
    except OSError as error:
        report_error(name, error, wants_json, option_names)
        return USAGE if isinstance(error, usage_errors) else failed
    except KeyboardInterrupt:
        message = f"interrupted{interrupted(options)}"
        report_error(name, Cancelled(errno.ECANCELED, message), wants_json)
        return INTERRUPTED
    except Exception as error:  # of other libraries: the traceback says where
        if wants_json:
            print_error_document(name, error)
        raise
    try:
        if text is not None:
            print(json.dumps(document, indent=2) if options.json else text, flush=True)
    except BrokenPipeError:  # as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    try:
        finish(options, document)
    except (OSError, ValueError) as error:
        report_error(name, error, wants_json=False)  # one document on stdout is enough
        return FAILED
    return status_of(document)
