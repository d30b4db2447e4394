"""Train a small language model on windows of one flat file of tokens, and resume it with the very next batch.

    python examples/token_training.py --directory run

The file holds nothing but token ids of 16 bits, as numpy.memmap reads them. A sample is a window of them.
Where the windows are follows from two numbers, so an index takes no memory, however many windows there are.
"""

import argparse
from pathlib import Path

import numpy
import torch
from torch import nn

import trunkline as tl

VOCABULARY = 64
TOKENS = 50_000
CONTEXT = 32  # tokens that the model sees; a window has one more, as the target of the last


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, required=True, help="of the tokens and the checkpoints")
    parser.add_argument("--steps", type=int, default=60, help="of the whole training")
    parser.add_argument("--batch", type=int, default=32, help="windows of a step")
    parser.add_argument(
        "--stride",
        type=int,
        default=CONTEXT,
        help="tokens from the start of a window to the next start",
    )
    return parser.parse_args()


def make_tokens(path: Path) -> None:
    """Write token ids, each of which depends on the one before, with some chance."""
    chance = numpy.random.default_rng(0)
    steps = chance.choice([1, 2, 5], size=TOKENS, p=[0.8, 0.1, 0.1])
    (numpy.cumsum(steps) % VOCABULARY).astype(numpy.uint16).tofile(path)


class NextToken(nn.Module):
    """Predicts each token from the ones before it, with a recurrent layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return self.output(hidden)


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.directory.mkdir(parents=True, exist_ok=True)
    path = options.directory / "tokens.bin"
    if not path.exists():
        make_tokens(path)

    token = numpy.dtype(numpy.uint16)
    index = tl.data.index(
        path,
        format="records",
        record_bytes=token.itemsize * (CONTEXT + 1),
        stride_bytes=token.itemsize * options.stride,
    )
    print(index)
    loader = tl.data.Loader(index, options.batch)

    torch.manual_seed(0)
    model = NextToken().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    checkpoints = tl.Checkpointer(options.directory / "checkpoints", keep=2)
    step = 0
    if checkpoints.latest() is not None:
        state = checkpoints.load()
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        print(f"resumed after step {step}, in epoch {loader.epoch}")

    while step < options.steps:
        for batch in loader:  # an epoch; after load_state_dict, what is left of one
            step += 1
            # astype copies, so that the loader has its buffer back when the next batch comes.
            windows = torch.from_numpy(batch.array(token).astype(numpy.int64)).to(device)
            logits = model(windows[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.9g}", flush=True)
            state = {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": loader.state_dict(),  # after the batch that this step used
            }
            checkpoints.save(step, state).wait_staged()
            if step >= options.steps:
                break
    checkpoints.wait()


if __name__ == "__main__":
    main()
