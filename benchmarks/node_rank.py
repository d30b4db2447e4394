"""A rank of `make bench` on a node of its own: saves and loads on command, and prints how long each took.

node_rank.py RANK SIZE STORE DIRECTORY SHARED BYTES

DIRECTORY is that of the node, SHARED one that all ranks see. Each line of stdin is a key of NodeRank.ways().
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_state
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

import trunkline as tl


class NodeRank:
    """The state, and the Checkpointers on the directory of the node."""

    def __init__(self, rank: int, size: int, directory: Path, shared: Path, nbytes: int) -> None:
        self.state = model_state.make(nbytes)
        self.into = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self._rank, self._size, self._shared = rank, size, shared
        self._steps = {"save": 0, "save, copies=2": 0}
        self._made = {
            "save": tl.Checkpointer(directory / "once", local=True, keep=1),
            "save, copies=2": tl.Checkpointer(directory / "twice", local=True, keep=1, copies=2),
        }

    def save(self, name: str) -> None:
        self._steps[name] += 1
        self._made[name].save(self._steps[name], self.state, block=True)

    def load(self) -> None:
        self._made["save"].load(into=self.into)

    def save_by_dcp(self) -> None:
        save_by_dcp(self.state, storage_writer=FileSystemWriter(self._shared, sync_files=True))

    def send(self) -> None:
        """Let every rank have what load() sends it: all bytes but those that it has read itself."""
        share = model_state.total_bytes(self.state) // self._size
        own = torch.empty(share, dtype=torch.uint8)
        dist.all_gather([torch.empty_like(own) for _ in range(self._size)], own)

    def check(self) -> bool:
        return model_state.same(self.into, self.state)

    def remove_stock(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self._shared, ignore_errors=True)

    def ways(self) -> dict[str, Callable[[], Any]]:
        return {
            "save": lambda: self.save("save"),
            "save, copies=2": lambda: self.save("save, copies=2"),
            "load": self.load,
            "DCP": self.save_by_dcp,
            "send": self.send,
            "check": self.check,
            "remove": self.remove_stock,
        }


def main() -> None:
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    ways = NodeRank(rank, size, Path(sys.argv[4]), Path(sys.argv[5]), int(sys.argv[6])).ways()
    for line in sys.stdin:
        dist.barrier()
        begin = time.monotonic()
        result = ways[line.strip()]()
        dist.barrier()
        print(f"{time.monotonic() - begin} {result}", flush=True)


if __name__ == "__main__":
    main()
