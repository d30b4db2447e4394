"""The ranks that read files together: what they tell each other, and send each other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from trunkline._boot_id import boot_id
from trunkline._errors import RankError
from trunkline._formats.file_version import Version
from trunkline.checkpoint.ranks.gloo_group import new_gloo_group
from trunkline.checkpoint.ranks.presence import await_ranks
from trunkline.checkpoint.ranks.store import rank_error


@dataclass
class _OwnGroup:
    """A process group of the ranks of another one, for one read at a time."""

    group: Any
    timeout: timedelta | None
    is_idle: bool = False  # on this rank


# By the group that programs pass. They are kept until destroy_process_group(): torch cannot make another
# group of the same ranks after one was destroyed.
_own_groups: "WeakKeyDictionary[Any, list[_OwnGroup]]" = WeakKeyDictionary()


def _take_own_group(given: Any, size: int, timeout: timedelta | None) -> _OwnGroup:
    """Return a group that is idle on all ranks, or a new one: not the given one, which the program uses."""
    own_groups: list[_OwnGroup] = _own_groups.setdefault(given, [])
    idle: list[Any] = [None] * size
    dist.all_gather_object(
        idle,
        [index for index, own in enumerate(own_groups) if own.is_idle and own.timeout == timeout],
        group=given,
    )
    found = min(set.intersection(*map(set, idle)), default=None)
    if found is None:
        own_groups.append(_OwnGroup(new_gloo_group(given, timeout), timeout))
        return own_groups[-1]
    own: _OwnGroup = own_groups[found]
    own.is_idle = False
    return own


class ReadingRanks:
    """The ranks that read together. Making one is a collective operation of the given group."""

    def __init__(self, given: Any, timeout: timedelta | None = None) -> None:
        """`given`: the process group; timeout: of its operations here, None: its own.

        Raises TypeError and ValueError for what is none of this process.
        """
        if given is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(given, dist.ProcessGroup):
            raise TypeError(
                "group: must be a torch.distributed.ProcessGroup of which this process is a rank, such as "
                f"torch.distributed.group.WORLD, not {given!r}"
            )
        self.rank, self.size = dist.get_rank(given), dist.get_world_size(given)
        if self.rank < 0:
            raise ValueError("group: this process is not one of its ranks")
        self._is_in_step = True  # no operation of the group has failed
        self._own: _OwnGroup | None = None
        if self.size > 1:
            await_ranks(given, "the call that reads files together", timeout)
            with self._explained():
                self._own = _take_own_group(given, self.size, timeout)

    @property
    def _group(self) -> Any:
        assert self._own is not None  # there are other ranks
        return self._own.group

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Raises RankError if one does not come."""
        values: list[Any] = [None] * self.size
        if self.size == 1:
            return [value]
        with self._explained():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def agree(
        self, what: object, versions: "Sequence[Version | None]", error: Exception | None, name: str
    ) -> None:
        """Check that all ranks read the same files.

        `what`: equal on all ranks that may read together; `versions`: of files without checksums; `error`:
        why this rank cannot read them, which is raised; `name`: of the files, for messages. Raises RankError
        for an error of another rank, or other files there.
        """
        mine = (boot_id(), list(versions))
        for rank, (theirs, files, why) in enumerate(
            self.gather((what, mine, None if error is None else str(error)))
        ):
            if error is not None:
                raise error
            if why is not None:
                raise rank_error(rank, f"rank {rank} failed: {why}")
            if theirs != what:
                raise rank_error(
                    rank,
                    f"rank {rank} reads other files or tensors than rank {self.rank}, or with another "
                    "memory_bytes or verify; all ranks of the group must pass the same",
                )
            _check_same_files(self.rank, mine, rank, files, name)

    def fail(self, error: Exception, name: str) -> NoReturn:
        """Let the other ranks know that this one cannot read, and raise the error."""
        try:
            self.agree(None, [], error, name)
        finally:
            self.close()
        raise error

    def transfer(
        self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]
    ) -> None:
        """Send and receive memory, each to or from a rank."""
        with self._explained():
            works = [
                dist.isend(memory, dist.get_global_rank(self._group, rank), group=self._group)
                for memory, rank in sends
            ]
            works += [
                dist.irecv(memory, dist.get_global_rank(self._group, rank), group=self._group)
                for memory, rank in receives
            ]
            for work in works:
                assert work is not None  # this process is a rank of the group
                work.wait()

    def close(self) -> None:
        """Let later reads use the group, unless the ranks are no longer at the same operation of it."""
        if self._own is not None:
            self._own.is_idle = self._is_in_step

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self._is_in_step = False
            raise RankError(
                None,
                f"rank {self.rank} reads files together with the other ranks, and one has ended, or does not "
                f"read them; all ranks of the group must make the same call: {error}",
            ) from error


_Files: TypeAlias = tuple[str, list[Version | None]]


def _check_same_files(own_rank: int, own: _Files, rank: int, theirs: _Files, name: str) -> None:
    """Raise RankError unless the files of two ranks are the same, or copies that have the same times.

    The headers are equal, but those of two versions of a model usually are.
    """
    is_one_machine = own[0] == theirs[0]
    for ours, other in zip(own[1], theirs[1], strict=True):
        if ours is None or other is None:
            continue  # they cannot be read by name any more
        is_same = (ours.nbytes, ours.modified) == (other.nbytes, other.modified)
        if is_same and is_one_machine and ours.device == other.device:
            is_same = ours.inode == other.inode
        if not is_same:
            raise rank_error(
                rank,
                f"rank {rank} may read other data than rank {own_rank}: {name} is a file with another "
                "modification time there, and it has no checksums. All ranks must read the same files, or "
                "copies with the same times (cp -p, rsync -t); with files of their own, ranks load alone, "
                "without group=",
            )
