"""Moves batches to a GPU."""

from typing import Any

import torch
from torch.utils import _pytree

from trunkline.data._batch import Batch


def moved_to(device: torch.device, value: Any) -> Any:
    """Return a batch, or the tensors of what was made of one, on the GPU, after its current stream.

    A batch's buffer goes back to the loader when the copy has ended.
    """
    if not isinstance(value, Batch):
        return _pytree.tree_map(
            lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, value
        )
    host = torch.from_numpy(value.memory)
    on_device = torch.empty(host.shape, dtype=torch.uint8, device=device)
    on_device.copy_(host, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))
    # The buffer must not be read into before the copy has ended, which is soon: it was queued just now.
    copied.synchronize()
    return value._with_memory(on_device)
