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
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from trunkline._core import CheckpointStore
from trunkline._errors import Corrupt, Error, Format, Unsupported, exception_of, system_error
from trunkline._formats.checkpoint_names import DESCRIPTOR, step_name, step_of
from trunkline._formats.node_names import LOCK, RECORD, SAVES
from trunkline._paths import names_in
from trunkline._replacing import replacing
from trunkline.checkpoint.nodes.agreement import Entry, Inventory
from trunkline.checkpoint.nodes.record import (
    Record,
    entry_of,
    format_record,
    json_of,
    parse_record,
    wrong_values_named,
)

_USE_ANOTHER = "; use another step, or restore it from a copy"  # as errors of manifests end
_IN_PLACE_OF = "in_place_of"
_SHARE = "share of a node"  # the key of the state in `saves`, which no state of a user has at this place

# Who in this process has used a directory, by device and inode of its lock file.
_users: "dict[tuple[int, int], WeakSet[NodeDirectory]]" = {}

# Descriptors that hold locks (fcntl F_OFD_SETLK), by device and inode of the file. They are closed when the
# process ends, and in a child when it is forked, so that it does not hold the lock of its parent.
_locks: dict[tuple[int, int], int] = {}
_locked: set[int] = set()  # those of the descriptors that hold it now
_WHOLE_FILE = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_NOTHING = struct.pack("@hhqqi0q", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
# Of filesystems without locks: users must make sure that one job at a time uses the directory.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def check_not_of_node(directory: str, doing: str) -> None:
    """Raise Unsupported if a directory of checkpoints holds the shares of a node. doing: "save into"."""
    node, name = os.path.split(os.path.abspath(directory))  # noqa: PTH100
    if name == SAVES and os.path.exists(f"{node}/{RECORD}"):  # noqa: PTH110
        raise Unsupported(
            None,
            f"cannot {doing} {directory}: it holds the shares of a node, which only a Checkpointer with "
            f"local=True may change; use Checkpointer({node!r}, local=True)",
            directory,
        )


class NodeDirectory:
    """The directory of a node. Only after lock() may it be changed. Not thread-safe."""

    def __init__(self, directory: str, volumes: list[str] | None = None) -> None:
        """Open it, which creates nothing. Raises Error, and Corrupt if its record is damaged or missing."""
        self.directory = directory
        self.store = CheckpointStore(f"{directory}/{SAVES}", volumes=volumes)
        self._record = Record()
        self.is_used = False  # by a save or load of this process
        self._new_lock: int | None = None  # the descriptor, if the last lock() has locked it
        self.is_replaced = False  # another object of this process has gone on in the directory
        self.is_changed = False  # another object of this process has removed something since it was read
        self._others: WeakSet[NodeDirectory] = WeakSet()  # of this process, which have used the directory
        self._saves: dict[str, Entry] = {}
        self._in_place_of: dict[str, str] = {}  # of the ids of saves: the lost node whose share this is
        self.damaged: dict[int, Error] = {}  # shares that cannot be read, by number
        self.read()

    @property
    def id(self) -> str:
        """What names the node; empty until it has an id."""
        return self._record.id

    def read(self) -> None:
        """Read again what is on the disk."""
        self.is_changed = False
        record = _read_record(self.directory)
        if not record.id:
            self._check_new()
        self._record = record
        self._saves, self._in_place_of, self.damaged = {}, {}, {}
        for number in self.store.steps():
            self._read_share(number)

    def _read_share(self, number: int) -> None:
        # The process that has locked the directory may remove it meanwhile.
        with suppress(FileNotFoundError):
            try:
                self.add_save(*self._entry_of(number))
            except (Corrupt, Format) as error:
                self.damaged[number] = error

    def _entry_of(self, number: int) -> tuple[Entry, str | None]:
        """Return the entry of a share, and the lost node whose share it is, if it is one's."""
        share = share_of(self.store, number)
        with wrong_values_named(f"step {number} of {self.store.directory}"):
            entry, lost = entry_of(share["entry"]), share.get(_IN_PLACE_OF)
            if lost is not None and lost not in entry.nodes:
                raise ValueError(f"it is in place of {lost!r}")
        if entry.number != number:
            raise Format(None, f"{self.store.directory}: step {number} has the entry {entry.number}")
        return entry, lost

    def lost_save(self) -> Entry | None:
        """Return the save that this node has committed last, if its share is gone; None if it is there."""
        last = self._record.last
        if last is None or last.id in self._saves or last.number in self.damaged:
            return None
        return last

    def lost_error(self, lost: Entry) -> Error:
        """Make the error for what lost_save() has returned."""
        path = f"{self.store.directory}/{step_name(lost.number)}"
        return Error(errno.ENOENT, f"{path} is gone, which was committed last here", path)

    def _check_new(self) -> None:
        """Raise an error if a directory without a record is not a new one."""
        if self.store.steps():
            path = f"{self.directory}/{RECORD}"
            raise Corrupt(
                None,
                f"{path} is missing, and {self.store.directory} has checkpoints. It says which of them this "
                f"node has committed: restore it, or move {self.directory} away; the node then is a new one",
                path,
            )
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in names_in(self.directory):
                if name == DESCRIPTOR or step_of(name) is not None:
                    raise exception_of(
                        "system",
                        errno.EEXIST,
                        f"{self.directory} has checkpoints that were saved without local=True; omit it, or "
                        "name another directory",
                        self.directory,
                    )

    def inventory(self) -> Inventory:
        """Return what this node has, for the agreement with others."""
        entries = {**self._saves, **self._record.continuations}
        ordered = tuple(sorted(entries.values(), key=lambda each: (each.number, each.id)))
        damaged = tuple((number, self._why_needed(number)) for number in sorted(self.damaged))
        in_place_of = tuple(sorted(self._in_place_of.items()))
        marked = self._record.committed
        return Inventory(self.id, ordered, marked & entries.keys(), damaged, marked, in_place_of)

    def _why_needed(self, number: int) -> str:
        """Return what is wrong with a damaged share, and what to do if it is needed."""
        what = str(self.damaged[number]).removesuffix(_USE_ANOTHER)
        return (
            f"{what}. It may be the latest checkpoint, so no other is used in its place: restore it, or "
            f"remove {self.store.directory}/{step_name(number)} to go on from an earlier step"
        )

    def lock(self, *, to_load: bool = False) -> None:
        """Make the directory if it is not there, and lock it until this process ends.

        Raises Error with EBUSY if another process has locked it, or another object of this process uses
        it, or has gone on there: to_load continues from that.
        """
        self._new_lock = None
        if self.is_replaced and not to_load:
            raise Error(
                errno.EBUSY,
                f"cannot lock {self.directory}: another Checkpointer of this process has gone on there; use "
                "that one, or call load() first",
                self.directory,
            )
        path = f"{self.directory}/{LOCK}"
        try:
            _make_durably(self.directory)
            descriptor = _lock_file(path)
        except OSError as error:
            raise system_error(error, f"lock {self.directory}", self.directory) from None
        self._check_unused(descriptor)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            if descriptor not in _locked:
                _locked.add(descriptor)
                self._new_lock = descriptor
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise system_error(error, f"lock {self.directory}", self.directory) from None
            raise Error(
                errno.EBUSY,
                f"cannot lock {self.directory}: another process saves there or has loaded from there; end it "
                "first",
                self.directory,
            ) from None

    def unlock_again(self) -> None:
        """Undo what the last lock() has done, if nothing was written since but the id.

        Otherwise two jobs that begin at once, and have locked one node each, would both be refused until one
        of them ends. The lock stays if this process had it before.
        """
        descriptor, self._new_lock = self._new_lock, None
        if descriptor is not None and descriptor in _locked:
            _locked.discard(descriptor)
            with suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _NOTHING)

    def _check_unused(self, descriptor: int) -> None:
        """Raise Error with EBUSY while another object of this process saves or loads."""
        status = os.fstat(descriptor)
        users = _users.setdefault((status.st_dev, status.st_ino), WeakSet())
        users.add(self)
        self._others = users
        if any(each.is_used for each in users if each is not self):
            raise Error(
                errno.EBUSY,
                f"cannot lock {self.directory}: another Checkpointer of this process is saving there or "
                "loading from there; wait for it first",
                self.directory,
            )

    def take_over(self) -> None:
        """Note that other objects of this process have to load before they save again."""
        for each in self._others:
            each.is_replaced = each is not self

    def note_change(self) -> None:
        """Note that other objects of this process have to read the directory again."""
        for each in self._others:
            each.is_changed = each.is_changed or each is not self

    def make_id(self) -> None:
        """Give the node an id, durably, unless it has one."""
        if not self.id:
            self._write(replace(self._record, id=secrets.token_hex(8)))

    def add_save(self, entry: Entry, lost: str | None = None) -> None:
        """Note that the share of a save is committed in `store`: it is prepared. lost: whose share it is."""
        self._saves[entry.id] = entry
        self.damaged.pop(entry.number, None)
        if lost is not None:
            self._in_place_of[entry.id] = lost

    def add_continuation(self, entry: Entry) -> None:
        """Prepare a continuation, durably."""
        known = self._record.continuations
        self._write(replace(self._record, continuations={**known, entry.id: entry}))

    def commit(self, names: Iterable[str]) -> None:
        """Mark entries as committed, durably, those of them that this node has."""
        marked = {each for each in names if each in self._saves or each in self._record.continuations}
        saves = [self._saves[each] for each in marked if each in self._saves]
        last = max([*saves, *filter(None, [self._record.last])], key=lambda each: each.number, default=None)
        self._write(replace(self._record, committed=self._record.committed | marked, last=last))

    def remove(self, names: Iterable[str]) -> None:
        """Remove entries, durably: first those of saves, with their shares."""
        gone = set(names)
        for name in [each for each in self._saves if each in gone]:
            with suppress(FileNotFoundError):
                self.store.remove(self._saves[name].number)
            del self._saves[name]
            self._in_place_of.pop(name, None)
        kept = {name: each for name, each in self._record.continuations.items() if name not in gone}
        last = self._record.last
        left = replace(
            self._record,
            continuations=kept,
            committed=self._record.committed - gone,
            last=None if last is not None and last.id in gone else last,
        )
        if left != self._record:
            self._write(left)

    def _write(self, record: Record) -> None:
        """Replace the record. What it said before is known until this has succeeded."""
        try:
            with replacing(f"{self.directory}/{RECORD}") as file:
                file.write(format_record(record))
        except OSError as error:
            if isinstance(error, Error):
                raise
            raise system_error(error, f"write {self.directory}/{RECORD}", self.directory) from None
        self._record = record


