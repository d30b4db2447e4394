"""Choices of a mixture's experts by a given distribution, the same in every process.

The routers of random weights choose nearly uniformly. These replace what they choose; the weights of the
chosen experts stay those that the router gives.
"""

from __future__ import annotations

from typing import Any

import torch

_CALLS = 1 << 20  # at most so many of a router


def install(model: Any, zipf: float) -> None:
    """Let the routers choose experts with probabilities in proportion to 1 / rank ** `zipf` (0: uniform).

    The ranks of the experts are shuffled for each layer; the n-th call of a layer's router always chooses
    the same.
    """
    routers = [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]
    if not routers:
        raise SystemExit("bench: this model has no router")
    for layer, router in enumerate(routers):
        router.register_forward_hook(_Choices(layer, zipf))


class _Choices:
    def __init__(self, layer: int, zipf: float) -> None:
        self._layer, self._zipf, self._calls = layer, zipf, 0

    def __call__(self, router: Any, _: Any, output: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        logits, scores, indices = output
        generator = torch.Generator().manual_seed(self._layer)
        order = torch.randperm(router.num_experts, generator=generator)
        generator.manual_seed((self._layer + 1) * _CALLS + self._calls)
        self._calls += 1
        noise = torch.rand(indices.shape[0], router.num_experts, generator=generator).clamp_min(1e-9)
        # Gumbel's trick: the largest are a draw without replacement.
        keys = -self._zipf * torch.log(order + 1.0) - torch.log(-torch.log(noise))
        return logits, scores, keys.topk(indices.shape[1]).indices.to(indices)
