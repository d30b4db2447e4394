"""Train a small network on WebDataset archives, without the webdataset package.

    python examples/webdataset_training.py --directory data

Two .tar files are made first, with an image (.png) and a class (.cls) for each sample. Samples are shuffled
over all archives: no shuffle buffer is needed, and every epoch has every sample once.
"""

import argparse
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import nn

import trunkline as tl

ARCHIVES = 2
SAMPLES_PER_ARCHIVE = 100
SIZE = 16  # pixels


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, required=True, help="of the archives")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=20, help="samples of a step")
    return parser.parse_args()


def make_archives(folder: Path) -> None:
    """Write gray images of two classes: brighter at the left, or at the right."""
    chance = numpy.random.default_rng(0)
    folder.mkdir(parents=True)
    for archive in range(ARCHIVES):
        with tarfile.open(folder / f"train-{archive:06}.tar", "w") as out:
            for number in range(SAMPLES_PER_ARCHIVE):
                label = int(chance.integers(2))
                pixels = chance.integers(0, 160, (SIZE, SIZE), dtype=numpy.uint8)
                half = slice(SIZE // 2) if label == 0 else slice(SIZE // 2, SIZE)
                pixels[:, half] += 60
                png = io.BytesIO()
                Image.fromarray(pixels).save(png, "png")
                for suffix, data in (("png", png.getvalue()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{archive:02}{number:06}.{suffix}")
                    member.size = len(data)
                    out.addfile(member, io.BytesIO(data))


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return image and class. A sample has a view of each member's bytes by its suffix, and its "__key__"."""
    image = numpy.array(Image.open(io.BytesIO(sample["png"])))
    return torch.from_numpy(image).float() / 255, int(bytes(sample["cls"]))


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def main() -> None:
    options = parse_options()
    if not options.directory.exists():
        make_archives(options.directory)
    index = tl.data.index(options.directory)
    print(index)
    loader = tl.data.Loader(index, options.batch, decode=decode, collate=collate)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    while step < options.steps:
        for images, labels in loader:  # an epoch
            step += 1
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.9g}", flush=True)
            if step >= options.steps:
                break


if __name__ == "__main__":
    main()
