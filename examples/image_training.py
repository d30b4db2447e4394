"""Train a small network on images in folders, and continue after an interruption with the very next batch.

    python examples/image_training.py --directory run

The images are made first, in a folder for each class. Pillow decodes them in threads while the network trains
on the batch before. Each checkpoint holds the model, the optimizer and the position in the data. Started
again, the program continues with the batches that an uninterrupted run would have had.
"""

import argparse
import io
import random
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageDraw
from torch import nn

import trunkline as tl

CLASSES = ("circle", "cross", "square")
IMAGES_PER_CLASS = 60
SIZE = 32  # pixels, of the images that the network gets


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, required=True, help="of the images and the checkpoints")
    parser.add_argument("--steps", type=int, default=40, help="of the whole training")
    parser.add_argument("--batch", type=int, default=16, help="images of a step")
    return parser.parse_args()


def draw(kind: str, chance: random.Random) -> Image.Image:
    """Draw a shape in some color, size and place."""
    size = chance.randint(40, 64)
    image = Image.new("RGB", (size, size), tuple(chance.randrange(80) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    color = tuple(chance.randrange(120, 256) for _ in range(3))
    left, top, side = chance.randint(2, 10), chance.randint(2, 10), chance.randint(20, 28)
    box = (left, top, left + side, top + side)
    if kind == "circle":
        pen.ellipse(box, fill=color)
    elif kind == "square":
        pen.rectangle(box, fill=color)
    else:
        pen.line(box, fill=color, width=5)
        pen.line((left, top + side, left + side, top), fill=color, width=5)
    return image


def make_images(folder: Path) -> None:
    """Write images as they are usually kept: folder/class/name.jpg."""
    chance = random.Random(0)
    for kind in CLASSES:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for number in range(IMAGES_PER_CLASS):
            draw(kind, chance).save(folder / kind / f"{number:04}.jpg")


def decode(data: memoryview) -> torch.Tensor:
    """Return the image as a tensor of float32 (3, SIZE, SIZE), from 0 to 1."""
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((SIZE, SIZE))
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(len(CLASSES)),
    )


def main() -> None:
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = options.directory / "images"
    if not images.exists():
        make_images(images)

    index = tl.data.index(images)
    print(index, "classes:", ", ".join(index.classes))
    loader = tl.data.Loader(
        index, options.batch, decode=decode, labels=True, collate=collate, device=device, drop_last=True
    )

    torch.manual_seed(0)
    model = make_model().to(device)
    model(torch.zeros(1, 3, SIZE, SIZE, device=device))  # gives the lazy layer its shape
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
        for pictures, labels in loader:  # an epoch; after load_state_dict, what is left of one
            step += 1
            loss = nn.functional.cross_entropy(model(pictures), labels)
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