def _make_durably(directory: str) -> None:
    """Make a directory with those above it, as far as they are missing."""
    above, name = os.path.split(directory)
    if not name or os.path.isdir(directory):  # noqa: PTH112
        return
    _make_durably(above)
    with suppress(FileExistsError):
        os.mkdir(directory)  # noqa: PTH102
    descriptor = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _release_locks_of_parent() -> None:
    for descriptor in _locks.values():
        with suppress(OSError):
            os.close(descriptor)
    _locks.clear()
    _locked.clear()
    _users.clear()


os.register_at_fork(after_in_child=_release_locks_of_parent)


def inventory_in_json(inventory: Inventory) -> dict[str, Any]:
    """Return an inventory as it is sent."""
    return {
        "node": inventory.node,
        "prepared": [json_of(each) for each in inventory.prepared],
        "committed": sorted(inventory.committed),
        "damaged": inventory.damaged,
        "marked": sorted(inventory.marked),
        "in_place_of": inventory.in_place_of,
    }


def inventory_of(about: Mapping[str, Any]) -> Inventory:
    """Return an inventory that was sent."""
    prepared = tuple(entry_of(each) for each in about["prepared"])
    damaged = tuple((number, why) for number, why in about["damaged"])
    in_place_of = tuple((name, node) for name, node in about["in_place_of"])
    committed, marked = frozenset(about["committed"]), frozenset(about["marked"])
    return Inventory(about["node"], prepared, committed, damaged, marked, in_place_of)


def state_of_share(entry: Entry, whole: Mapping[str, Any], lost: str | None = None) -> dict[str, Any]:
    """Return the state with which a share is saved in `saves`.

    whole: describes all shares; lost: the node whose share it is, if another one has it in its place.
    """
    about = {"entry": json_of(entry), "whole": whole}
    return {_SHARE: about if lost is None else {**about, _IN_PLACE_OF: lost}}


def share_of(store: CheckpointStore, number: int) -> dict[str, Any]:
    """Return the entry of a share, and the description of the whole."""
    state = json.loads(store.open_manifest(number).state)
    if not isinstance(state, dict) or list(state) != [_SHARE]:
        raise Format(
            None, f"{store.directory}: step {number} is not the share of a node", str(store.directory)
        )
    share: dict[str, Any] = state[_SHARE]
    return share


def _read_record(directory: str) -> Record:
    path = f"{directory}/{RECORD}"
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return parse_record(file.read(), path)
    except (FileNotFoundError, NotADirectoryError):
        return Record()
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise system_error(error, f"read {path}", path) from None
