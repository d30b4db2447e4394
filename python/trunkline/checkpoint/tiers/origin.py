"""Which runs have copied their steps to a tier: a small file in the tier, trunkline-origin.json.

Commits of two runs may have the same numbers, so they cannot show whose a step is. The file names each
directory that steps were copied from, the last one at the end: a run that has loaded from the tier, maybe on
another machine, goes on there. It is written while the tier is locked, before the first copy of a directory
is committed, and when a Checkpointer of the tier itself saves.

Steps of nodes (local=True) have no directory as their origin, but the run that saved them: the id is "nodes:"
and its branch, and "saves" has the entry of each step (nodes/agreement.py).
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from trunkline import _core
from trunkline._errors import system_errors
from trunkline._replacing import replacing
from trunkline.checkpoint.tiers.listing import id_of

NAME = "trunkline-origin.json"
_FORMAT = "trunkline origin"
_VERSION = 1
_DIGITS = 16


def origin_id(directory: str) -> str:
    """Return what names a directory as an origin, and not a copy of it; empty: it has no descriptor."""
    identity = id_of(directory)
    if not identity:
        return ""
    with suppress(OSError):
        return f"{identity}:{_core.directory_identity(directory)}"
    return ""


def origins_of(directory: str) -> list[str]:
    """Return origin_id() of the directories whose steps were copied to this tier; empty if not known."""
    return _read(directory) or []


def is_damaged(directory: str) -> bool:
    """Whether the tier has the file, and it does not say whose the steps are."""
    return not _read(directory, missing=["no file"])


def origins_and_saves_of(directory: str) -> tuple[list[str], list[Any]]:
    """Return the ids, and what write_origins() has recorded of the saves, of one moment; empty: not known."""
    with suppress(FileNotFoundError, NotADirectoryError):
        about = _read_file(directory)
        saves = (about or {}).get("saves")
        return _ids_in(about) or [], saves if isinstance(saves, list) else []
    return [], []


def _read(directory: str, missing: list[str] | None = None) -> list[str] | None:
    """Return the ids; None if the file cannot be understood, `missing` if there is none."""
    try:
        return _ids_in(_read_file(directory))
    except (FileNotFoundError, NotADirectoryError):
        return missing


def _ids_in(about: dict[str, Any] | None) -> list[str] | None:
    found = None if about is None else about.get("ids")
    return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else None


def _read_file(directory: str) -> dict[str, Any] | None:
    """Return what the file says; None if that cannot be understood."""
    try:
        with system_errors(f"read {directory}/{NAME}", directory):
            about = json.loads((Path(directory) / NAME).read_bytes())
    except ValueError:
        return None
    if not isinstance(about, dict) or about.get("format") != _FORMAT or about.get("version") != _VERSION:
        return None
    return about


def origin_of(directory: str) -> str:
    """Return the last of the ids; empty if it is not known."""
    return (origins_of(directory) or [""])[-1]


def write_origins(directory: str, ids: list[str], saves: list[Any] | None = None) -> None:
    """Put the ids on record, durably. The caller has locked the tier.

    saves: of the nodes whose steps are in the tier; None: its steps are not those of nodes.
    """
    about: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "ids": ids}
    if saves is not None:
        about["saves"] = saves
    with replacing(f"{directory}/{NAME}") as file:
        file.write((json.dumps(about, indent=1) + "\n").encode())


def identity_of(directory: str) -> str:
    """Return what changes when a tier is made anew, or is taken over by another run; empty: it is new."""
    identity = id_of(directory)
    if not identity:
        return ""
    return hashlib.sha256(f"{identity} {origin_of(directory)}".encode()).hexdigest()[:_DIGITS]
