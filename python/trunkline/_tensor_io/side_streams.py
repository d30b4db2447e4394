"""CUDA streams for threads that read the caller's tensors."""

from collections.abc import Iterable

from trunkline._errors import Unsupported
from trunkline._torch_or_numpy import torch


def side_streams(tensors: Iterable[torch.Tensor]) -> dict[torch.device, torch.cuda.Stream]:
    """Make a stream for each GPU with tensors, ordered after the present work of the caller's stream.

    Waiting for it does not wait for later work of the caller. Raises Unsupported while a CUDA graph is being
    captured.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda):
        current = torch.cuda.current_stream(device)
        with torch.cuda.stream(current):
            if torch.cuda.is_current_stream_capturing():
                raise Unsupported(
                    None, f"{device}: cannot save while a CUDA graph is being captured; save outside of it"
                )
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        streams[device].wait_stream(current)
    return streams
