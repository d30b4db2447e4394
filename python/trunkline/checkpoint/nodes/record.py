"""The record of a node, trunkline-node.json: its id, continuations, and the ids of committed entries."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from trunkline._core import crc32c
from trunkline._errors import Corrupt, Format
from trunkline.checkpoint.nodes.agreement import Entry

_FORMAT = "trunkline node"
_VERSION = 1


@dataclass(frozen=True)
class Record:
    """What a node remembers. id: empty for a node that has nothing yet. continuations: by their ids.

    last: the save that it has committed last; None if there is none, or a version before this key wrote it.
    """

    id: str = ""
    continuations: dict[str, Entry] = field(default_factory=dict)
    committed: frozenset[str] = frozenset()
    last: Entry | None = None


def format_record(record: Record) -> bytes:
    """Return the record as it is stored."""
    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "id": record.id,
        "continuations": [json_of(each) for each in record.continuations.values()],
        "committed": sorted(record.committed),
    }
    if record.last is not None:
        about["last"] = json_of(record.last)
    return (json.dumps({**about, "crc32c": _checksum(about)}, indent=1) + "\n").encode()


def parse_record(text: bytes, path: str) -> Record:
    """Return a record that was stored at `path`. Raises Corrupt, or Format for one of another version."""
    try:
        about = json.loads(text)
        is_whole = isinstance(about, dict) and about.pop("crc32c", None) == _checksum(about)
    except (ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        raise Corrupt(
            None,
            f"{path} is damaged. It says which checkpoints this node has committed: restore it, or move "
            f"its directory away; the node then counts as a new one",
            path,
        )
    if about.get("format") != _FORMAT or about.get("version") != _VERSION:
        raise Format(
            None, f"{path}: version {about.get('version')!r} is not supported; use a newer trunkline", path
        )
    with wrong_values_named(path):
        continuations = {each.id: each for each in map(entry_of, about["continuations"])}
        last = entry_of(about["last"]) if "last" in about else None
        return Record(_text(about["id"]), continuations, frozenset(map(_text, about["committed"])), last)


def json_of(entry: Entry) -> dict[str, Any]:
    """Return an entry as it is stored and sent."""
    values = asdict(entry)
    for name in ("kept_by", "metrics"):
        if not values[name]:
            del values[name]  # earlier versions reject entries that have it
    return values


def entry_of(about: Mapping[str, Any]) -> Entry:
    """Return an entry that was stored or sent. Raises KeyError, TypeError or ValueError if it is none."""
    values = dict(about)
    values["history"] = tuple((_text(branch), _number(last)) for branch, last in values["history"])
    values["nodes"] = tuple(map(_text, values["nodes"]))
    values["number"], values["step"] = _number(values["number"]), _number(values["step"])
    for name in ("id", "branch", "digest"):
        _text(values[name])
    if values["base"] is not None:
        _text(values["base"])
    if "kept_by" in values:
        values["kept_by"] = tuple(tuple(map(_number, nodes)) for nodes in values["kept_by"])
        _check_kept_by(values["kept_by"], len(values["nodes"]))
    if "metrics" in values:
        values["metrics"] = tuple((_text(name), _measured(value)) for name, value in values["metrics"])
    return Entry(**values)


def _check_kept_by(kept_by: tuple[tuple[int, ...], ...], nodes: int) -> None:
    if len(kept_by) != nodes:
        raise ValueError(f"{len(kept_by)} shares of {nodes} nodes")
    for share, keepers in enumerate(kept_by):
        if not keepers or len(set(keepers)) < len(keepers) or max(keepers) >= nodes:
            raise ValueError(f"the share of node {share} is kept by {keepers}, of {nodes} nodes")


@contextmanager
def wrong_values_named(what: str) -> Iterator[None]:
    """Raise Format for values that this version does not write."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise Format(None, f"{what} is not as trunkline writes it: {error!r}", what) from None


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0 on")
    return value


def _measured(value: Any) -> float | str:
    is_number = type(value) is float and math.isfinite(value)
    if not is_number and value not in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(f"{value!r} is not a number as manifests have it")
    return value  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _checksum(about: Mapping[str, Any]) -> str:
    return f"{crc32c(json.dumps(about).encode()):08x}"
