"""One unit of a streamed model: its weights have memory while it is acquired, and are offloaded otherwise."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trunkline._core import WeightStream
from trunkline._errors import Corrupt, Unsupported
from trunkline._streaming.layers import QuantisedWeight, Unit, Weight
from trunkline._streaming.offloaded import OffloadedWeight
from trunkline._streaming.scratch import Scratch


class WeightView(NamedTuple):
    """Where a stored tensor begins in the memory of its unit, in bytes, and what it is."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class UnitMemory:
    """The units of a stream, and the tensors that view the memory in which they are used."""

    def __init__(
        self,
        stream: WeightStream,
        remedy: str,
        gpu_memory: torch.Tensor | None = None,
        *,
        may_require_gradients: bool = True,
        scratch: Scratch | None = None,
    ) -> None:
        """`remedy`: what to do about weights that were changed.

        `gpu_memory`: what the stream takes the units' memory from, if that is on a GPU.
        `may_require_gradients`: whether those of the stock model do, which decides how torch rounds.
        `scratch`: for quantised weights.
        """
        self.stream = stream
        self.scratch = scratch
        self.may_require_gradients = may_require_gradients
        self.device = torch.device("cpu") if gpu_memory is None else gpu_memory.device
        self._remedy = remedy
        if gpu_memory is not None:
            self.tensors = [gpu_memory]
        else:
            self.tensors = [
                torch.frombuffer(each, dtype=torch.uint8) if len(each) else torch.empty(0, dtype=torch.uint8)
                for each in stream.memory
            ]

    @property
    def on_gpu(self) -> bool:
        """Whether units are used in the memory of a GPU."""
        return self.device.type != "cpu"

    def acquire(self, index: int) -> tuple[int, int]:
        """Wait for a unit; return which of the tensors holds it, and the byte at which it begins there."""
        with advised(self._remedy):
            return self.stream.acquire(index)

    def release(self, index: int) -> None:
        """Let the memory be reused, on a GPU after what its current stream does.

        Does nothing for a unit that was not acquired.
        """
        with suppress(ValueError):
            if self.on_gpu:
                self.stream.release(index, torch.cuda.current_stream(self.device))
            else:
                self.stream.release(index)

    def view(self, tensor: int, begin: int, view: WeightView) -> torch.Tensor:
        """Return a stored tensor of the unit that begins there."""
        at = begin + view.offset
        nbytes = view.dtype.itemsize * torch.Size(view.shape).numel()
        return self.tensors[tensor][at : at + nbytes].view(view.dtype).reshape(view.shape)


@contextmanager
def advised(remedy: str) -> Iterator[None]:
    """Let errors about bytes that were changed say what to do."""
    try:
        yield
    except Corrupt as error:
        error.strerror = f"{error.strerror}; {remedy}"
        raise


@dataclass(frozen=True, eq=False)
class _Weight:
    parameters: dict[str, Any]  # of the module it belongs to
    name: str  # in them
    offloaded: OffloadedWeight
    views: Sequence[WeightView]  # of its stored tensors
    quantised: QuantisedWeight | None
    scratch_begin: int  # of its dequantised values, if it is quantised


