"""Serves a model with SGLang on the CPU, and prints what it generates: run by test_sglang.py.

sglang_generate.py MODEL [OPTIONS as JSON]
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

PROMPTS = [[1, 2, 3, 4], [7, 8, 9], list(range(20, 60)), [5], [100, 101], [300] * 9]


def sampling(count: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}


def main() -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang

    options: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 512,
        "max_running_requests": 4,  # fewer than there are prompts: some wait, and come in as others end
        "chunked_prefill_size": 16,  # less than the longest prompt
        "disable_cuda_graph": True,
        "grammar_backend": "none",
        "random_seed": 0,
        "log_level": "info",
        **(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}),
    }
    engine = sglang.Engine(model_path=sys.argv[1], **options)
    lengths = [sampling(4 + 3 * index) for index in range(len(PROMPTS))]
    found = engine.generate(input_ids=PROMPTS, sampling_params=lengths)
    found += engine.generate(input_ids=PROMPTS[:2], sampling_params=sampling(16))
    print("generated:", json.dumps([each["output_ids"] for each in found]))
    engine.shutdown()


if __name__ == "__main__":
    main()
