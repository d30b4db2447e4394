"""Which runs have copied their steps to a tier: a small file in the tier, trunkline-origin.json.

Commits of two runs may have the same numbers, so they cannot show whose a step is. The file names each
directory that steps were copied from, the last one at the end: a run that has loaded from the tier, maybe on
another machine, goes on there. It is written while the tier is locked, before the first copy of a directory
is committed, and when a Checkpointer of the tier itself saves.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

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


def _read(directory: str, missing: list[str] | None = None) -> list[str] | None:
    """Return the ids; None if the file cannot be understood, `missing` if there is none."""
    try:
        with system_errors(f"read {directory}/{NAME}", directory):
            about = json.loads((Path(directory) / NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return missing
    except ValueError:
        return None
    if not isinstance(about, dict) or about.get("format") != _FORMAT or about.get("version") != _VERSION:
        return None
    found = about.get("ids")
    return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else None


def origin_of(directory: str) -> str:
    """Return the last of the ids; empty if it is not known."""
    return (origins_of(directory) or [""])[-1]


def write_origins(directory: str, ids: list[str]) -> None:
    """Put the ids on record, durably. The caller has locked the tier."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "ids": ids}, indent=1) + "\n"
    with replacing(f"{directory}/{NAME}") as file:
        file.write(text.encode())


def identity_of(directory: str) -> str:
    """Return what changes when a tier is made anew, or is taken over by another run; empty: it is new."""
    identity = id_of(directory)
    if not identity:
        return ""
    return hashlib.sha256(f"{identity} {origin_of(directory)}".encode()).hexdigest()[:_DIGITS]
