"""Reads the weights of a model that fits into memory at the device's speed, for SGLang's own loading."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trunkline._errors import Unsupported
from trunkline._logging import Log
from trunkline.checkpoint.iter_tensors import iter_tensors
from trunkline.sglang._settings import VARIABLE

_log = Log("stream")

# Each takes the list of files first, and yields (name, tensor).
ITERATORS = (
    "sglang.srt.model_loader.weight_utils.safetensors_weights_iterator",
    "sglang.srt.model_loader.weight_utils.buffered_multi_thread_safetensors_weights_iterator",
)

_bytes_read = 0  # by this process


def read_weights(
    original: Any, hf_weights_files: Iterable[str], *_: Any, **__: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what one of ITERATORS, `original`, would yield."""
    global _bytes_read
    begin, before = time.monotonic(), _bytes_read
    group = _tensor_parallel_group()
    # SGLang may let each rank begin with another file.
    files = list(hf_weights_files) if group is None else sorted(hf_weights_files)
    for name, tensor in iter_tensors(files, group=group):
        _bytes_read += tensor.nbytes
        yield name, tensor
    nbytes, seconds = _bytes_read - before, time.monotonic() - begin
    _log.info(
        "read %.3f GB of weights in %.2f s, %.2f GB/s with SGLang's own work on them",
        nbytes / 1e9,
        seconds,
        nbytes / 1e9 / seconds if seconds else 0.0,
    )


def _tensor_parallel_group() -> Any:
    """Return the process group of the ranks that load the same files, for tensors in main memory; or None."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_group.cpu_group if parallel.tp_size > 1 else None


def load_and_check(original: Any, runner: Any) -> Any:
    """Load the model of a ModelRunner: `original` is its load_model().

    Raises Unsupported if it has not called read_weights().
    """
    before = _bytes_read
    result = original(runner)
    if _bytes_read == before:
        raise Unsupported(
            None,
            "the weights were not read by Trunkline, but by SGLang with its --load-format; use --load-format "
            f"auto and a model in .safetensors files, or unset {VARIABLE}",
        )
    return result
