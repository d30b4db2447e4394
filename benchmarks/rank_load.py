"""A rank of `make bench`: loads a model with the others, or each alone, and prints how long that took.

rank_load.py RANK SIZE STORE {together,alone,safetensors} FILE...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from guest_memory import touch_new_memory

import trunkline as tl


def load(way: str, files: list[str]) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        if way == "together":
            loaded |= tl.load(file, group=dist.group.WORLD)
        elif way == "alone":
            loaded |= tl.load(file)
        else:
            mapped = safetensors.torch.load_file(file)
            loaded |= {name: tensor.clone() for name, tensor in mapped.items()}
    return loaded


def main() -> None:
    rank, size, store, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    files = sys.argv[5:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    touch_new_memory(sum(Path(file).stat().st_size for file in files))
    tl.default_engine()
    dist.barrier()
    begin = time.monotonic()
    loaded = load(way, files)
    dist.barrier()
    seconds = time.monotonic() - begin
    checked = sum(int(tensor.view(torch.uint8).sum()) for tensor in loaded.values())
    print(seconds, checked, flush=True)


if __name__ == "__main__":
    main()
