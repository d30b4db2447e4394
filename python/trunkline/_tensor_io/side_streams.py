"""Streams of GPUs for what another thread does with tensors."""

from collections.abc import Iterable

import torch

from trunkline._errors import Unsupported


def side_streams(tensors: Iterable[torch.Tensor]) -> dict[torch.device, torch.cuda.Stream]:
    """Make a stream for each GPU that tensors are on, behind what the caller's stream there holds now.

    What waits for it waits for no later work of the caller's. Raises Unsupported while a CUDA graph is
    captured.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda):
        current = torch.cuda.current_stream(device)
        with torch.cuda.stream(current):
            if torch.cuda.is_current_stream_capturing():
                raise Unsupported(
                    None, f"{device}: a CUDA graph is being captured; checkpoints are saved outside of graphs"
                )
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        streams[device].wait_stream(current)
    return streams
