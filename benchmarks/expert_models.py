"""Mixtures of experts in memory for a quarter of the experts, beside the roofline, accelerate's disk offload
and files mapped into memory.

The routers' choices are uniform or by Zipf's law (skewed_routing.py), the same for everybody. The roofline
of a token: the bytes that were read for it at the limit of the disk, or computing with all weights in
memory, whichever takes longer. Each run is a process in a memory control group of the same size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import larger_models
import safetensors.torch
import torch
import transformers
from measurement import Comparison, interleave
from paced_disks import PacedDisks
from page_cache import make_cold
from workbench import Workbench

SHARE = 0.25  # of the experts that fit into memory
SPARE = 300_000_000  # of the disk
PROCESS_BYTES = 400_000_000  # of memory, beside the budget: interpreter, torch, activations
COMMON = {
    "vocab_size": 8000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
# Of 1.6 to 2.1 GB in bf16.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_hidden_layers": 6,
        "moe_intermediate_size": 384,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "mixtral": {
        "num_hidden_layers": 12,
        "intermediate_size": 3584,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {
        "num_hidden_layers": 8,
        "moe_intermediate_size": 512,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
    },
    "gpt_oss": {
        "num_hidden_layers": 10,
        "intermediate_size": 1024,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
}
ROUTINGS = {"uniform": 0.0, "Zipf 1.0": 1.0}
OURS, ACCELERATE, MAPPED, RESIDENT = "ours", "accelerate", "mmap", "resident"
TOKENS = {OURS: 40, ACCELERATE: 4, MAPPED: 16, RESIDENT: 16}
WARM_UP = {OURS: 20, ACCELERATE: 1, MAPPED: 8, RESIDENT: 4}  # tokens that fill caches
GOALS = {ACCELERATE: 10.0, MAPPED: 3.0}

Run = dict[str, Any]


def measure(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        return [row for name in SHAPES for row in _of_shape(bench, name, Path(folder) / name)]


def _of_shape(bench: Workbench, name: str, folder: Path) -> list[Comparison]:
    model = _Model(name, folder)
    rows = []
    # A pack, the mapped file, and the files of accelerate.
    with PacedDisks([int(3.3 * model.nbytes) + SPARE], limit_mb_s=0) as disks:
        disk = disks.directories[0]
        model.write_mapped(disk)
        for routing, zipf in ROUTINGS.items():
            jobs = {way: model.job(way, zipf, disk) for way in TOKENS}
            disks.limit(0)
            larger_models.run({**jobs[OURS], "tokens": 1})  # makes the pack, or finds it
            runs = runs_of(bench, disks, jobs, WARM_UP, f"experts, {name}, {routing}")
            rows += _rows(bench, f"{name}, {routing}", model, runs)
    return rows


def runs_of(
    bench: Workbench, disks: PacedDisks, jobs: dict[str, Run], warm_up: dict[str, int], label: str
) -> dict[str, list[Run]]:
    """The results of each way; all must have generated the same tokens. The packs are there already."""
    results: dict[str, list[Run]] = {way: [] for way in jobs}
    disks.limit(bench.limit_mb_s or 0)

    def way(name: str) -> Callable[[], float]:
        def once() -> float:
            make_cold([disks.directories[0]])
            disks.rest()
            results[name].append(larger_models.run(jobs[name]))
            return step_seconds(results[name][-1], warm_up[name])

        return once

    interleave(bench.rounds, {name: way(name) for name in jobs}, label, warm_up=False)
    expected = next(iter(results.values()))[0]["tokens"][0]
    for name, runs in results.items():
        if any(run["tokens"][0] != expected[: len(run["tokens"][0])] for run in runs):
            raise SystemExit(f"bench: {label}: the tokens of {name} differ")
    return results


def step_seconds(run: Run, warm_up: int) -> float:
    """Of a token, after those that fill caches."""
    seconds: float = median(run["steps"][warm_up:])
    return seconds


def bytes_of_a_token(run: Run, warm_up: int) -> float:
    """That were read, of the same tokens."""
    return int(run["read"][-1] - run["read"][warm_up]) / (len(run["read"]) - 1 - warm_up)


def _rows(bench: Workbench, case: str, model: _Model, runs: dict[str, list[Run]]) -> list[Comparison]:
    steps = {name: [step_seconds(run, WARM_UP[name]) for run in each] for name, each in runs.items()}
    rates = {name: [1 / step for step in each] for name, each in steps.items()}
    rows = []
    if bench.limit_mb_s:
        limit = bench.limit_mb_s * 1e6
        read = [bytes_of_a_token(run, WARM_UP[OURS]) for run in runs[OURS]]
        roofline = [max(each / limit, median(steps[RESIDENT])) for each in read]
        peers = [1 / each for each in roofline]
        rows.append(Comparison("experts", case, "tokens/s", "the roofline", rates[OURS], peers, at_least=0.9))
        everything = [limit / (model.nbytes - model.budget)] * bench.rounds
        rows.append(
            Comparison(
                "experts", case, "tokens/s", "all experts read for each token", rates[OURS], everything
            )
        )
    for peer, goal in GOALS.items():
        rows.append(Comparison("experts", case, "tokens/s", peer, rates[OURS], rates[peer], at_least=goal))
    return rows


class _Model:
    """A folder with random weights, and how each way runs it."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(name, **{**COMMON, **SHAPES[name]}, dtype="bfloat16")
        self._folder = folder
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._model.save_pretrained(folder)
        sizes = {each: value.nbytes for each, value in self._model.state_dict().items()}
        experts = sum(size for each, size in sizes.items() if ".experts." in each)
        self.nbytes = sum(sizes.values())
        self.budget = int(self.nbytes - experts + SHARE * experts)

    def write_mapped(self, disk: Path) -> None:
        """Write the parameters as the model has them, for mmap; the model in this process ends with it."""
        safetensors.torch.save_file(self._model.state_dict(), disk / "mapped.safetensors")
        del self._model

    def job(self, way: str, zipf: float, disk: Path) -> Run:
        return {
            "way": way if way != OURS else "trunkline",
            "model": str(self._folder),
            "budget": self.budget,
            "group": way != RESIDENT,
            "spare": PROCESS_BYTES,
            "volumes": [str(disk)],
            "offload": str(disk / "accelerate"),
            "mapped": str(disk / "mapped.safetensors"),
            "zipf": zipf,
            "batch": 1,
            "prompt": 4,
            "tokens": TOKENS[way],
        }
