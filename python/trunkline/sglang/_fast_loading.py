"""Reads the weights of a model that fits into memory at the device's speed, for SGLang's own loading."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trunkline._errors import Unsupported
from trunkline._streaming.weights_log import logged
from trunkline.checkpoint.iter_tensors import iter_tensors
from trunkline.sglang._settings import VARIABLE

# Each takes the list of files first, and yields (name, tensor).
ITERATORS = (
    "sglang.srt.model_loader.weight_utils.safetensors_weights_iterator",
    "sglang.srt.model_loader.weight_utils.buffered_multi_thread_safetensors_weights_iterator",
)

_reads = 0  # calls of read_weights() in this process


def read_weights(
    original: Any, hf_weights_files: Iterable[str], *_: Any, **__: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what one of ITERATORS, `original`, would yield."""
    global _reads
    _reads += 1
    group = _tensor_parallel_group()
    # SGLang may let each rank begin with another file.
    files = list(hf_weights_files) if group is None else sorted(hf_weights_files)
    yield from logged(iter_tensors(files, group=group), "SGLang")


def _tensor_parallel_group() -> Any:
    """Return the process group of the ranks that load the same files, for tensors in main memory; or None."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_group.cpu_group if parallel.tp_size > 1 else None


def load_and_check(original: Any, runner: Any) -> Any:
    """Load the model of a ModelRunner: `original` is its load_model().

    Raises Unsupported if it has not called read_weights().
    """
    before = _reads
    result = original(runner)
    if _reads == before:
        raise Unsupported(
            None,
            "the weights were not read by Trunkline, but by SGLang with its --load-format; use --load-format "
            f"auto and a model in .safetensors files, or unset {VARIABLE}",
        )
    return result
