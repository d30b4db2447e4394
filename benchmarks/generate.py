#!/usr/bin/env python3
"""One process that loads a model in one way and generates with it; prints what that took as JSON.

    benchmarks/generate.py '{"way": "trunkline", "model": "DIR", "budget": 9000000, "batch": 4, "prompt": 16,
                             "tokens": 8}'

Ways: "trunkline" (also "volumes", "pack_dir", "keep"), "accelerate" (its disk offload into "offload"),
"deepspeed" (ZeRO-Inference, from files that it makes in "offload"), "mmap" (parameters mapped from the file
"mapped"), "resident" (all in memory). "group": a memory control group to join first, so that the page cache
cannot hold all weights. "zipf": how unequally the experts of a mixture are chosen (skewed_routing.py).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import skewed_routing


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_bytes() -> int:
    """Most memory that was resident (ru_maxrss would be that of the parent, where it had more)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmHWM in /proc/self/status")


def import_all(way: str) -> None:
    """What takes seconds and is not the loading."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    importlib.import_module("transformers.models.llama.modeling_llama")
    if way in ("trunkline", "deepspeed", "accelerate"):
        importlib.import_module(way)


def load(job: dict[str, Any]) -> Any:
    import transformers

    if job["way"] == "trunkline":
        import trunkline as tl

        return tl.transformers.from_pretrained(
            job["model"],
            memory_budget=job["budget"],
            volumes=job.get("volumes"),
            pack_dir=job.get("pack_dir"),
            keep=job.get("keep", "dequantised"),
        )
    if job["way"] == "deepspeed":
        return load_with_deepspeed(job)
    if job["way"] == "accelerate":
        config = transformers.AutoConfig.from_pretrained(job["model"])
        layers = {f"model.layers.{index}": "disk" for index in range(config.num_hidden_layers)}
        rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        return transformers.AutoModelForCausalLM.from_pretrained(
            job["model"], device_map={**rest, **layers}, offload_folder=job["offload"]
        )
    if job["way"] == "mmap":
        return load_mapped(job)
    return transformers.AutoModelForCausalLM.from_pretrained(job["model"])


def load_mapped(job: dict[str, Any]) -> Any:
    import safetensors
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(job["model"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with safetensors.safe_open(job["mapped"], framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # has no weights, and is not stored
    return model.eval()


def load_with_deepspeed(job: dict[str, Any]) -> Any:
    """As DeepSpeed's example of ZeRO-Inference does, but with blocks of 1 MiB: its own 16 MiB would leave
    smaller weights in memory without a word.
    """
    import torch
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    config = transformers.AutoConfig.from_pretrained(job["model"])
    largest = config.hidden_size * max(config.intermediate_size, config.vocab_size)
    settings = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * largest,
            "stage3_param_persistence_threshold": config.hidden_size,
            "stage3_max_live_parameters": 2 * largest,
            "offload_param": {
                "device": "nvme",
                "nvme_path": job["offload"],
                "pin_memory": True,
                "buffer_count": 6,
                "buffer_size": largest,
            },
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
    }
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    kept = HfDeepSpeedConfig(settings)  # noqa: F841, transformers looks for it while it lives
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    engine = deepspeed.initialize(model=model.eval(), config=settings)[0]
    engine.module.eval()
    return engine.module


def bytes_read(model: Any) -> int:
    """So far, in all."""
    import trunkline as tl

    return int(tl.stream.stats(model)["bytes_read"])


def generate(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class Clock(LogitsProcessor):  # type: ignore[misc]
        """Notes when each token's logits are there."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.cpu: list[float] = []
            self.read: list[int] = []

        def __call__(self, _: Any, scores: Any) -> Any:
            self.times.append(time.perf_counter())
            self.cpu.append(cpu_seconds())
            self.read.append(bytes_read(model) if job["way"] == "trunkline" else 0)
            return scores

    clock = Clock()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (job["batch"], job["prompt"]), generator=generator)
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
        "read": clock.read,
        "tokens": out[:, ids.shape[1] :].tolist(),
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    if job.get("group"):
        Path(job["group"], "cgroup.procs").write_text(str(os.getpid()))
    import_all(job["way"])
    start = time.perf_counter()
    model = load(job)
    seconds = time.perf_counter() - start
    if "zipf" in job:
        skewed_routing.install(model, job["zipf"])
    result = {"load": seconds, **generate(model, job)}
    if job["way"] == "trunkline":
        import trunkline as tl

        result["stats"] = tl.stream.stats(model)
    result["peak"] = peak_bytes()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
