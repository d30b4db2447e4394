"""A model loader of vLLM that reads weights with iter_tensors()."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from trunkline._errors import Unsupported
from trunkline._streaming.weights_log import logged
from trunkline.checkpoint.iter_tensors import iter_tensors

# In vLLM's module default_loader: takes the list of files first, and yields (name, tensor).
_ITERATOR = "safetensors_weights_iterator"


@cache
def loader_class() -> Any:
    """Return the class below, which inherits from vLLM's."""
    from vllm.model_executor.model_loader import default_loader

    getattr(default_loader, _ITERATOR)  # raises AttributeError in a vLLM that has another structure

    class TrunklineLoader(default_loader.DefaultModelLoader):  # type: ignore[misc, unused-ignore]
        """Finds files and filters weights as vLLM does for .safetensors files, and reads them faster."""

        def __init__(self, load_config: Any) -> None:
            if extra := load_config.model_loader_extra_config:
                raise ValueError(
                    f"--model-loader-extra-config: {', '.join(sorted(extra))}: has no effect with "
                    "--load-format trunkline; omit it"
                )
            load_config = copy.copy(load_config)
            load_config.load_format = "safetensors"  # decides which files vLLM looks for
            super().__init__(load_config)

        def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            reads: list[list[str]] = []

            def read(files: list[str], *_: Any, local_expert_ids: Any = None, **__: Any) -> Any:
                reads.append(files)
                return _read(files, local_expert_ids)

            with patch.object(default_loader, _ITERATOR, read):
                weights = super()._get_weights_iterator(source)
            if not reads:
                raise Unsupported(
                    None,
                    f"{source.model_or_path} has no .safetensors files, which --load-format trunkline reads; "
                    "use --load-format auto",
                )
            return weights  # type: ignore[no-any-return, unused-ignore]

    return TrunklineLoader


def _read(files: list[str], local_expert_ids: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors of the files; with expert parallelism only those of the given experts."""
    keys = None
    if local_expert_ids is not None:
        from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

        def keys(name: str) -> bool:
            return not should_skip_weight(name, local_expert_ids)

    group = None if keys is not None else _tensor_parallel_group()
    return logged(iter_tensors(files, keys=keys, group=group), "vLLM")


def _tensor_parallel_group() -> Any:
    """Return the process group of the ranks that load the same files, for tensors in main memory; or None."""
    from vllm.distributed.parallel_state import get_tp_group

    coordinator = get_tp_group()
    return coordinator.cpu_group if coordinator.world_size > 1 else None
