"""Which rank this process is."""

import os
import sys
import warnings


def given_ranks(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return both as given, or None.

    Raises ValueError for one without the other, and for a rank that is not below world_size.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("rank, world_size: must be given together, or neither")
    if rank is None or world_size is None:
        return None
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: must be from 0 to world_size - 1, not {rank} of {world_size}")
    return rank, world_size


def initialized_ranks() -> tuple[int, int] | None:
    """Return the rank and the number of ranks of torch.distributed; None if it is not initialized."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def warn_of_missing_group() -> None:
    """Warn if a launcher has started several ranks, and torch.distributed is not initialized."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialized: this "
            "process gets all samples. Call init_process_group first, or pass rank and world_size",
            stacklevel=4,
        )
