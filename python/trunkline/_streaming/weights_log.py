"""Logs how fast a server's own code has loaded weights that Trunkline reads."""

import time
from collections.abc import Iterable, Iterator

import torch

from trunkline._logging import Log

_log = Log("stream")


def logged(weights: Iterable[tuple[str, torch.Tensor]], server: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights and, after the last, log their bytes and the time. `server`: whose code uses them."""
    begin, nbytes = time.monotonic(), 0
    for name, tensor in weights:
        nbytes += tensor.nbytes
        yield name, tensor
    seconds = time.monotonic() - begin
    _log.info(
        "read %.3f GB of weights in %.2f s, %.2f GB/s with %s's own work on them",
        nbytes / 1e9,
        seconds,
        nbytes / 1e9 / seconds if seconds else 0.0,
        server,
    )
