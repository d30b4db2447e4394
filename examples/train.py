"""Train a small model, and save a checkpoint after every step, in the background of the next one.

    python examples/train.py --directory checkpoints
    python -m torch.distributed.run --nproc-per-node 2 examples/train.py --directory checkpoints

Whatever ends it, started again it goes on after the last checkpoint, and ends with bit for bit the weights of
a run that nothing interrupted. With another number of ranks it goes on too, but its batches are others then.
On GPUs if there are any (nccl), otherwise on CPUs (gloo).
"""

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trunkline as tl


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, required=True, help="of the checkpoints")
    parser.add_argument(
        "--volumes", type=Path, nargs="*", help="directories, one on each disk, to spread them over"
    )
    parser.add_argument("--keep", type=int, default=3, help="how many checkpoints stay")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=512, help="features of each hidden layer")
    parser.add_argument("--layers", type=int, default=2, help="hidden layers")
    parser.add_argument("--batch", type=int, default=32, help="samples a rank and step")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def join() -> tuple[int, int, torch.device]:
    """Join the other ranks if torchrun started this one: rank, number of ranks, device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        return 0, 1, device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def make_model(hidden: int, layers: int) -> nn.Module:
    widths = [16, *[hidden] * layers]
    blocks: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        blocks += [nn.Linear(before, after), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*blocks, nn.Linear(widths[-1], 1))


def make_batch(seed: int, step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the samples of one rank and step, always the same: a resumed run needs no position in the data."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
    inputs = torch.randn(size, 16, generator=generator)
    return inputs, inputs.square().mean(dim=1, keepdim=True).sin()


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def gather(value: Any, ranks: int) -> list[Any]:
    """What each rank has, on all of them: ranks that save together save the same state."""
    values = [value]
    if ranks > 1:
        values *= ranks
        dist.all_gather_object(values, value)
    return values


def main() -> None:
    options = parse_options()
    rank, ranks, device = join()

    torch.manual_seed(options.seed)
    model = make_model(options.hidden, options.layers).to(device)
    replica = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(options.seed + 1 + rank)  # each rank drops out features of its own

    checkpointer = tl.Checkpointer(options.directory, keep=options.keep, volumes=options.volumes)
    done = 0
    try:
        state = checkpointer.load()
    except FileNotFoundError:
        pass  # there is none yet
    else:
        done = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if rank < len(state["rng"]):  # a rank more than were saved keeps the seed from above
            torch.set_rng_state(state["rng"][rank]["cpu"])
            if device.type == "cuda" and "cuda" in state["rng"][rank]:
                torch.cuda.set_rng_state(state["rng"][rank]["cuda"], device)
        if rank == 0:
            print(f"resumed after step {done}", flush=True)

    saving = None
    for step in range(done + 1, options.steps + 1):
        inputs, targets = (each.to(device) for each in make_batch(options.seed, step, rank, options.batch))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(replica(inputs), targets)
        loss.backward()

        if saving is not None:
            saving.wait_staged()  # the step changes weights: the checkpoint must have its copy of them
        optimizer.step()

        state = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": gather(random_state(device), ranks),
        }
        # Copied from GPU or main memory while the next step is computed, after what is queued on the GPU.
        saving = checkpointer.save(step, state)
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g}", flush=True)

    checkpointer.wait()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
