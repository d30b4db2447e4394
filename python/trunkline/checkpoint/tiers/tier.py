"""A directory that steps are copied to: trunkline.Tier."""

import errno
import os
from collections.abc import Iterable
from typing import Any, SupportsIndex

from trunkline._arguments import count_argument, items_argument, keep_argument
from trunkline._core import parse_size
from trunkline._errors import exception_of
from trunkline._paths import absolute_path
from trunkline.checkpoint.tiers.hung import read_beside


class Tier:
    """A directory that a Checkpointer copies some of its steps to, in the background.

    directory: of the copies, which is an ordinary directory of checkpoints; created by the first copy. every:
    the steps that are copied are the multiples of this, as for keep_every. keep: how many of the last copies
    stay (None: all). bytes_per_second: the most that is read from or written to it, an int or a str such as
    "2GB" (None: no limit).
    """

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        *,
        every: SupportsIndex = 1,
        keep: SupportsIndex | None = 3,
        bytes_per_second: "int | str | None" = None,
    ) -> None:
        """Touches nothing on disk. Raises TypeError or ValueError, which names the argument."""
        self.directory: str = absolute_path(directory, "directory")
        self.every = count_argument(every, "every")
        self.keep = keep_argument(keep)
        self.bytes_per_second = None
        if bytes_per_second is not None:
            self.bytes_per_second = parse_size(bytes_per_second, "bytes_per_second")
            if self.bytes_per_second == 0:
                raise ValueError("bytes_per_second: must be at least 1, or None for no limit, not 0")

    def __repr__(self) -> str:
        return (
            f"trunkline.Tier({self.directory!r}, every={self.every}, keep={self.keep}, "
            f"bytes_per_second={self.bytes_per_second})"
        )

    def options(self) -> list[Any]:
        """Return what must be the same on all ranks."""
        return [self.directory, self.every, self.keep, self.bytes_per_second]


def missing_tier(directory: str) -> Exception:
    """Make the error for a tier that is on record and not there."""
    return exception_of("system", errno.EIO, about_missing_tier(directory), directory)


def about_missing_tier(directory: str) -> str:
    """Return what to do about a tier that is on record and not there."""
    return (
        f"the tier {directory} does not exist any more; mount its disk if it is not mounted. If the "
        "directory was removed, make an empty one in its place"
    )


def tiers_argument(value: Any, directory: str) -> list[Tier]:
    """Return the tiers of a Checkpointer of `directory`; raises TypeError, ValueError."""
    if value is None:
        return []
    wrong = f"tiers: must be a list of trunkline.Tier, not {type(value).__name__}"
    if isinstance(value, Tier):
        raise TypeError(f"{wrong}; put it into a list")
    tiers = items_argument(value, wrong)
    for each in tiers:
        if not isinstance(each, Tier):
            raise TypeError(f"tiers: must hold only trunkline.Tier, not {type(each).__name__}")
    if tiers:
        directories = [directory, *(each.directory for each in tiers)]
        read_beside(lambda: _check_distinct(directories), lambda: f"one of the tiers {directories[1:]}")
    return tiers


def _check_distinct(directories: Iterable[str]) -> None:
    seen: set[str] = set()
    for each in directories:
        real = os.path.realpath(each)
        if real in seen:
            raise ValueError(
                f"tiers: {each} is the directory of the run, or named twice; give each tier a directory of "
                "its own"
            )
        seen.add(real)
