"""The copies of states that async_save() saves, and the working directories in which it was called."""

import contextlib
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


def working_directory() -> str | None:
    """Return the absolute path of the working directory; None if it has been removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return None


class StagedState(dict[str, Any]):
    """The copy of a state, which torch holds until its save has ended."""


def is_called_to_save_staged() -> bool:
    """Whether a caller has a StagedState: not if another stager copied what it saves."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if any(isinstance(value, StagedState) for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False


def _resolved(value: Any) -> Any:
    """Return a state with conjugate and negative views resolved, whose bit torch's stager drops."""
    if isinstance(value, torch.Tensor):
        is_lazy = type(value) is torch.Tensor and (value.is_conj() or value.is_neg())
        return value.resolve_conj().resolve_neg() if is_lazy else value
    if type(value) is dict:
        return {key: _resolved(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_resolved, value))
    return value


class Staging:
    """Copies states as async_save() does without a stager, and remembers where it was called.

    Torch hands the checkpoint_id over in the background, when the working directory may be another one; it
    copies the state within the call. For any threads, and for signal handlers: nothing waits.
    """

    def __init__(self) -> None:
        """Make one with no save under way."""
        # Each access is one step of the interpreter.
        self._called_in: dict[int, tuple[weakref.ref[StagedState], str | None]] = {}

    def copy(self, state_dict: Mapping[str, Any]) -> StagedState:
        """Return a copy in CPU memory."""
        directory = working_directory()
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        try:
            copied = stager.stage(_resolved(dict(state_dict)))
        finally:
            stager.close()
        assert not isinstance(copied, Future)  # as it is without asynchronous staging
        staged = StagedState(copied)
        key, called_in = id(staged), self._called_in
        ended = weakref.ref(staged, lambda _: called_in.pop(key, None))
        called_in[key] = (ended, directory)
        return staged

    def begin(self) -> None:
        """Forget one of the calls, whose save begins: any one, where all are of one directory.

        Otherwise the future of a save that failed, which holds the copy, would keep it.
        """
        if len(self.directories()) == 1:
            with contextlib.suppress(KeyError):  # it has just ended
                self._called_in.popitem()

    def directories(self) -> frozenset[str | None]:
        """Return the working directories in which the saves that have not ended were called."""
        return frozenset(directory for _, directory in self._called_in.copy().values())
