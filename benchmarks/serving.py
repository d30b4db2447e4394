"""A server's throughput with weights that do not fit into memory, beside what the disks allow.

SGLang's own benchmark (sglang.benchmark.offline_throughput, unchanged) runs with and without Trunkline's
plugin, in the environment that scripts/sglang_environment.py has made. The roofline: every token of a request
needs a pass over the weights, which all running requests share, and the disks give the weights that the
memory budget has no room for at their limit. Time in which SGLang schedules requests counts as ours.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from measurement import Comparison, interleave
from paced_disks import PacedDisks
from workbench import Disks, Workbench

sys.path.append(str(Path(__file__).resolve().parent.parent / "python/tests"))
from support_serving import find_sglang, sglang_path

SHAPE = {  # Llama's, 1.2 GB in bf16
    "vocab_size": 8000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 13,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
BUDGET = 0.15  # of the weights
REQUESTS = 8  # at a time, and in all
PROMPT, GENERATED = 8, 24  # tokens
SPARE = 300_000_000  # of the disks, beside what they must hold
SECONDS = 900.0
GOAL = 0.95
STREAMED = re.compile(r"units of the layers' weights, (\d+) bytes, are read")


def measure(bench: Workbench) -> list[Comparison]:
    case = f"{REQUESTS} requests at a time"
    python = find_sglang()
    if python is None:
        return [
            Comparison(*("serving", case, "tokens/s", "SGLang", [], []), why_not="SGLang is not installed")
        ]
    bench.free_transfer_memory()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        server = _Server(python, Path(folder))
        return [row for count in (1, len(bench.disks.directories)) for row in _on_disks(bench, server, count)]


def _on_disks(bench: Workbench, server: _Server, count: int) -> list[Comparison]:
    with _disks(bench, server.weights, count) as disks:
        disks.limit(0)
        first = server.run(disks.directories)  # packs the weights
        disks.limit(bench.limit_mb_s)

        def once() -> float:
            disks.rest()
            return server.run(disks.directories).tokens_per_second

        case = f"{count} disk{'s' if count > 1 else ''}, {REQUESTS} requests at a time"
        got = interleave(bench.rounds, {"ours": once}, f"serving, {case}", warm_up=False)["ours"]
    if not bench.limit_mb_s:
        return [Comparison(*("serving", case, "tokens/s", "the roofline"), got, [], why_not="no known limit")]
    roofline = REQUESTS * bench.limit_mb_s * 1e6 * count / first.bytes_per_pass
    peers = [roofline] * len(got)
    return [Comparison(*("serving", case, "tokens/s", "the roofline"), got, peers, at_least=GOAL)]


@contextmanager
def _disks(bench: Workbench, weights: int, count: int) -> Iterator[Disks]:
    """New disks, or the directories that the benchmark was given."""
    if not bench.limit_mb_s:
        yield bench.disks
        return
    # The first directory also holds the temporary file from which the weights are packed.
    sizes = [weights // count + SPARE + (weights if index == 0 else 0) for index in range(count)]
    with PacedDisks(sizes, limit_mb_s=0) as disks:
        yield disks


@dataclass
class _Run:
    tokens_per_second: float
    bytes_per_pass: int


class _Server:
    """A model, and SGLang's benchmark of it."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python = python
        self._model = _make_model(folder / "model")
        self._conversations = folder / "conversations.json"
        turns = [{"value": " ".join(f"w{word}" for word in range(PROMPT))}] * 2
        self._conversations.write_text(json.dumps([{"conversations": turns}] * REQUESTS))
        self._result = folder / "result.json"
        self._path = sglang_path(folder / "path")

    @property
    def weights(self) -> int:
        """Bytes."""
        return sum(path.stat().st_size for path in self._model.glob("*.safetensors"))

    def run(self, directories: list[Path]) -> _Run:
        settings = {
            "memory_budget": int(self.weights * BUDGET),
            "volumes": [str(directory) for directory in directories],
        }
        self._result.unlink(missing_ok=True)
        done = subprocess.run(
            self._command(),
            env=os.environ
            | {
                "PYTHONPATH": self._path,
                "SGLANG_USE_CPU_ENGINE": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "TRUNKLINE_LOG": "info",
                "TRUNKLINE_SGLANG": json.dumps(settings),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        streamed = STREAMED.search(done.stderr)
        if done.returncode != 0 or streamed is None or not self._result.exists():
            raise SystemExit(f"bench: SGLang failed ({done.returncode}):\n{done.stderr[-3000:]}")
        result = json.loads(self._result.read_text())
        if result["total_output_tokens"] != REQUESTS * GENERATED:
            raise SystemExit(f"bench: SGLang generated {result['total_output_tokens']} tokens")
        return _Run(float(result["output_throughput"]), int(streamed[1]))

    def _command(self) -> list[str]:
        options = {
            "--model-path": self._model,
            "--device": "cpu",
            "--dtype": "bfloat16",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--grammar-backend": "none",
            "--mem-fraction-static": 0.3,
            "--max-total-tokens": REQUESTS * (PROMPT + GENERATED + 32),
            "--max-running-requests": REQUESTS,
            "--dataset-name": "random",
            "--dataset-path": self._conversations,
            "--num-prompts": REQUESTS,
            "--random-input-len": PROMPT,
            "--random-output-len": GENERATED,
            "--random-range-ratio": 1.0,
            "--result-filename": self._result,
        }
        flags = [
            "--disable-overlap-schedule",
            "--disable-cuda-graph",
            "--disable-radix-cache",
            "--skip-warmup",
        ]
        pairs = [str(text) for pair in options.items() for text in pair]
        return [self._python, "-m", "sglang.benchmark.offline_throughput", *pairs, *flags]


def _make_model(folder: Path) -> Path:
    """Random weights, and a tokenizer that knows words such as "w17"."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, dtype="bfloat16")
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = {f"w{number}": number for number in range(SHAPE["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2").save_pretrained(folder)
    return folder
