"""What a command prints when it fails: a line on stderr, and with --json the error object of src/cli."""

import errno
import json
import sys

from trunkline._errors import kind_of


def report_error(command: str, error: Exception, wants_json: bool) -> None:
    """Report that `trunkline COMMAND` failed, as the commands of the bundled program do."""
    if wants_json:
        print_error_document(command, error)
    print(f"trunkline {command}: {error}", file=sys.stderr)


def print_error_document(command: str, error: Exception) -> None:
    """Print the error as JSON to stdout."""
    code = getattr(error, "errno", None) or (errno.EINVAL if isinstance(error, ValueError) else 0)
    described = {
        "kind": kind_of(error),
        "errno": code,
        "message": str(error),
        "path": str(getattr(error, "filename", None) or ""),
    }
    print(json.dumps({"command": command, "schema": 1, "error": described}, indent=2), flush=True)
