"""What a command prints when it fails: a line on stderr, and with --json the error object of src/cli."""

import errno
import json
import os
import sys
from collections.abc import Mapping

from trunkline._errors import Error, errno_reason, kind_of


def report_error(
    command: str, error: Exception, wants_json: bool, options: Mapping[str, str] | None = None
) -> None:
    """Report that `trunkline COMMAND` failed, as the commands of the bundled program do.

    `options`: the option for each argument of the functions that the command calls; messages begin with it.
    """
    if wants_json:
        print_error_document(command, error, options)
    print(f"trunkline {command}: {_message_of(error, options or {})}", file=sys.stderr)


def _message_of(error: Exception, options: Mapping[str, str]) -> str:
    """Return the message, in the words of the command line."""
    message = _text_of(error)
    argument, colon, rest = message.partition(": ")
    return f"{options[argument]}: {rest}" if colon and argument in options else message


def _text_of(error: Exception) -> str:
    """Return the message; of an OSError that Python or another library raised, without "[Errno 2]"."""
    if not isinstance(error, OSError) or isinstance(error, Error) or error.errno is None:
        return str(error)
    is_own_text = error.strerror and error.strerror != os.strerror(error.errno)
    why = error.strerror if is_own_text else errno_reason(error.errno)
    return f"{error.filename}: {why}" if error.filename is not None else str(why)


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
