"""Arguments of Checkpointer."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsIndex

from trunkline import _core
from trunkline._arguments import (
    bool_argument,
    check_engine,
    check_staging_bytes,
    items_argument,
    seconds_argument,
    started_ranks,
)
from trunkline._paths import absolute_path
from trunkline._torch_or_numpy import HAS_TORCH
from trunkline.checkpoint.ranks.group import GroupRanks, Ranks
from trunkline.checkpoint.retention import KeepBest, Rules

Writers = Literal["rank", "node"] | Sequence[int]


class CheckedOptions(NamedTuple):
    """Options that directories of all kinds have."""

    rules: Rules
    fresh: bool
    timeout: float


def checked_options(
    keep: SupportsIndex | None,
    keep_every: SupportsIndex | None,
    keep_best: KeepBest | None,
    fresh: bool,
    timeout: float,
    staging_bytes: "int | str | None",
    engine: "_core.Engine | None",
) -> CheckedOptions:
    """Check them; raises TypeError or ValueError, which names the argument."""
    rules = Rules.of(keep, keep_every, keep_best)
    fresh = bool_argument(fresh, "fresh")
    timeout = seconds_argument(timeout)
    if timeout <= 0:
        raise ValueError(f"timeout: must be more than 0 seconds, not {timeout!r}")
    check_staging_bytes(staging_bytes)
    check_engine(engine)
    return CheckedOptions(rules, fresh, timeout)


def names_of(volumes: "Sequence[str | os.PathLike[str]] | None") -> list[str] | None:
    """Return the absolute paths of `volumes`; raises TypeError, ValueError."""
    if volumes is None:
        return None
    one = isinstance(volumes, str | bytes | bytearray | os.PathLike)  # not the sequence of its characters
    wrong = f"volumes: must be a list of directories, not {type(volumes).__name__}"
    if one:
        wrong += "; put it into a list"
    elif isinstance(volumes, _core.Volume):  # which is for single files
        wrong += f"; pass its directories: volumes={[str(each) for each in volumes.directories]}"
    items = items_argument(volumes, wrong)
    return [absolute_path(volume, "volumes") for volume in items]


def ranks_of(process_group: Any, timeout: float, directory: Path) -> Ranks:
    """Return the ranks that `process_group` names. Collective. Raises ValueError."""
    if process_group is False:
        return Ranks()
    if process_group is None and not _has_default_group():
        ranks = started_ranks()
        if ranks > 1:
            raise ValueError(
                f"process_group: {ranks} processes were started together "
                "(WORLD_SIZE), but there is no process group; call torch.distributed.init_process_group "
                "first, or pass process_group=False if each process saves to a separate directory"
            )
        return Ranks()
    return GroupRanks(process_group, timeout, str(directory))


def _has_default_group() -> bool:
    if not HAS_TORCH:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def writers_of(writers: Writers, ranks: Ranks) -> list[int]:
    """Return the ranks that write; raises TypeError, ValueError."""
    if writers == "rank":
        return list(range(ranks.size))
    if writers == "node":
        return sorted({node: rank for rank, node in reversed(list(enumerate(ranks.nodes)))}.values())
    wrong = f'writers: must be "rank", "node" or a list of ranks from 0 to {ranks.size - 1}, not {writers!r}'
    if isinstance(writers, str):
        raise ValueError(wrong)
    chosen = items_argument(writers, wrong)
    if not chosen or not all(isinstance(rank, int) and 0 <= rank < ranks.size for rank in chosen):
        if ranks.size == 1:
            wrong = f"writers: cannot be {writers!r} with one process and no process group; omit it"
        raise ValueError(wrong)
    return sorted(set(chosen))
