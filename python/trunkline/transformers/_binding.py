"""Weights that are in memory while their module runs, and on the meta device otherwise."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trunkline._core import WeightStream
from trunkline._errors import Unsupported
from trunkline.transformers._layers import Unit


class Binding:
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
    ) -> None:
        """`places`: of each weight of each unit, where it begins in the unit's memory, dtype and shape."""
        self._stream = stream
        self._units = units
        self._places = places
        self._memory = [
            torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
            for memory in stream.memory
        ]
        # Of a unit at a place of its: what its modules get. They come by again with each cycle.
        self._bound: dict[tuple[int, int, int], list[tuple[dict[str, Any], str, nn.Parameter]]] = {}
        self._unbound = [
            [
                (part.module._parameters, weight.name, part.module._parameters[weight.name])
                for part in unit.parts
                for weight in part.weights
            ]
            for unit in units
        ]
        self._held: dict[int, set[int]] = {}  # unit: modules that have run
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
                part.module.register_forward_pre_hook(self._before_module(index), prepend=True)
                part.module.register_forward_hook(self._after_module(index, part.module), always_call=True)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before_layer(number), prepend=True)
            layer.register_forward_hook(self._after_layer(number), always_call=True)

    def _before_module(self, index: int) -> Any:
        def hook(module: nn.Module, arguments: Any) -> None:
            if index not in self._held:
                self._acquire(index)

        return hook

    def _after_module(self, index: int, module: nn.Module) -> Any:
        key, count = id(module), len(self._units[index].parts)

        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            run = self._held.get(index)
            if run is None:
                return
            run.add(key)
            if len(run) == count:
                self._release(index)

        return hook

    def _before_layer(self, number: int) -> Any:
        def hook(module: nn.Module, arguments: Any) -> None:
            if torch.compiler.is_compiling():
                raise Unsupported(
                    None, "torch.compile of a model whose weights are streamed is not supported"
                )
            if torch.is_grad_enabled() and module.training:
                raise Unsupported(
                    None,
                    "training a model whose weights are streamed is not supported; call model.eval(), or "
                    "load it with transformers",
                )
            thread = threading.current_thread()
            if self._thread is not None and self._thread is not thread and self._thread.is_alive():
                raise Unsupported(
                    None,
                    "a model whose weights are streamed runs in one thread at a time; await the other one, "
                    "or load the model once for each",
                )
            self._thread = thread
            if number == self._first_layer:
                for index in list(self._held):  # an interrupt ended the pass before, and no hook was called
                    self._release(index)
                self._order.clear()
                self._pass_began = time.perf_counter()

        return hook

    def _after_layer(self, number: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if self._thread is not threading.current_thread():
                return  # of a thread that was refused
            for index in self._of_layer.get(number, ()):
                if index in self._held:
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
        memory, offset = self._stream.acquire(index)
        self._held[index] = set()
        self._order.append(index)
        bound = self._bound.get((index, memory, offset))
        if bound is None:
            bound = self._bound[index, memory, offset] = [
                (parameters, name, self._parameter(memory, offset + at, dtype, shape))
                for (parameters, name, _), (at, dtype, shape) in zip(
                    self._unbound[index], self._places[index], strict=True
                )
            ]
        for parameters, name, parameter in bound:
            parameters[name] = parameter

    def _parameter(self, memory: int, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> nn.Parameter:
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        tensor = self._memory[memory][at : at + nbytes].view(dtype).reshape(shape)
        return nn.Parameter(tensor, requires_grad=False)

    def _release(self, index: int) -> None:
        for parameters, name, parameter in self._unbound[index]:
            parameters[name] = parameter
        del self._held[index]
        self._stream.release(index)
