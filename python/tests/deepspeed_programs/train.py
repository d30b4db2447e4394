"""Trains a small model with ZeRO-3, bf16. Arguments: cpu or nvme, the folder, whether to pipeline (0, 1)"""

import sys
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from one_process import begin, files_below, report

WIDTH, BATCH, STEPS = 768, 8, 12  # a weight has 1.2 MB: DeepSpeed swaps none below 1 MiB


def configuration(device: str, folder: str, pipelined: bool) -> dict[str, Any]:
    optimizer: dict[str, Any] = {"device": device}
    parameters: dict[str, Any] = {"device": device}
    if device == "nvme":
        optimizer |= {"nvme_path": folder, "buffer_count": 12}
        optimizer |= {"pipeline_read": pipelined, "pipeline_write": pipelined}
        parameters |= {"nvme_path": folder, "buffer_count": 8, "buffer_size": 1_000_000}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        # Its own CPU Adam is compiled for minutes, and has no part in I/O.
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": optimizer,
            "offload_param": parameters,
            "sub_group_size": 700_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1,
            "stage3_prefetch_bucket_size": 600_000,
        },
        "aio": {"block_size": 131_072, "queue_depth": 16, "intra_op_parallelism": 2},
    }


def main() -> None:
    device, folder, pipelined = sys.argv[1:]
    begin()
    torch.manual_seed(0)
    hidden = [each for _ in range(4) for each in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(WIDTH, 8))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=configuration(device, folder, pipelined == "1"),
    )
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * BATCH, WIDTH, generator=generator).bfloat16()
    targets = torch.randn(8 * BATCH, 8, generator=generator)
    losses = []
    for step in range(STEPS):
        batch = slice(step % 8 * BATCH, (step % 8 + 1) * BATCH)
        loss = torch.nn.functional.mse_loss(engine(inputs[batch]).float(), targets[batch])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    module = AsyncIOBuilder().load().__name__ if device == "nvme" else ""
    report(losses=losses, module=module, files=files_below(folder))


main()
