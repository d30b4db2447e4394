"""Hooks that bring weights into memory while their module runs; otherwise they are on the meta device."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from trunkline._errors import Unsupported
from trunkline._streaming.bound_unit import BoundUnit, UnitMemory, WeightView
from trunkline._streaming.layers import Unit
from trunkline._streaming.offloaded import NotCopied
from trunkline._trace import span

_NO_GRADIENTS = (
    "training a model whose weights are streamed, and gradients through it, are not supported; call "
    "model.eval() and use torch.no_grad(), or load it with transformers"
)


_NO_GRAPHS = (
    "a CUDA graph is being captured, and cannot hold a model whose weights are streamed: they are elsewhere "
    "each time; run it without graphs"
)


class WeightHooks:
    """Hooks on the modules of a model that acquire and release the units of a stream.

    A unit is acquired when the first of its modules runs, and released when the last one has run, or its
    layer ends, however it ends. One thread at a time may run the model.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        units: Sequence[Unit],
        views: Sequence[Sequence[WeightView]],
        memory: UnitMemory,
    ) -> None:
        """`views`: of the tensors of each unit, in their order."""
        self._memory = memory
        self._units = [
            BoundUnit(index, unit, of_unit, memory)
            for index, (unit, of_unit) in enumerate(zip(units, views, strict=True))
        ]
        self._by_layer: dict[int, list[BoundUnit]] = {}
        for bound in self._units:
            self._by_layer.setdefault(bound.layer, []).append(bound)
        self._first_layer = min(self._by_layer, default=0)
        self._last_layer = max(self._by_layer, default=0)
        self._thread: threading.Thread | None = None  # that runs a layer
        self._order: list[int] = []  # of units in this pass
        self._usual_order = list(range(len(units)))
        self.passes = 0
        self.seconds = 0.0  # in the layers
        self._pass_began = 0.0
        self._layer_span = span("stream", "layer")
        for bound, unit in zip(self._units, units, strict=True):
            for part in unit.parts:
                _hook(part.module, self._before_module(bound), self._after_module(bound))
        for number, layer in enumerate(layers):
            _hook(layer, self._before_layer(number), self._after_layer(number))

    def _before_module(self, unit: BoundUnit) -> Any:
        def hook(module: nn.Module, arguments: Any, named: Any) -> None:
            if torch.is_grad_enabled() and _requires_grad((arguments, named)):
                raise Unsupported(None, _NO_GRADIENTS)
            if unit.is_bound:
                unit.renew()
            else:
                unit.bind(module)
                self._order.append(unit.index)

        return hook

    def _after_module(self, unit: BoundUnit) -> Any:
        # The modules of a whole layer may run several times, and its weights be used between them.
        is_whole_layer = self._by_layer[unit.layer] == [unit]

        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if not unit.is_bound:
                return
            unit.finish(module)
            if self._thread is None:  # the module was called outside of its layer
                is_over = unit.was_acquired_for(module)
            else:
                is_over = unit.all_finished() and not is_whole_layer
            if is_over:
                unit.release()
            if torch.is_grad_enabled() and _requires_grad(output):  # a hook of the user's has put it in
                raise Unsupported(None, _NO_GRADIENTS)

        return hook

    def _before_layer(self, number: int) -> Any:
        def hook(module: nn.Module, arguments: Any, named: Any) -> None:
            if torch.is_grad_enabled() and (
                module.training
                or _requires_grad((arguments, named))
                or any(parameter.requires_grad for parameter in module.parameters())
            ):
                raise Unsupported(None, _NO_GRADIENTS)
            if self._memory.on_gpu and torch.cuda.is_current_stream_capturing():
                raise Unsupported(None, _NO_GRAPHS)
            thread = threading.current_thread()
            if self._thread is not None and self._thread is not thread and self._thread.is_alive():
                raise Unsupported(
                    None,
                    "a model whose weights are streamed runs in one thread at a time; await the other one, "
                    "or load the model once for each",
                )
            self._thread = thread
            if number == self._first_layer:
                for unit in self._units:
                    if unit.acquired:  # an interrupt ended the pass before, and no hook was called
                        unit.release()
                self._order.clear()
                self._pass_began = time.perf_counter()
            self._layer_span = span("stream", "layer", f"layer {number}")
            self._layer_span.__enter__()

        return hook

    def _after_layer(self, number: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if self._thread is not threading.current_thread():
                return  # the layer refused to run in this thread
            for unit in self._by_layer.get(number, ()):
                if unit.acquired:
                    unit.release()
            self._thread = None
            self._layer_span.__exit__(None, None, None)
            if number == self._last_layer and output is not None:
                self._end_pass()

        return hook

    def _end_pass(self) -> None:
        self.passes += 1
        self.seconds += time.perf_counter() - self._pass_began
        # Modules need not run in the order in which they were registered.
        if len(self._order) == len(self._units) and self._order != self._usual_order:
            self._usual_order = list(self._order)
            if sorted(self._usual_order) == list(range(len(self._units))):
                self._memory.stream.set_order(self._usual_order)


_NOT_COMPILED = (
    "trunkline reads the weights of a streamed model between its modules, which is not compiled; use "
    "fullgraph=False"
)
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def not_compiled(hook: _Hook) -> _Hook:
    """Keep torch.compile away: it would run the hook once, and then never again."""
    made: _Hook = torch.compiler.disable(hook, reason=_NOT_COMPILED)  # type: ignore[no-untyped-call]
    return made


class MatchStockMatmul(NotCopied):
    """Lets matrices that stay in memory require gradients while a model runs without recording any.

    Those of stock models do. Torch computes the product of a batch with a matrix as one product only then;
    else it copies the matrix for each row, which takes memory, and may round otherwise.
    """

    def __init__(self, model: nn.Module, weights: Sequence[torch.Tensor]) -> None:
        """Do so from now on."""
        self._matrices = [weight for weight in weights if weight.dim() >= 2 and weight.is_floating_point()]
        self._changed: list[torch.Tensor] = []
        model.register_forward_pre_hook(self.before, prepend=True)
        model.register_forward_hook(self.after, always_call=True)

    @not_compiled
    def before(self, module: nn.Module, arguments: Any) -> None:
        """What is called before the model runs."""
        if not torch.is_grad_enabled():
            self._changed += [weight for weight in self._matrices if not weight.requires_grad]
            for weight in self._changed:
                weight.requires_grad_(True)

    @not_compiled
    def after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """What is called when it has run, or failed."""
        while self._changed:
            self._changed.pop().requires_grad_(False)


def _hook(module: nn.Module, before: Any, after: Any) -> None:
    module.register_forward_pre_hook(not_compiled(before), prepend=True, with_kwargs=True)
    module.register_forward_hook(not_compiled(after), always_call=True)


def _requires_grad(value: Any) -> bool:
    """Whether any tensor in arguments or an output does."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, tuple | list):
        return any(map(_requires_grad, value))
    if isinstance(value, dict):
        return any(map(_requires_grad, value.values()))
    return False
