#!/usr/bin/env python3
"""Train a model with FSDP2, and continue it after a kill, with trunkline.dcp.Checkpointer.

    torchrun --nproc-per-node 2 examples/fsdp2_training.py --directory fsdp-run --steps 50

Kill it at any time and run it again, with as many ranks as you like: it continues from its last checkpoint,
and ends with the same weights as a run that was not interrupted. On machines with GPUs each rank uses one.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trunkline as tl


def make_model() -> torch.nn.Module:
    """A few layers; the same weights on every rank."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a step, the same on every rank: so the weights do not depend on the number of ranks."""
    draw = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 64, generator=draw)
    return inputs, inputs.sum(dim=1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", default="fsdp-run", help="where the checkpoints go (fsdp-run)")
    parser.add_argument("--steps", type=int, default=50, help="steps of the whole training (50)")
    parser.add_argument("--local", action="store_true", help="each node has a disk of its own")
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints (5)")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")  # async_save needs one for the CPU
    device = "cuda" if on_gpu else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = make_model().to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    checkpoints = tl.dcp.Checkpointer(options.directory, keep=2, local=options.local)
    first = 0
    if checkpoints.latest() is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        checkpoints.load(state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"] + 1
    if dist.get_rank() == 0:
        print(f"begins at step {first}", flush=True)

    for step in range(first, options.steps):
        inputs, wanted = (each.to(device) for each in batch_of(step))
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            weights, moments = get_state_dict(model, optimizer)
            # Copied when this returns: training goes on while it is written.
            checkpoints.async_save(step, {"model": weights, "optimizer": moments, "step": step})
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    checkpoints.wait()  # the last one is durable from here on
    steps = checkpoints.steps()  # on all ranks: with local=True they find out together
    if dist.get_rank() == 0:
        print(f"done; steps {steps} in {options.directory}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
