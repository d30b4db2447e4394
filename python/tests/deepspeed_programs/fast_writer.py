"""Saves with FastFileWriter and through FastPersist, and loads with torch.load. Argument: the folder"""

import sys
import types
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.io import FastFileWriter, FastFileWriterConfig, fast_file_writer
from deepspeed.ops.op_builder import AsyncIOBuilder
from one_process import begin, report


class Utils:
    """DeepSpeed's op `utils`, which it does not offer on CPUs: the one function that the writer uses."""

    def load(self, verbose: bool = False) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            cast_to_byte_tensor=lambda tensors: [each.reshape(-1).view(torch.uint8) for each in tensors]
        )


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def save_with_writer(path: Path, double_buffer: bool, parallelism: int) -> bool:
    state = {
        "large": torch.arange(3_000_001, dtype=torch.float32),
        "nested": {"bf16": torch.ones(7, dtype=torch.bfloat16), "strided": torch.randn(257, 5).t()},
        "step": 3,
    }
    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, parallelism)
    memory = handle.new_cpu_locked_tensor(4 << 20, torch.empty(0, dtype=torch.uint8))
    config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=memory, double_buffer=double_buffer)
    writer = FastFileWriter(file_path=str(path), config=config)
    torch.save(state, writer)
    writer.close()
    return equal(torch.load(path), state)


def save_with_engine(folder: Path) -> tuple[str, bool]:
    begin()
    model = torch.nn.Linear(1300, 301)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "checkpoint": {"writer": {"type": "fast", "io_buffer_size": 1 << 20, "data_parallel": "replica"}},
        },
    )
    engine.backward(engine(torch.ones(1, 1300)).sum())
    engine.step()
    engine.save_checkpoint(str(folder), tag="step")
    # The part of writer 0 of 1, which is the whole.
    saved = torch.load(folder / "step/mp_rank_00_model_states.pt-0.1", weights_only=False)
    return type(engine.checkpoint_engine).__name__, equal(dict(saved["module"]), dict(model.state_dict()))


def main() -> None:
    folder = Path(sys.argv[1])
    fast_file_writer.UtilsBuilder = Utils
    writer = {
        f"{double_buffer} {parallelism}": save_with_writer(
            folder / f"{double_buffer}-{parallelism}.pt", double_buffer, parallelism
        )
        for double_buffer in (True, False)
        for parallelism in (1, 4)
    }
    engine, is_equal = save_with_engine(folder)
    report(writer=writer, engine=engine, is_equal=is_equal)


main()
