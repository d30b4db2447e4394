"""Train a small network on TFRecord files, without TensorFlow.

    python examples/tfrecord_training.py --directory data

Two files are made first. Each record is a tf.train.Example, with a feature "values" of floats and a feature
"label". Samples are shuffled over all files: no shuffle buffer is needed. The checksum of each record is
verified when the record is read.
"""

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import nn

import trunkline as tl

FILES = 2
RECORDS_PER_FILE = 150
FEATURES = 16


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, required=True, help="of the TFRecord files")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="records of a step")
    return parser.parse_args()


# A tf.train.Example is a Protocol Buffers message. This is enough of that format to read and write one; where
# TensorFlow is installed, tf.train.Example.FromString(bytes(record)) does the same.


def varint(data: bytes, place: int) -> tuple[int, int]:
    """Return the number at `place`, and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and contents of the fields of a message, all of which must have a length."""
    place = 0
    while place < len(message):
        tag, place = varint(message, place)
        if tag & 7 != 2:
            raise ValueError(f"a field has wire type {tag & 7}, which this program does not write")
        length, place = varint(message, place)
        yield tag >> 3, message[place : place + length]
        place += length


def field(number: int, contents: bytes) -> bytes:
    """Return a field, as fields() reads it."""
    length, head = len(contents), bytearray([number << 3 | 2])
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes(head) + bytes([length]) + contents


def encode(values: numpy.ndarray, label: int) -> bytes:
    floats = field(2, field(1, values.astype("<f4").tobytes()))  # a FloatList
    integers = field(3, field(1, bytes([label])))  # an Int64List of a number below 128
    entries = [field(1, key) + field(2, value) for key, value in ((b"values", floats), (b"label", integers))]
    return field(1, b"".join(field(1, entry) for entry in entries))


def decode(record: memoryview) -> tuple[torch.Tensor, int]:
    """Return the values and the label of a tf.train.Example."""
    [(_, features)] = fields(bytes(record))
    found = {}
    for _, entry in fields(features):
        key, value = (contents for _, contents in fields(entry))
        [(_, of_one_type)] = fields(value)
        [(_, found[key])] = fields(of_one_type)
    values = torch.from_numpy(numpy.frombuffer(found[b"values"], "<f4").copy())
    return values, varint(found[b"label"], 0)[0]


def crc32c(data: bytes) -> int:
    """Compute the checksum of TFRecord files bit by bit, which is fast enough for a few records."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> bytes:
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def make_files(folder: Path) -> None:
    """Write samples of two classes: the sum of their values is positive, or not."""
    chance = numpy.random.default_rng(0)
    folder.mkdir(parents=True)
    for file in range(FILES):
        with (folder / f"train-{file:05}-of-{FILES:05}.tfrecord").open("wb") as out:
            for _ in range(RECORDS_PER_FILE):
                values = chance.standard_normal(FEATURES)
                data = encode(values, int(values.sum() > 0))
                length = struct.pack("<Q", len(data))
                out.write(length + masked(crc32c(length)) + data + masked(crc32c(data)))


def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    values, labels = zip(*samples, strict=True)
    return torch.stack(values), torch.tensor(labels)


def main() -> None:
    options = parse_options()
    if not options.directory.exists():
        make_files(options.directory)
    index = tl.data.index(options.directory)
    print(index)
    loader = tl.data.Loader(index, options.batch, decode=decode, collate=collate)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    while step < options.steps:
        for values, labels in loader:  # an epoch
            step += 1
            loss = nn.functional.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.9g}", flush=True)
            if step >= options.steps:
                break


if __name__ == "__main__":
    main()
