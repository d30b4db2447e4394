#!/usr/bin/env python3
"""What incremental checkpoints write and cost: Checkpointer(incremental=True) beside incremental=False.

    python benchmarks/incremental.py [--directory DIR] [--megabytes N] [--saves N] [SCENARIO ...]

Both save the same states in turns, each into a directory of its own. For each scenario it prints one line of
JSON: the share that was written, and the medians of seconds and processor seconds for each save (the first
one apart, which writes everything and makes all digests).

lora: frozen weights, and an adapter of 1 %. embedding: a table of rows, of which 1 in 4000 changes.
bf16: weights of which 1 % of the elements change, as with a small learning rate, and Adam's state in float32.
everything: every element changes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import trunkline as tl

State = dict[str, torch.Tensor]


def lora(nbytes: int) -> Iterator[State]:
    base = {f"base{i}": torch.randn(nbytes // 80) for i in range(20)}
    adapter = {f"adapter{i}": torch.randn(nbytes // 40_000) for i in range(100)}
    while True:
        yield base | adapter
        for tensor in adapter.values():
            tensor += 1


def embedding(nbytes: int) -> Iterator[State]:
    table = torch.randn(nbytes // 512, 128)
    while True:
        yield {"table": table}
        table[torch.randint(0, len(table), (len(table) // 4000,))] += 1


def bf16(nbytes: int) -> Iterator[State]:
    count = nbytes // 100
    weights = {f"weight{i}": torch.randn(count).to(torch.bfloat16) for i in range(10)}
    adam = {f"adam{i}.{moment}": torch.randn(count) for i in range(10) for moment in "mv"}
    while True:
        yield weights | adam
        for tensor in weights.values():
            tensor[torch.randint(0, count, (count // 100,))] += 0.125
        for tensor in adam.values():
            tensor *= 0.999


def everything(nbytes: int) -> Iterator[State]:
    state = {f"t{i}": torch.randn(nbytes // 80) for i in range(20)}
    while True:
        yield state
        for tensor in state.values():
            tensor += 1


SCENARIOS: dict[str, Callable[[int], Iterator[State]]] = {
    "lora": lora,
    "embedding": embedding,
    "bf16": bf16,
    "everything": everything,
}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(name: str, root: Path, nbytes: int, saves: int) -> dict[str, Any]:
    torch.manual_seed(0)
    states = SCENARIOS[name](nbytes)
    runs = {
        how: tl.Checkpointer(root / f"{name}-{how}", keep=1, incremental=how == "incremental")
        for how in ("incremental", "whole")
    }
    seconds: dict[str, list[float]] = {how: [] for how in runs}
    cpu: dict[str, list[float]] = {how: [] for how in runs}
    shares = []
    total = 0
    for step in range(saves):
        state = next(states)
        total = sum(tensor.nbytes for tensor in state.values())
        for how in list(runs)[:: 1 if step % 2 else -1]:
            begin, begin_cpu = time.perf_counter(), cpu_seconds()
            handle = runs[how].save(step, state)
            handle.wait()
            seconds[how].append(time.perf_counter() - begin)
            cpu[how].append(cpu_seconds() - begin_cpu)
            if how == "incremental":
                shares.append(handle.written_share())
    later = slice(2, None)  # from the third on: the second finds out what changes everywhere
    result: dict[str, Any] = {
        "scenario": name,
        "bytes": total,
        "shares": [round(share, 4) for share in shares if share is not None],
    }
    for how in runs:
        result[how] = {
            "first_seconds": round(seconds[how][0], 4),
            "seconds": round(statistics.median(seconds[how][later]), 4),
            "first_cpu_seconds": round(cpu[how][0], 4),
            "second_cpu_seconds": round(cpu[how][1], 4),
            "cpu_seconds": round(statistics.median(cpu[how][later]), 4),
        }
    of = result["incremental"], result["whole"]
    result["compared"] = {key: round(of[0][key] / of[1][key], 3) for key in ("seconds", "cpu_seconds")}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure incremental checkpoints.")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--directory", help="where to save (default: a temporary directory)")
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--saves", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        for name in options.scenarios or SCENARIOS:
            print(
                json.dumps(measure(name, Path(root), options.megabytes * 1_000_000, options.saves)),
                flush=True,
            )


if __name__ == "__main__":
    main()
