"""The ranks that torchrun has started for a command, one or more on each node."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from trunkline._arguments import started_ranks


def is_first_rank() -> bool:
    """Whether this process prints what all of them have found."""
    return started_ranks() == 1 or os.environ.get("RANK", "0") == "0"


@contextmanager
def joined_ranks() -> Iterator[int]:
    """Join the process group of all of them; gives the rank of this process, 0 if it is alone."""
    if started_ranks() == 1:
        yield 0
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
