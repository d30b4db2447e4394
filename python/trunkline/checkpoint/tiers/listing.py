"""What is committed in a directory of checkpoints, by the names of its files alone."""

import json
import os
from pathlib import Path

from trunkline._errors import system_errors
from trunkline._formats.checkpoint_names import DESCRIPTOR, commit_of, step_of
from trunkline._paths import names_in
from trunkline.checkpoint.tiers.plan import Commit, is_due


def committed_in(directory: str, every: int = 1) -> list[Commit]:
    """Return the newest commit of each step that is a multiple of `every`; none if it does not exist."""
    found = []
    for name in _names_in(directory):
        step = step_of(name)
        if step is None or not is_due(step, every):
            continue
        numbers = [commit_of(each) for each in _names_in(os.path.join(directory, name))]  # noqa: PTH118
        newest = max((number for number in numbers if number is not None), default=None)
        if newest is not None:
            found.append(Commit(step, newest))
    return found


def last_number_in(directory: str) -> int:
    """Return the highest number of a commit there, or in a run that was set aside there; 0: there is none."""
    asides = [name for name in _names_in(directory) if name.startswith("aside-")]
    return max(
        (
            each.number
            for folder in (directory, *(os.path.join(directory, name) for name in asides))  # noqa: PTH118
            for each in committed_in(folder)
        ),
        default=0,
    )


def id_of(directory: str) -> str:
    """Return the id of the descriptor of a directory; empty if it has none that can be read."""
    try:
        with system_errors(f"read {directory}/{DESCRIPTOR}", directory):
            about = json.loads((Path(directory) / DESCRIPTOR).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""
    found = about.get("id") if isinstance(about, dict) else None
    return found if isinstance(found, str) else ""


def _names_in(directory: str) -> list[str]:
    try:
        return names_in(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