class BoundUnit:
    """A unit that is acquired when the first of its modules runs, and released when its last one has run.

    An interrupt may come anywhere: `acquired` is set before the stream is asked and cleared after the
    release, and `is_bound` is set before the first parameter is.
    """

    def __init__(self, index: int, unit: Unit, views: Sequence[WeightView], memory: UnitMemory) -> None:
        """`index`: of the unit in the stream. `views`: of its tensors, in their order."""
        self.index = index
        self.layer = unit.layer
        self.acquired = False  # or may be, after an interrupt
        self._memory = memory
        self._part_count = len(unit.parts)
        self._weights = _offloaded(unit, views, memory.device)
        self._quantised = [weight for weight in self._weights if weight.quantised is not None]
        # By where the unit is, and whether they require gradients: slots are reused in each pass.
        self._parameters: dict[tuple[int, int, bool], list[nn.Parameter]] = {}
        self._place = (0, 0, False)  # the key of the parameters that the modules have
        self._finished: set[int] | None = None  # modules that have run; None: the unit is not bound
        self._acquirer: int | None = None  # the module for which it was acquired

    @property
    def is_bound(self) -> bool:
        """Whether its modules have, or are being given, the parameters."""
        return self._finished is not None

    def bind(self, module: nn.Module) -> None:
        """Acquire the unit for one of its modules, and give all of them their parameters."""
        self._check_not_replaced()
        self.acquired = True
        tensor, begin = self._memory.acquire(self.index)
        self._acquirer = id(module)
        # Parameters require gradients as in a stock model: torch computes some products in another order, and
        # rounds otherwise, for weights that could have gradients.
        trainable = self._memory.may_require_gradients and not torch.is_grad_enabled()
        self._place = (tensor, begin, trainable)
        if self._place not in self._parameters:
            self._parameters[self._place] = [
                nn.Parameter(data, requires_grad=trainable and data.dtype.is_floating_point)
                for data in map(self._data, self._weights)
            ]
        try:
            self._dequantise()
        except BaseException:
            self.release()
            raise
        self._finished = set()
        self._set_parameters(self._weights)
        self._own_scratch()

    def renew(self) -> None:
        """Dequantise the weights again, if those of another unit have replaced them since bind()."""
        scratch = self._memory.scratch
        if self._quantised and scratch is not None and scratch.owner is not self:
            self._dequantise()
            self._set_parameters(self._quantised)
            self._own_scratch()

    def lose_scratch(self) -> None:
        """Put the offloaded weights back in place of those that are dequantised."""
        for weight in self._quantised:
            weight.parameters[weight.name] = weight.offloaded

    def _own_scratch(self) -> None:
        if self._quantised and self._memory.scratch is not None:
            self._memory.scratch.owner = self

    def _dequantise(self) -> None:
        scratch = self._memory.scratch
        if not self._quantised or scratch is None:
            return
        scratch.take()
        tensor, begin, _ = self._place
        for weight in self._quantised:
            assert weight.quantised is not None
            stored = [self._memory.view(tensor, begin, view) for view in weight.views]
            weight.quantised.dequantise(stored, self._data(weight))

    def _data(self, weight: _Weight) -> torch.Tensor:
        """Return the memory in which a weight is used."""
        if weight.quantised is None:
            tensor, begin, _ = self._place
            return self._memory.view(tensor, begin, weight.views[0])
        assert self._memory.scratch is not None
        return self._memory.scratch.view(
            weight.scratch_begin, weight.offloaded.dtype, tuple(weight.offloaded.shape)
        )

    def _set_parameters(self, weights: Sequence[_Weight]) -> None:
        made = self._parameters[self._place]
        for weight, parameter in zip(self._weights, made, strict=True):
            if weight in weights:
                weight.parameters[weight.name] = parameter

    def finish(self, module: nn.Module) -> None:
        """Note that one of its modules has run."""
        if self._finished is not None:
            self._finished.add(id(module))

    def all_finished(self) -> bool:
        """Whether each of its modules has run since it was bound."""
        return self._finished is not None and len(self._finished) == self._part_count

    def was_acquired_for(self, module: nn.Module) -> bool:
        """Whether this module was the first to need it."""
        return self._acquirer == id(module)

    def release(self) -> None:
        """Put the offloaded weights back, and let the memory be reused."""
        for weight in self._weights:
            weight.parameters[weight.name] = weight.offloaded
        self._finished = None
        if self._memory.scratch is not None:
            self._memory.scratch.release(self)
        self._memory.release(self.index)
        self.acquired = False

    def _check_not_replaced(self) -> None:
        for weight in self._weights:
            if weight.parameters.get(weight.name) is not weight.offloaded:
                raise Unsupported(
                    None,
                    f"cannot run the model: {weight.offloaded.path} was replaced, which streamed weights do "
                    "not support; to replace weights, load the model with transformers",
                )


def _offloaded(unit: Unit, views: Sequence[WeightView], device: torch.device) -> list[_Weight]:
    """Replace the unit's weights in their modules, and return them. `views`: of its tensors."""
    made: list[_Weight] = []
    at = scratch = 0
    for part in unit.parts:
        for weight in part.weights:
            count = len(weight.tensors)
            absent = _offload(part.module, weight, device)
            of_weight = views[at : at + count]
            made.append(
                _Weight(part.module._parameters, weight.name, absent, of_weight, weight.quantised, scratch)
            )
            at += count
            scratch += weight.scratch_bytes
    return made


def _offload(module: nn.Module, weight: Weight, device: torch.device) -> OffloadedWeight:
    """Replace a module's parameter by one on the meta device, which is used on `device`."""
    parameter = module._parameters[weight.name]
    assert parameter is not None
    made = module._parameters[weight.name] = OffloadedWeight.of(weight.path, parameter, device)
    return made
