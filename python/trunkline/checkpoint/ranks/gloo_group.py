"""A separate process group for what ranks tell each other, which does not meet what the program sends."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def new_gloo_group(given: Any, timeout: timedelta | None = None) -> Any:
    """Make a group (gloo) of the ranks of another one (None: the default group).

    timeout: of its operations; None: that of the other one.

    A collective operation of these ranks.
    """
    return dist.new_group(
        dist.get_process_group_ranks(given),
        timeout=timeout_of(given) if timeout is None else timeout,
        backend="gloo",
        use_local_synchronization=True,
    )


def timeout_of(group: Any) -> Any:
    """Return how long the collective operations of a group may take; None: torch's default."""
    group = dist.group.WORLD if group is None else group
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):  # it has no backend for these
            return group._get_backend(torch.device(kind)).options._timeout
    return None
