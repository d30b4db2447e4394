#!/usr/bin/env python3
"""Generation with a model of twice the memory that it is given, beside the same with all of it in memory:
each in a process of its own, the tokens compared.

    make demo                                                        as its last part
    .venv/bin/python examples/larger_than_memory.py --size 2GB --directory /mnt/nvme
    .venv/bin/python examples/larger_than_memory.py --json
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from sizes import parse_size

HIDDEN = 1024
LAYER_BYTES = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4 + 3 * HIDDEN * 2816)
BATCH = 4
TOKENS = 12
MOST_HIDDEN = 0.1  # of the time, waiting for storage

Run = dict[str, Any]


def make_model(directory: Path, size_bytes: int) -> int:
    """Saves a Llama of random weights, about as many bytes in bf16, and returns how many."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=HIDDEN,
        intermediate_size=2816,
        num_hidden_layers=max(4, size_bytes // LAYER_BYTES),
        num_attention_heads=16,
        num_key_value_heads=4,
        dtype="bfloat16",
    )
    transformers.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def generate(model_dir: Path, memory_budget: int | None) -> Run:
    """Loads the model, all of it or within the budget, and generates; what that gave and took."""
    import torch
    import transformers

    import trunkline as tl

    transformers.logging.disable_progress_bar()
    use_everything_once()
    before = resident_bytes()
    start = time.perf_counter()
    if memory_budget is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    else:
        model = tl.transformers.from_pretrained(
            model_dir, memory_budget=memory_budget, pack_dir=model_dir.parent / "pack"
        )
    loaded = time.perf_counter()

    class Clock(transformers.LogitsProcessor):  # type: ignore[misc]
        """Notes when the logits of each token are there."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, _: Any, scores: Any) -> Any:
            self.times.append(time.perf_counter())
            return scores

    clock = Clock()
    prompt = torch.randint(3, 4096, (BATCH, 8), generator=torch.Generator().manual_seed(0))
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        logits_processor=transformers.LogitsProcessorList([clock]),
    )
    steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "load_seconds": loaded - start,
        "first_token_seconds": clock.times[0] - start,
        "tokens_per_second": BATCH / median(steps),
        "memory_bytes": resident_bytes() - before,
        "tokens": tokens.tolist(),
        "stats": None if memory_budget is None else tl.stream.stats(model),
    }


def use_everything_once() -> None:
    """Loads the code that a first generation loads, which is neither time nor memory of the weights."""
    import torch
    import transformers

    import trunkline as tl

    tiny = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(tiny).save_pretrained(folder)
        model = tl.transformers.from_pretrained(folder, pack_dir=Path(folder) / "pack")
        model.generate(torch.ones(1, 1, dtype=torch.long), max_new_tokens=1, pad_token_id=0)


def resident_bytes() -> int:
    """Memory of this process; mapped weights are counted when they are used."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmRSS in /proc/self/status")


def in_a_process(model_dir: Path, memory_budget: int | None) -> Run:
    """Runs generate() where nothing else has memory."""
    command = [sys.executable, __file__, "--one", str(model_dir), str(memory_budget or 0)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    result: Run = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(directory: Path, size_bytes: int, show: Callable[[str], None]) -> dict[str, Any]:
    """Makes the model in `directory`, runs both ways, and compares the tokens. `show` gets what is done."""
    show(f"writing a Llama model of {size_bytes / 1e9:.2f} GB, random weights")
    model_dir = directory / "generating"
    weights = make_model(model_dir, size_bytes)
    budget = weights // 2
    show("generating with all weights in memory")
    whole = in_a_process(model_dir, None)
    show(f"generating within {budget / 1e9:.2f} GB; the first start writes a pack")
    in_a_process(model_dir, budget)
    show(f"generating within {budget / 1e9:.2f} GB")
    half = in_a_process(model_dir, budget)
    if half.pop("tokens") != whole.pop("tokens"):
        raise SystemExit("demo: the streamed model generates other tokens than the one in memory")
    return {"weight_bytes": weights, "budget_bytes": budget, "in_memory": whole, "streamed": half}


def table(result: dict[str, Any]) -> str:
    whole, half = result["in_memory"], result["streamed"]
    stats = half["stats"]
    lines = [f"{'':<32}{'tokens/s':>9}{'memory, GB':>12}{'loaded and first token, s':>26}"]
    for name, run in (
        ("transformers, all in memory", whole),
        (f"Trunkline within {result['budget_bytes'] / 1e9:.2f} GB", half),
    ):
        lines.append(
            f"  {name:<30}{run['tokens_per_second']:>9.1f}{run['memory_bytes'] / 1e9:>12.2f}"
            f"{run['first_token_seconds']:>26.2f}"
        )
    waited = stats["wait_seconds"] / stats["seconds"]
    hidden = "; computing hides the reading" if waited < MOST_HIDDEN else ""
    lines.append(
        f"generate: a Llama model of {result['weight_bytes'] / 1e9:.2f} GB, batch {BATCH}, one run each; "
        f"{stats['streamed_bytes'] / 1e9:.2f} GB are read for each step, and {waited:.0%} of the time is "
        f"waiting for them{hidden}"
    )
    lines.append("transformers maps its files, which are in the page cache; Trunkline reads past that")
    lines.append("checked: the same tokens both ways")
    return "\n".join(lines)


def show(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate with a model of twice the given memory.")
    parser.add_argument("--size", type=parse_size, default="600MB", help="bytes of weights (default: 600MB)")
    parser.add_argument(
        "--directory", "--dir", type=Path, default=Path(), help="where the model is written for a while"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # one way, in a process of its own
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if options.one:
        print(json.dumps(generate(Path(options.one[0]), int(options.one[1]) or None)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was written is removed
    options.directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=options.directory, prefix="larger-than-memory-") as directory:
            result = measure(Path(directory), options.size, show)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    print(json.dumps(result, indent=1) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
