"""Weights that are in memory while their module runs, and on the meta device otherwise."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import nn

from trunkline._core import WeightStream
from trunkline._errors import Corrupt, Unsupported
from trunkline.transformers._offloaded import NotCopied, OffloadedWeight
from trunkline.transformers.layers import Unit, Weight


@contextmanager
def advised(remedy: str) -> Iterator[None]:
    """Let errors about bytes that were changed say what to do."""
    try:
        yield
    except Corrupt as error:
        error.strerror = f"{error.strerror}; {remedy}"
        raise


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
        layers: nn.ModuleList,
        units: Sequence[Unit],
        places: Sequence[Sequence[tuple[int, torch.dtype, tuple[int, ...]]]],
        stream: WeightStream,
        remedy: str,
        gpu_memory: torch.Tensor | None = None,
    ) -> None:
        """`places`: of each weight of each unit, where it begins in the unit's memory, dtype and shape.

        `remedy`: what to do about weights that were changed. `gpu_memory`: what the units of the stream are
        handed out from, if that is on a GPU.
        """
        self._gpu = None if gpu_memory is None else gpu_memory.device
        home = self._gpu or torch.device("cpu")
        self._stream = stream
        self._remedy = remedy
        self._units = units
        self._places = places
        self._memory = [
            torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
            for memory in stream.memory
        ]
        if gpu_memory is not None:
            self._memory = [gpu_memory]
        # Of a unit: what its modules get. It comes again with each cycle.
        self._bound: dict[tuple[int, int, int, bool], list[tuple[dict[str, Any], str, nn.Parameter]]] = {}
        self._unbound = [
            [
                (part.module._parameters, weight.name, _offloaded(part.module, weight, home))
                for part in unit.parts
                for weight in part.weights
            ]
            for unit in units
        ]
        self._taken: set[int] = set()  # units that are acquired, or may be: an interrupt can come any time
        self._held: dict[int, set[int]] = {}  # unit that is bound: modules that have run
        self._acquirer: dict[int, int] = {}  # the module for which a unit was acquired
        self._thread: threading.Thread | None = None  # that runs a layer
        self._order: list[int] = []  # of units in this pass
        self._usual_order = list(range(len(units)))
        self.passes = 0
        self.seconds = 0.0  # in the layers
        self._pass_began = 0.0
        self._of_layer: dict[int, list[int]] = {}
        for index, unit in enumerate(units):
            self._of_layer.setdefault(unit.layer, []).append(index)
        self._last_layer = max(self._of_layer, default=0)
        self._first_layer = min(self._of_layer, default=0)
        for index, unit in enumerate(units):
            for part in unit.parts:
                _hook(part.module, self._before_module(index), self._after_module(index, part.module))
        for number, layer in enumerate(layers):
            _hook(layer, self._before_layer(number), self._after_layer(number))

    def _before_module(self, index: int) -> Any:
        def hook(module: nn.Module, arguments: Any, named: Any) -> None:
            if torch.is_grad_enabled() and _requires_grad((arguments, named)):
                raise Unsupported(None, _NO_GRADIENTS)
            if index not in self._held:
                self._acquire(index)
                self._acquirer[index] = id(module)

        return hook

    def _after_module(self, index: int, module: nn.Module) -> Any:
        key, count = id(module), len(self._units[index].parts)
        # Its modules may run several times, and its weights be used between them.
        is_whole_layer = self._of_layer[self._units[index].layer] == [index]

        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            run = self._held.get(index)
            if run is None:
                return
            run.add(key)
            if self._thread is None:  # it was called outside of its layer
                is_over = self._acquirer[index] == key
            else:
                is_over = len(run) == count and not is_whole_layer
            if is_over:
                self._release(index)
            if torch.is_grad_enabled() and _requires_grad(output):  # of what a hook of the user's put in
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
            if self._gpu is not None and torch.cuda.is_current_stream_capturing():
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
                for index in list(self._taken):  # an interrupt ended the pass before, and no hook was called
                    self._release(index)
                self._order.clear()
                self._pass_began = time.perf_counter()

        return hook

    def _after_layer(self, number: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if self._thread is not threading.current_thread():
                return  # of a thread that was refused
            for index in self._of_layer.get(number, ()):
                if index in self._taken:
                    self._release(index)
            self._thread = None
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
                self._stream.set_order(self._usual_order)

    def _acquire(self, index: int) -> None:
        for parameters, name, absent in self._unbound[index]:
            if parameters.get(name) is not absent:
                raise Unsupported(
                    None,
                    f"{absent.path} was replaced; weights that are streamed cannot be, load the model with "
                    "transformers for that",
                )
        self._taken.add(index)
        with advised(self._remedy):
            memory, offset = self._stream.acquire(index)
        self._order.append(index)
        # As in a stock model, since torch computes some products in another order, and rounds otherwise, for
        # weights that could have gradients.
        trainable = not torch.is_grad_enabled()
        bound = self._bound.get((index, memory, offset, trainable))
        if bound is None:
            bound = self._bound[index, memory, offset, trainable] = [
                (parameters, name, self._parameter(memory, offset + at, dtype, shape, trainable))
                for (parameters, name, _), (at, dtype, shape) in zip(
                    self._unbound[index], self._places[index], strict=True
                )
            ]
        self._held[index] = set()
        for parameters, name, parameter in bound:
            parameters[name] = parameter

    def _parameter(
        self, memory: int, at: int, dtype: torch.dtype, shape: tuple[int, ...], trainable: bool
    ) -> nn.Parameter:
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        tensor = self._memory[memory][at : at + nbytes].view(dtype).reshape(shape)
        return nn.Parameter(tensor, requires_grad=trainable and dtype.is_floating_point)

    def _release(self, index: int) -> None:
        for parameters, name, absent in self._unbound[index]:
            parameters[name] = absent
        self._held.pop(index, None)
        with suppress(ValueError):  # it was not acquired after all
            if self._gpu is None:
                self._stream.release(index)
            else:
                self._stream.release(index, torch.cuda.current_stream(self._gpu))
        self._taken.discard(index)


_NOT_COMPILED = (
    "trunkline reads the weights of a streamed model between its modules, which is not compiled; use "
    "fullgraph=False"
)
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def _not_compiled(hook: _Hook) -> _Hook:
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

    @_not_compiled
    def before(self, module: nn.Module, arguments: Any) -> None:
        """What is called before the model runs."""
        if not torch.is_grad_enabled():
            self._changed += [weight for weight in self._matrices if not weight.requires_grad]
            for weight in self._changed:
                weight.requires_grad_(True)

    @_not_compiled
    def after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """What is called when it has run, or failed."""
        while self._changed:
            self._changed.pop().requires_grad_(False)


def _hook(module: nn.Module, before: Any, after: Any) -> None:
    module.register_forward_pre_hook(_not_compiled(before), prepend=True, with_kwargs=True)
    module.register_forward_hook(_not_compiled(after), always_call=True)


def _offloaded(module: nn.Module, weight: Weight, home: torch.device) -> OffloadedWeight:
    parameter = module._parameters[weight.name]
    assert parameter is not None
    made = module._parameters[weight.name] = OffloadedWeight.of(weight.path, parameter, home)
    return made


def _requires_grad(value: Any) -> bool:
    """Whether any tensor in arguments or an output does."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, tuple | list):
        return any(map(_requires_grad, value))
    if isinstance(value, dict):
        return any(map(_requires_grad, value.values()))
    return False
