"""Train a small GPT-2 by Hugging Face's Trainer, with checkpoints saved in the background.

    python examples/hf_trainer.py --directory run
    python -m torch.distributed.run --nproc-per-node 2 examples/hf_trainer.py --directory run

Nothing is downloaded: weights are random, and so are the sequences, each a number and its multiples. Started
again it goes on after the last checkpoint.
"""

import argparse
from pathlib import Path

import torch
import transformers

import trunkline as tl

VOCABULARY = 97


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, required=True, help="of the run")
    parser.add_argument("--steps", type=int, default=100, help="of the whole training")
    parser.add_argument("--save-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="stop early, to be started again")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    return parser.parse_args()


def make_samples(count: int, length: int = 16) -> list[dict[str, torch.Tensor]]:
    numbers = torch.randint(1, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(1))
    rows = numbers * torch.arange(1, length + 1) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


class StopAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def main() -> None:
    options = parse_options()
    transformers.set_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=options.hidden, n_layer=2, n_head=4
        )
    )
    trainer = tl.transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            str(options.directory),
            max_steps=options.steps,
            save_steps=options.save_every,
            save_total_limit=3,
            logging_steps=1,
            per_device_train_batch_size=8,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),  # without it, ranks without a GPU do not find each other
        ),
        train_dataset=make_samples(256),
        callbacks=[StopAfter(options.stop_after)] if options.stop_after else [],
    )
    last = trainer.checkpointer.latest()
    if last is not None and trainer.is_world_process_zero():
        print(f"resumed after step {last}", flush=True)
    trainer.train(resume_from_checkpoint=last is not None)


if __name__ == "__main__":
    main()
