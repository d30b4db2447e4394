"""Records which experts a model routes its tokens to, wherever its weights are."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from trunkline._errors import Error, Unsupported
from trunkline._logging import Log
from trunkline._paths import path_name
from trunkline._streaming.routing_trace import TraceWriter, path_from_environment
from trunkline._streaming.weight_hooks import not_compiled
from trunkline._types import Path
from trunkline.transformers.experts import Experts, routing_of, uses_of

_log = Log("transformers")


@contextmanager
def recording(path: "Path | None", name: str, experts: Sequence[Experts]) -> Iterator[Callable[[Any], None]]:
    """Open the trace while a model is loaded; what is returned lets the loaded model record its steps.

    It does so until it is released or the interpreter exits. `path`: the argument routing_trace; if it is
    None and the environment names no file either, nothing is recorded. `name`: of the model. Raises
    Unsupported for a model without routed experts, and OSError where the file cannot be written; for the file
    that the environment names these are only logged.
    """
    if path is None:
        yield lambda model: _record_for_environment(model, name, experts)
        return
    if not experts:
        raise Unsupported(
            None, f"routing_trace: {name} has no experts that can be read one by one, so there is no routing"
        )
    writer = _new_writer(path_name(path, "routing_trace"), name, experts)
    try:
        yield lambda model: _record(model, experts, writer)
    except BaseException:
        writer.discard()
        raise


def _record_for_environment(model: Any, name: str, experts: Sequence[Experts]) -> None:
    path = path_from_environment() if experts else None
    if path is None:
        return
    try:
        writer = _new_writer(path, name, experts)
    except Error as error:
        _log.warn("%s", error)
        return
    _record(model, experts, writer)


def _new_writer(path: str, name: str, experts: Sequence[Experts]) -> TraceWriter:
    return TraceWriter(path, name, [(each.name, each.count) for each in experts])


def _record(model: Any, experts: Sequence[Experts], writer: TraceWriter) -> None:
    writer.begin()
    for number, each in enumerate(experts):
        hook = not_compiled(_Recorder(number, each.count, writer).before)
        each.module.register_forward_pre_hook(hook, with_kwargs=True)
    weakref.finalize(model, writer.close)


class _Recorder:
    """The hook on one module."""

    def __init__(self, number: int, count: int, writer: TraceWriter) -> None:
        self._number = number
        self._count = count
        self._writer = writer

    def before(self, module: nn.Module, arguments: Any, named: Any) -> None:
        """Record the experts that the module is going to use."""
        routing = routing_of(arguments, named)
        if routing is not None and routing.dim() > 0 and routing.shape[0] > 0:
            self._writer.record(self._number, routing.shape[0], uses_of(routing, self._count))
