"""Preemption of many ranks by enable_jit_checkpoint: SIGTERM may reach them at different steps."""

from typing import Any

import torch
import torch.distributed as dist
import transformers


class AgreedPreemption(transformers.TrainerCallback):  # type: ignore[misc] # without the library no type
    """Lets all ranks make the checkpoint of the same step once one of them is asked to.

    Each would save alone otherwise, and wait for the others, which compute the next step.
    """

    def __init__(self, manager: Any) -> None:
        """Take over what SIGTERM asks of `manager`, the CheckpointManager of this rank."""
        self._manager = manager
        self._is_requested = False
        manager._enable_checkpoint = self._request  # what its timer calls

    def _request(self) -> None:
        self._is_requested = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hand the request on to the manager, on all ranks at the same step."""
        requested = torch.tensor(int(self._is_requested), device=args.device)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX)
        if requested.item():
            self._is_requested = False
            self._manager.is_checkpoint_requested = True


def agree_on_preemption(trainer: Any) -> None:
    """Let the ranks of a Trainer agree on the step, if there are several and enable_jit_checkpoint is on."""
    if not trainer.args.enable_jit_checkpoint or trainer.args.world_size == 1 or not dist.is_initialized():
        return
    callbacks = trainer.callback_handler.callbacks
    for callback in list(callbacks):
        manager = getattr(callback, "jit_manager", None)
        if manager is not None:
            callbacks.insert(0, AgreedPreemption(manager))  # asked before `callback`
