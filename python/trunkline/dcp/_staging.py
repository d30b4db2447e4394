"""The copies of states that async_save() saves, and the working directories in which it was called."""

import sys
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
    """The copy of a state, which torch passes to what saves it in the background."""

    called_in: str | None = None  # the working directory of async_save(); None if that has been removed


def find_staged_state() -> StagedState | None:
    """Return the copy that the closest caller saves; None if another stager made it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, StagedState):
                return value
        frame = frame.f_back
    return None


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


def stage(state_dict: Mapping[str, Any]) -> StagedState:
    """Return a copy in CPU memory, as async_save() makes it without a stager, that knows where it was called.

    Torch passes the checkpoint_id on in the background, when the working directory may be another one; it
    copies the state within the call.
    """
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
    staged.called_in = directory
    return staged
