"""What a command prints when it fails: a line on stderr, and with --json the error object of src/cli."""

import errno
import json
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from trunkline._errors import Error, errno_advice, errno_reason, kind_of


def report_error(
    command: str, error: Exception, wants_json: bool, options: Mapping[str, str] | None = None
) -> None:
    """Report that `trunkline COMMAND` failed, as the commands of the bundled program do.

    `options`: the option for each argument of the functions that the command calls; see in_options().
    """
    if wants_json:
        print_error_document(command, error, options)
    print(f"trunkline {command}: {_message_of(error, options or {})}", file=sys.stderr)


def _message_of(error: Exception, options: Mapping[str, str]) -> str:
    """Return the message, in the words of the command line."""
    return in_options(_text_of(error), options)


_OUTSIDE_PATH = r"(?<![\w./'-])"  # not within the name of a file
_VALUE = r"""(?:True\b|(?P<value>"[^"]*"|'[^']*'|[\w.]+)|\[\.\.\.\])?"""
_DOWNLOAD = re.compile(
    r'huggingface_hub\.snapshot_download\("([^"]+)"(?:, allow_patterns="([^"]+)")?(?:, revision="([^"]+)")?\)'
)


def in_options(message: str, options: Mapping[str, str]) -> str:
    """Return an error message of a function in the words of its command: options instead of arguments.

    An argument is recognized at the beginning ("key: ..."), with its value (force=True, key="model", or
    "pass key="), and anywhere if its name is of several words (memory_budget): those are not words of
    sentences.
    """
    argument, colon, rest = message.partition(": ")
    if colon and argument in options:
        message = f"{options[argument]}: {rest}"
    for name, option in options.items():
        if not name.isidentifier():
            continue
        message = re.sub(rf"{_OUTSIDE_PATH}{name}={_VALUE}", partial(_with_value, option), message)
        if "_" in name:
            message = re.sub(rf"{_OUTSIDE_PATH}{name}(?![\w/=]|\.\w)", option, message)
    return _DOWNLOAD.sub(_download_command, message)


def _with_value(option: str, found: re.Match[str]) -> str:
    value = found["value"]
    return option if value is None else f"{option} {value.strip(chr(34) + chr(39))}"


def _download_command(found: re.Match[str]) -> str:
    name, file, revision = found.groups()
    return (
        f"hf download {name}" + (f" {file}" if file else "") + (f" --revision {revision}" if revision else "")
    )


def _text_of(error: Exception) -> str:
    """Return the message; of an OSError that Python or another library raised, without "[Errno 2]"."""
    if not isinstance(error, OSError) or isinstance(error, Error) or error.errno is None:
        return str(error)
    is_own_text = error.strerror and error.strerror != os.strerror(error.errno)
    why = error.strerror if is_own_text else errno_reason(error.errno) + errno_advice(error.errno)
    return f"{error.filename}: {why}" if error.filename is not None else str(why)


def described(error: Error) -> dict[str, Any]:
    """Return an error of the library as documents have it that go on after it."""
    return {
        "kind": kind_of(error),
        "errno": error.errno or 0,
        "message": str(error),
        "path": str(error.filename or ""),
    }


def print_error_document(command: str, error: Exception, options: Mapping[str, str] | None = None) -> None:
    """Print the error as JSON to stdout."""
    code = getattr(error, "errno", None) or (errno.EINVAL if isinstance(error, ValueError) else 0)
    described = {
        "kind": kind_of(error),
        "errno": code,
        "message": _message_of(error, options or {}),
        "path": str(getattr(error, "filename", None) or ""),
    }
    print(json.dumps({"command": command, "schema": 1, "error": described}, indent=2), flush=True)
