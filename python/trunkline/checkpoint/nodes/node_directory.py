"""What a node has on its disk: its id, its entries, and which of them are committed.

    DIR/
      trunkline-node.json    the record: id, continuations, and the ids of committed entries
      trunkline-node.lock    held by the process that saves or loads, until it ends
      saves/                 a directory of checkpoints, in which the number of an entry is that of the step

A save of this node's share is a checkpoint of `saves`, whose state describes the entry and the whole. Its
manifest is written when the entry is prepared.
"""

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from trunkline import _core
from trunkline._core import CheckpointStore, crc32c
from trunkline._errors import Corrupt, Error, Format, system_error
from trunkline.checkpoint.nodes.agreement import Entry, Inventory

RECORD = "trunkline-node.json"
_LOCK = "trunkline-node.lock"
_SAVES = "saves"
_FORMAT = "trunkline node"
_VERSION = 1
_SHARE = "share of a node"  # the key of the state in `saves`, which no state of a user has at this place

# By device and inode of the file. A lock of this kind (fcntl F_SETLK) ends with the process, is not
# inherited by a child, and would end with any descriptor of the file: so these are never closed.
_locks: dict[tuple[int, int], int] = {}


class NodeDirectory:
    """The directory of a node. Only after lock() may it be changed. Not thread-safe."""

    def __init__(self, directory: str, volumes: list[str] | None = None) -> None:
        """Open it, which creates nothing. Raises Error if it cannot be read, Corrupt if it is damaged."""
        self.directory = directory
        self.store = CheckpointStore(f"{directory}/{_SAVES}", volumes=volumes)
        self.id = ""  # until it has one
        self._continuations: dict[str, Entry] = {}
        self._committed: set[str] = set()
        self._saves: dict[str, Entry] = {}
        self.read()

    def read(self) -> None:
        """Read again what is on the disk."""
        record = _read_record(self.directory)
        self.id = record["id"]
        self._continuations = {each.id: each for each in map(_entry_of, record["continuations"])}
        self._saves = {}
        for number in self.store.steps():
            entry = _entry_of(share_of(self.store, number)["entry"])
            if entry.number != number:
                raise Format(None, f"{self.store.directory}: step {number} has the entry {entry.number}")
            self._saves[entry.id] = entry
        self._committed = set(record["committed"])

    def inventory(self) -> Inventory:
        """Return what this node has, for the agreement with others."""
        entries = {**self._saves, **self._continuations}
        ordered = tuple(sorted(entries.values(), key=lambda each: (each.number, each.id)))
        return Inventory(self.id, ordered, frozenset(self._committed & entries.keys()))

    def lock(self) -> None:
        """Make the directory if it is not there, and lock it until this process ends.

        Raises Error with EBUSY if another process has locked it.
        """
        path = f"{self.directory}/{_LOCK}"
        try:
            os.makedirs(self.directory, exist_ok=True)  # noqa: PTH103
            fcntl.lockf(_lock_file(path), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise system_error(error, f"lock {self.directory}", self.directory) from None
            raise Error(
                errno.EBUSY,
                f"cannot lock {self.directory}: another process saves there or has loaded from there; end it "
                "first",
                self.directory,
            ) from None

    def make_id(self) -> None:
        """Give the node an id, durably, unless it has one."""
        if not self.id:
            self.id = secrets.token_hex(8)
            self._write()

    def add_save(self, entry: Entry) -> None:
        """Note that the share of a save is committed in `store`: it is prepared."""
        self._saves[entry.id] = entry

    def add_continuation(self, entry: Entry) -> None:
        """Prepare a continuation, durably."""
        self._continuations[entry.id] = entry
        self._write()

    def commit(self, name: str) -> None:
        """Mark an entry as committed, durably."""
        self._committed.add(name)
        self._write()

    def remove(self, names: Iterable[str]) -> None:
        """Remove entries, durably: first those of saves, with their shares."""
        gone = set(names)
        for name in [each for each in self._saves if each in gone]:
            with suppress(FileNotFoundError):
                self.store.remove(self._saves[name].number)
            del self._saves[name]
        kept = {name: each for name, each in self._continuations.items() if name not in gone}
        committed = self._committed - gone
        if (kept, committed) != (self._continuations, self._committed):
            self._continuations, self._committed = kept, committed
            self._write()

    def _write(self) -> None:
        about = {
            "format": _FORMAT,
            "version": _VERSION,
            "id": self.id,
            "continuations": [json_of(each) for each in self._continuations.values()],
            "committed": sorted(self._committed),
        }
        text = json.dumps({**about, "crc32c": _checksum(about)}, indent=1) + "\n"
        try:
            file = _core.ReplacementFile(f"{self.directory}/{RECORD}")
            try:
                with open(file.fileno(), "wb", closefd=False) as written:
                    written.write(text.encode())
                file.finish()
            finally:
                file.discard()
        except OSError as error:
            if isinstance(error, Error):
                raise
            raise system_error(error, f"write {self.directory}/{RECORD}", self.directory) from None


def _lock_file(path: str) -> int:
    """Return the descriptor of a lock file, the only one that this process has of it."""
    with suppress(FileNotFoundError):
        status = os.stat(path)  # noqa: PTH116
        known = _locks.get((status.st_dev, status.st_ino))
        if known is not None:
            return known
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    status = os.fstat(descriptor)
    return _locks.setdefault((status.st_dev, status.st_ino), descriptor)


def json_of(entry: Entry) -> dict[str, Any]:
    """Return an entry as it is stored and sent."""
    return asdict(entry)


def _entry_of(about: Mapping[str, Any]) -> Entry:
    values = dict(about)
    values["history"] = tuple((branch, number) for branch, number in values["history"])
    values["nodes"] = tuple(values["nodes"])
    return Entry(**values)


def inventory_in_json(inventory: Inventory) -> dict[str, Any]:
    """Return an inventory as it is sent."""
    return {
        "node": inventory.node,
        "prepared": [json_of(each) for each in inventory.prepared],
        "committed": sorted(inventory.committed),
    }


def inventory_of(about: Mapping[str, Any]) -> Inventory:
    """Return an inventory that was sent."""
    prepared = tuple(_entry_of(each) for each in about["prepared"])
    return Inventory(about["node"], prepared, frozenset(about["committed"]))


def state_of_share(entry: Entry, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with which a share is saved in `saves`. whole: describes all shares."""
    return {_SHARE: {"entry": json_of(entry), "whole": whole}}


def share_of(store: CheckpointStore, number: int) -> dict[str, Any]:
    """Return the entry of a share, and the description of the whole."""
    state = json.loads(store.open_manifest(number).state)
    if not isinstance(state, dict) or list(state) != [_SHARE]:
        raise Format(
            None, f"{store.directory}: step {number} is not the share of a node", str(store.directory)
        )
    share: dict[str, Any] = state[_SHARE]
    return share


def _checksum(about: Mapping[str, Any]) -> str:
    return f"{crc32c(json.dumps(about).encode()):08x}"


def _read_record(directory: str) -> dict[str, Any]:
    path = f"{directory}/{RECORD}"
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return {"id": "", "continuations": [], "committed": []}
    except OSError as error:
        raise system_error(error, f"read {path}", path) from None
    try:
        about = json.loads(text)
        is_whole = isinstance(about, dict) and about.pop("crc32c", None) == _checksum(about)
    except ValueError:
        is_whole = False
    if not is_whole:
        raise Corrupt(
            None,
            f"{path} is damaged. It says which checkpoints this node has committed: restore it, or move "
            f"{directory} away; the node then counts as a new one",
            path,
        )
    if about["format"] != _FORMAT or about["version"] != _VERSION:
        raise Format(
            None, f"{path}: version {about.get('version')} is not supported; use a newer trunkline", path
        )
    record: dict[str, Any] = about
    return record
