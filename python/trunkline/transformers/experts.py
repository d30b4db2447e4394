"""The routed experts of a model: matrices of which each token uses few."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from trunkline._streaming.layers import Weight, streamable_weights

# What modules with transformers' experts interface call the matrices of all experts.
_MATRICES = {"gate_up_proj", "up_proj", "down_proj"}
# What configs call the number of experts that a token uses.
_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk"),
    *("top_k_experts", "moe_num_experts_per_tok", "num_selected_experts", "moe_router_topk"),
)
_USUAL_PER_TOKEN = 8


@dataclass
class Experts:
    """A module with the experts of a layer. Each of its weights is one matrix of all of them."""

    module: nn.Module
    count: int
    weights: list[Weight]

    @property
    def name(self) -> str:
        """The module's name in the model."""
        return self.weights[0].path.rpartition(".")[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def matrix_bytes(self) -> list[int]:
        """Bytes of each matrix of one expert, as it is stored."""
        return [weight.nbytes // self.count for weight in self.weights]

    @property
    def expanded_bytes(self) -> int:
        """By how much an expert is larger once it is dequantised."""
        return sum(
            weight.quantised.dequantised_bytes - weight.nbytes // self.count
            for weight in self.weights
            if weight.quantised is not None
        )


def find_experts(model: Any, path: str, layers: nn.ModuleList) -> list[Experts]:
    """Return the modules in the layers at `path` whose experts can be read one by one, in their order.

    Their forward takes the experts that each token is routed to, and uses a matrix by an expert's number, or
    through one of the implementations of transformers' experts interface.
    """
    streamable = streamable_weights(model)
    return [
        Experts(module, _count(module), weights)
        for inner, module in layers.named_modules()
        if (weights := list(_matrices(f"{path}.{inner}", module, streamable)))
    ]


def scratch_sizes(experts: Sequence[Experts]) -> list[int]:
    """Return the memory in which the experts' matrices are dequantised: one for each weight of a module.

    All modules use the same; a module may use one matrix of each of its weights at a time.
    """
    sizes: list[int] = []
    for each in experts:
        sizes += [0] * (len(each.weights) - len(sizes))
        for index, weight in enumerate(each.weights):
            sizes[index] = max(sizes[index], weight.scratch_bytes)
    return sizes


def scratch_bytes_of(experts: Sequence[Experts]) -> int:
    """Return the sum of scratch_sizes()."""
    return sum(scratch_sizes(experts))


def routed_parameters(experts: Sequence[Experts]) -> set[int]:
    """Return the ids of the parameters."""
    return {id(each.module._parameters[weight.name]) for each in experts for weight in each.weights}


def experts_per_token(config: Any, count: int) -> int:
    """Return how many of `count` experts a token uses by a model's config; a guess if it does not say."""
    text = config.get_text_config(decoder=True)
    for name in _PER_TOKEN:
        value = getattr(text, name, None)
        if isinstance(value, list | tuple) and value:
            value = max(value)
        if type(value) is int and value > 0:
            return min(value, count)
    return min(_USUAL_PER_TOKEN, count)


def uses_of(routing: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """Return which of `count` experts are used, and by how many tokens each; `routing`: of routing_of()."""
    counts = torch.bincount(routing.reshape(-1), minlength=count)[:count].tolist()
    return [(expert, tokens) for expert, tokens in enumerate(counts) if tokens]


def routing_of(arguments: Any, named: Any) -> torch.Tensor | None:
    """Return the experts of each token, out of the arguments of such a module; None if they are not there."""
    for value in (*arguments, *named.values()):
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
            return value
    return None


def _count(module: nn.Module) -> int:
    count = getattr(module, "num_experts", 0)
    return count if type(count) is int else 0


def _matrices(path: str, module: nn.Module, streamable: set[int]) -> Iterator[Weight]:
    """Yield the matrices of all experts; none unless the module has transformers' experts interface."""
    if not hasattr(module, "_is_expert_parallel") or not hasattr(module, "_apply_gate"):
        return
    matrices = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and name in _MATRICES
    }
    if len(matrices) != 2 or any(
        parameter.dim() != 3 or parameter.shape[0] != _count(module) or id(parameter) not in streamable
        for parameter in matrices.values()
    ):
        return
    for name, parameter in matrices.items():
        if prod(parameter.shape) == 0:
            return
        yield Weight(f"{path}.{name}", name, parameter.nbytes)
