"""How often the experts of a model have been used: a file beside its pack. docs/formats/pack.md.

These are statistics: they decide which experts stay in memory at first, and never what is computed. So a file
that is missing or damaged, or cannot be written, is logged and nothing else.
"""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from trunkline import _core
from trunkline._errors import Format
from trunkline._logging import Log
from trunkline._replacing import replacing
from trunkline._streaming import manifest as pack_manifest

NAME = "pack.use.json"
_FORMAT = "trunkline expert use"
_VERSION = 1
_BEGINNING = f'{{"format": "{_FORMAT}", '.encode()
_MAX_BYTES = 100_000_000

_log = Log("stream")


def read(directory: Path, counts: Mapping[str, int]) -> dict[str, list[float]]:
    """Return for each expert of each module how much it was used, from 0 to 1; {} if that is not known.

    `counts`: the number of experts of each module.
    """
    path = directory / NAME
    try:
        with path.open("rb") as file:
            rates = parse(file.read(_MAX_BYTES + 1), path)
    except FileNotFoundError:
        return {}
    except OSError as error:  # Format among them
        _log.info("%s: starting without statistics of experts: %s", path, error)
        return {}
    if {name: len(of_module) for name, of_module in rates.items()} != dict(counts):
        _log.info("%s: starting without statistics of experts: they are of another model", path)
        return {}
    return rates


def parse(text: bytes, path: Path) -> dict[str, list[float]]:
    """Parse the text of the file at `path`. Raises Format."""
    try:
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
        document = json.loads(text)
        if document["format"] != _FORMAT or document["version"] != _VERSION:
            raise ValueError(f"it has format {document['format']!r}, version {document['version']!r}")
        modules = document["modules"]
        if document["crc32c"] != _checksum(modules):
            raise ValueError("its checksum does not match")
        rates = {str(name): [float(rate) for rate in of_module] for name, of_module in modules.items()}
        if not all(0 <= rate <= 1 for of_module in rates.values() for rate in of_module):
            raise ValueError("a number is not from 0 to 1")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        message = f"cannot read {path}: not valid statistics of experts ({error}); the next run replaces it"
        raise Format(None, message, str(path)) from error
    return rates


def write(directory: Path, weights: Path, rates: Mapping[str, Sequence[float]]) -> None:
    """Replace the file beside a pack, atomically; nothing happens where that is impossible.

    `weights`: a file of the pack, of which the new file gets the permissions.
    """
    path = directory / NAME
    modules = {name: [round(rate, 6) for rate in of_module] for name, of_module in rates.items()}
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "modules": modules,
        "crc32c": _checksum(modules),
    }
    try:
        if not (directory / pack_manifest.NAME).exists():
            return  # the pack has been removed
        if not _is_replaceable(path):
            _log.warn("%s: not a file of this pack; the statistics of experts are not saved", path)
            return
        with replacing(str(path)) as file:
            os.fchmod(file.fileno(), stat.S_IMODE(weights.stat().st_mode))
            file.write(json.dumps(document).encode())
    except OSError as error:
        _log.info("%s: the statistics of experts are not saved: %s", path, error)


def remove(directory: Path) -> None:
    """Remove the file, if it is one."""
    path = directory / NAME
    if _is_replaceable(path):
        path.unlink(missing_ok=True)


def _is_replaceable(path: Path) -> bool:
    """Whether there is no such file, or one that write() has made, which may be damaged."""
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        beginning = file.read(len(_BEGINNING))
    return beginning in (b"", _BEGINNING)


def _checksum(modules: object) -> int:
    return _core.crc32c(json.dumps(modules).encode())
