"""Which rank this process is."""

import os
import sys
import warnings


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return both as given, else those of torch.distributed if it is initialized, else 0 and 1.

    Raises ValueError for one without the other, and for a rank that is not below world_size.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("rank, world_size: must be given together, or neither")
    if rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: must be from 0 to world_size - 1, not {rank} of {world_size}")
        return rank, world_size
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialized: this "
            "process gets all samples. Make the Loader after init_process_group, or pass rank and world_size",
            stacklevel=4,
        )
    return 0, 1
