"""Finds out which ranks share a directory: these are one node.

Names of hosts do not say that: containers may have the same, and ranks of one machine may have disks of their
own, as in private mount namespaces.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trunkline._boot_id import boot_id


@dataclass(frozen=True)
class Nodes:
    """Which ranks are on which node. Nodes are in the order of their first ranks."""

    node_of: tuple[int, ...]  # of each rank: the index of its node

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return max(self.node_of) + 1

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node, ascending."""
        return [rank for rank, each in enumerate(self.node_of) if each == node]

    def first_ranks(self) -> list[int]:
        """Return the first rank of each node."""
        return [self.node_of.index(node) for node in range(self.count)]


class SharedDirectory(Exception):
    """Ranks on different machines see the same directory."""

    def __init__(self, rank: int, other: int) -> None:
        super().__init__(f"ranks {rank} and {other}, which are on different machines, see the same directory")
        self.rank, self.other = rank, other


@dataclass(frozen=True)
class Place:
    """What a rank knows of its directory.

    kernel: the running kernel, which all containers of a machine have in common. rest: the part of the path
    that does not exist yet, below the folder with `device` and `inode`. file: the name of a file that the
    rank has created in that folder; empty if it cannot.
    """

    kernel: str
    device: int
    inode: int
    rest: str
    file: str

    def is_alike(self, other: "Place") -> bool:
        """Whether the numbers say that both are the same: only if none of the two has created a file."""
        return (self.kernel, self.device, self.inode, self.rest) == (
            other.kernel,
            other.device,
            other.inode,
            other.rest,
        )


def find_nodes(directory: str, gather: Callable[[Any], list[Any]]) -> Nodes:
    """Find out which ranks share the directory, which need not exist. Creates nothing that stays.

    Collective: all ranks call it, each with its absolute path. gather: returns the values of all ranks.

    Each rank creates a file; those that see it share the directory. Where a rank cannot create files, the
    numbers of device and inode have to do, in the same running kernel.

    Raises SharedDirectory on all ranks if some that are not in the same kernel see one directory: it is not
    on a local disk.
    """
    folder, rest = _existing_part(directory)
    file = _create_file(folder)
    try:
        places: list[Place] = gather(_place_of(folder, rest, file))
        seen = [_is_seen(folder, places[rank], _place_of(folder, rest, file)) for rank in range(len(places))]
        everyone: list[list[bool]] = gather(seen)
    finally:
        if file:
            with suppress(OSError):
                os.unlink(f"{folder}/{file}")  # noqa: PTH108
    return group_ranks(places, everyone)


def group_ranks(places: Sequence[Place], seen: Sequence[Sequence[bool]]) -> Nodes:
    """Return the nodes. seen: of each rank, whether it has found the directory of each rank to be its own."""
    node_of: list[int] = []
    firsts: list[int] = []
    for rank, place in enumerate(places):
        for node, first in enumerate(firsts):
            if seen[rank][first] and seen[first][rank]:
                if place.kernel != places[first].kernel:
                    raise SharedDirectory(first, rank)
                node_of.append(node)
                break
        else:
            node_of.append(len(firsts))
            firsts.append(rank)
    return Nodes(tuple(node_of))


def _existing_part(directory: str) -> tuple[str, str]:
    """Divide a path into the longest part that exists, and the rest."""
    folder, rest = directory, ""
    while not os.path.isdir(folder):  # noqa: PTH112
        above, name = os.path.split(folder)
        if above == folder:
            break
        folder, rest = above, f"{name}/{rest}"
    return folder, rest


def _create_file(folder: str) -> str:
    """Create a file that no other rank has; return its name, or an empty one if that is not possible."""
    name = f".trunkline-{secrets.token_hex(8)}.tmp"
    try:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError:
        return ""
    return name


def _place_of(folder: str, rest: str, file: str) -> Place:
    device = inode = 0
    with suppress(OSError):
        status = os.stat(folder)  # noqa: PTH116
        device, inode = status.st_dev, status.st_ino
    return Place(boot_id(), device, inode, rest, file)


def _is_seen(folder: str, place: Place, own: Place) -> bool:
    """Whether a rank's directory is that of this rank."""
    if not place.file:
        return place.is_alike(own)
    return place.rest == own.rest and os.path.lexists(f"{folder}/{place.file}")
