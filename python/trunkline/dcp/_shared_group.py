"""Recognizes saves in the background that talk over the process group of the training."""

import inspect
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from trunkline._warnings import caller, warn_without_failing

_ASYNC_SAVE = inspect.unwrap(state_dict_saver.async_save).__code__

_warned = False


def warn_of_shared_group(frame: FrameType | None) -> None:
    """Warn, once, if `frame` is within an async_save() on the backend over which the training communicates.

    The thread of async_save() and the training would take each other's messages: both may get wrong values,
    or gloo ends the process. In one thread the calls have an order, which is the same on all ranks.
    """
    global _warned
    while frame is not None and frame.f_code is not _ASYNC_SAVE:
        frame = frame.f_back
    if _warned or frame is None or not _shares_group(frame.f_locals):
        return
    _warned = True
    warn_without_failing(
        "async_save communicates in the background over the default process group, whose backend for the "
        "CPU is also the one of the training: their messages get mixed up if the training communicates "
        "before the save has ended. Pass a group of its own, made once: "
        "async_save(..., process_group=torch.distributed.new_group(backend='gloo')), or use "
        "trunkline.dcp.Checkpointer, which makes one",
        caller("torch"),
    )


def _shares_group(call: dict[str, Any]) -> bool:
    """Whether the call with these arguments does."""
    if call.get("process_group") is not None or call.get("no_dist") or not call.get("use_collectives", True):
        return False
    if call.get("async_checkpointer_type") is AsyncCheckpointerType.PROCESS:  # has a group of its own
        return False
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    # "cpu:gloo,cuda:nccl": a training on GPUs communicates over the other one.
    backends = dict(each.split(":", 1) for each in dist.get_backend_config().split(",") if ":" in each)
    return len(set(backends.values())) <= 1 or not torch.accelerator.is_available()
