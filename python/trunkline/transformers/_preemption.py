"""Preemption of several ranks with enable_jit_checkpoint: SIGTERM may reach them at different steps."""

from typing import Any

import torch
import torch.distributed as dist
import transformers

from trunkline._errors import Unsupported

_OF_MANAGER = ("_enable_checkpoint", "is_checkpoint_requested")


class AgreedPreemption(transformers.TrainerCallback):  # type: ignore[misc] # without the library no type
    """Makes all ranks save the checkpoint of the same step once one of them has received SIGTERM.

    Otherwise each rank would save alone, and wait for the others, which compute the next step.
    """

    def __init__(self, manager: Any) -> None:
        """Handle the requests of `manager`, the CheckpointManager of this rank, which receives SIGTERM."""
        self._manager = manager
        self._is_requested = False
        manager._enable_checkpoint = self._request  # what its timer calls

    def _request(self) -> None:
        self._is_requested = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass the request on to the manager, on all ranks at the same step."""
        if on_any_rank(self._is_requested, args):
            self._is_requested = False
            self._manager.is_checkpoint_requested = True


def on_any_rank(condition: bool, args: Any) -> bool:
    """Return whether the condition holds on any rank: a collective operation if there are several."""
    if args.world_size == 1 or not dist.is_initialized():
        return condition
    flag = torch.tensor(int(condition), device=args.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def agree_on_preemption(trainer: Any) -> None:
    """Make the ranks of a Trainer agree on the step, if there are several and enable_jit_checkpoint is on.

    Raises Unsupported for a version of transformers whose enable_jit_checkpoint works in another way: each
    rank would save alone, wait for the others until the timeout, and be killed before that.
    """
    if not trainer.args.enable_jit_checkpoint or trainer.args.world_size == 1 or not dist.is_initialized():
        return
    callbacks = trainer.callback_handler.callbacks
    managers = [getattr(callback, "jit_manager", None) for callback in callbacks]
    known = [each for each in managers if all(hasattr(each, name) for name in _OF_MANAGER)]
    if not known:
        raise Unsupported(
            None,
            f"enable_jit_checkpoint with several ranks: the CheckpointManager of transformers "
            f"{transformers.__version__} is not supported, so the ranks could not agree on the step of the "
            "checkpoint; use transformers 5.23, or turn enable_jit_checkpoint off",
        )
    for manager in known:
        callbacks.insert(0, AgreedPreemption(manager))  # called before the manager's own callback
