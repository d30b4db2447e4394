#!/usr/bin/env python3
"""One process that loads a model in one way and generates with it; prints what that took as JSON.

    benchmarks/generate.py '{"way": "trunkline", "model": "DIR", "budget": 9000000, "batch": 4, "tokens": 8}'

Ways: "trunkline" (also "volumes", "pack_dir"), "accelerate" (its disk offload into "offload"), "resident"
(all in memory). "group": a memory control group to join first, so that the page cache cannot hold all
weights.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def load(job: dict[str, Any]) -> Any:
    import torch
    import transformers

    import trunkline as tl

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    if job["way"] == "trunkline":
        return tl.transformers.from_pretrained(
            job["model"],
            memory_budget=job["budget"],
            volumes=job.get("volumes"),
            pack_dir=job.get("pack_dir"),
        )
    if job["way"] == "accelerate":
        config = transformers.AutoConfig.from_pretrained(job["model"])
        layers = {f"model.layers.{index}": "disk" for index in range(config.num_hidden_layers)}
        rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        return transformers.AutoModelForCausalLM.from_pretrained(
            job["model"], device_map={**rest, **layers}, offload_folder=job["offload"]
        )
    return transformers.AutoModelForCausalLM.from_pretrained(job["model"])


def generate(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class Clock(LogitsProcessor):  # type: ignore[misc]
        """Notes when each token's logits are there."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.cpu: list[float] = []

        def __call__(self, _: Any, scores: Any) -> Any:
            self.times.append(time.perf_counter())
            self.cpu.append(cpu_seconds())
            return scores

    clock = Clock()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (job["batch"], 16), generator=generator)
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job["tokens"],
            min_new_tokens=job["tokens"],
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([clock]),
        )
    steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "first": clock.times[0] - start,
        "steps": steps,
        "cpu": [after - before for before, after in zip(clock.cpu, clock.cpu[1:], strict=False)],
        "tokens": out[:, ids.shape[1] :].tolist(),
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    if job.get("group"):
        Path(job["group"], "cgroup.procs").write_text(str(os.getpid()))
    start = time.perf_counter()
    model = load(job)
    result = {"load": time.perf_counter() - start, **generate(model, job)}
    if job["way"] == "trunkline":
        import trunkline as tl

        result["stats"] = tl.stream.stats(model)
    result["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(result))


if __name__ == "__main__":
    main()
