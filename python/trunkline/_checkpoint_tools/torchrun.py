"""The ranks that torchrun has started for a command, one or more on each node."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from trunkline._arguments import started_ranks
from trunkline._errors import Error
from trunkline._logging import Log
from trunkline._progress import announce

_log = Log("checkpoint")
_JOIN_SECONDS = 120.0  # torchrun starts its processes at about the same time


def is_first_rank() -> bool:
    """Whether this process prints what all of them have found."""
    return started_ranks() == 1 or os.environ.get("RANK", "0") == "0"


@contextmanager
def joined_ranks() -> Iterator[int]:
    """Join the process group of all of them; gives the rank of this process, 0 if it is alone.

    Raises Error if the others do not come: the environment may be that of a training, in which one command
    is run by hand.
    """
    size = started_ranks()
    if size == 1:
        yield 0
        return
    import torch.distributed as dist

    announce(f"waiting for the {size} processes that were started together (WORLD_SIZE)", _log)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_JOIN_SECONDS))
    except (RuntimeError, ValueError) as error:
        raise Error(
            None,
            f"cannot join the {size} processes that the environment variable WORLD_SIZE says were started "
            f"together: {str(error).splitlines()[0]}. Start the command on all nodes with torchrun, or unset "
            "WORLD_SIZE to use what this node alone has",
        ) from error
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
