"""Generates tokens, with ZeRO-Inference or without. Arguments: none or nvme, the folder, the model"""

import sys
from typing import Any

import torch
import transformers
from one_process import begin, files_below, report

PROMPT = torch.tensor([[1, 2, 3, 4], [7, 7, 9, 11]])


def configuration(folder: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1,
            "stage3_prefetch_bucket_size": 1_000_000,
            "offload_param": {
                "device": "nvme",
                "nvme_path": folder,
                "buffer_count": 8,
                "buffer_size": 3_000_000,
            },
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16},
    }


def main() -> None:
    device, folder, path = sys.argv[1:]
    kept: Any = None  # transformers looks for it as long as it exists
    if device == "nvme":
        begin()
        kept = transformers.integrations.HfDeepSpeedConfig(configuration(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    if device == "nvme":
        import deepspeed

        model = deepspeed.initialize(model=model, config=kept.config)[0].module
    model.eval()
    with torch.no_grad():
        tokens = model.generate(PROMPT, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    report(tokens=tokens.tolist(), files=files_below(folder))


main()
