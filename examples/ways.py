"""The ways to load and save a model that the demo compares. Each loads every tensor and returns them by name,
or writes them to new, durable files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

import trunkline as tl

Tensors = dict[str, torch.Tensor]
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Entry:
    """One tensor in a safetensors file."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    begin: int  # bytes from the file's start
    end: int


def parse_header(file: tl.File) -> tuple[bytes, list[Entry]]:
    """The file's head as it is (length and JSON), and its tensors in the order of their bytes.

    https://huggingface.co/docs/safetensors: 8 bytes of length, little-endian, then so many bytes of JSON,
    then data.
    """
    length = bytearray(8)
    file.pread(length, 0)
    text = bytearray(int.from_bytes(length, "little"))
    file.pread(text, 8)
    start = 8 + len(text)
    entries = [
        Entry(
            name,
            DTYPES[about["dtype"]],
            about["shape"],
            *(start + offset for offset in about["data_offsets"]),
        )
        for name, about in json.loads(text).items()
        if name != "__metadata__"
    ]
    return bytes(length + text), sorted(entries, key=lambda entry: entry.begin)


def view(memory: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor of `entry` within the bytes of its whole file; nothing is copied."""
    return memory[entry.begin : entry.end].view(entry.dtype).view(entry.shape)


# -------------------------------------------------------------------------------------------------- Trunkline


def load_folder(folder: Path) -> Tensors:
    """All shards at once; large tensors land in pages of their own without a copy."""
    tensors: Tensors = tl.load(folder)
    return tensors


def load_pt(path: Path) -> Tensors:
    """Every byte is compared with the CRC-32 in the file."""
    tensors: Tensors = tl.load(path)
    return tensors


@dataclass(frozen=True)
class Image:
    """One shard in memory: its head, and its tensors in the order of the file."""

    name: str
    memory: torch.Tensor  # page-aligned: the whole file's bytes, head included
    head: bytes
    entries: list[Entry]


def load_images(files: Sequence[Path]) -> list[Image]:
    """What saving starts from, and what reload() fills again."""
    images = []
    for path in files:
        with tl.open(path) as file:
            head, entries = parse_header(file)
            memory = tl.torch.empty_pinned((file.size,), torch.uint8)
            file.pread(memory, 0)
        images.append(Image(path.name, memory, head, entries))
    return images


def reload(images: Sequence[Image], files: Sequence[Path]) -> Tensors:
    """One read a file into the memory of `images`: what a server does that changes weights in place. A file
    lies in memory as it lies on disk, head included, so that the device writes straight into the tensors.
    """
    with ExitStack() as opened:
        reads = []
        for image, path in zip(images, files, strict=True):
            file = opened.enter_context(tl.open(path))
            parse_header(file)  # its work belongs to a load, although the images know the result
            reads.append(tl.Read(file, image.memory, 0))
        tl.wait_all(tl.default_engine().submit(reads))
    return {entry.name: view(image.memory, entry) for image in images for entry in image.entries}


def save(tensors: Tensors, path: Path) -> None:
    """To the format that the suffix names, with checksums; durable when it returns."""
    tl.save(tensors, path)


def save_checkpoint(tensors: Tensors, checkpointer: tl.Checkpointer, step: int) -> None:
    """As one step of a directory of checkpoints."""
    checkpointer.save(step, tensors, block=True)


# ----------------------------------------------------------------------------------------------------- others


def load_safetensors(files: Sequence[Path]) -> Tensors:
    tensors: Tensors = {}
    for path in files:
        tensors |= safetensors.torch.load_file(path)
    return tensors


def load_torch(path: Path) -> Tensors:
    tensors: Tensors = torch.load(path, weights_only=True)
    return tensors


def save_safetensors(tensors: Tensors, path: Path) -> None:
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_torch(tensors: Tensors, path: Path) -> None:
    torch.save(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def load_python(files: Sequence[Path]) -> Tensors:
    tensors: Tensors = {}
    for path in files:
        with path.open("rb", buffering=0) as raw:
            memory = torch.empty(path.stat().st_size, dtype=torch.uint8)
            target = memory.numpy().data
            filled = 0
            while filled < len(target):
                filled += raw.readinto(target[filled:]) or 0
        with tl.open(path, direct="never") as file:
            tensors |= {entry.name: view(memory, entry) for entry in parse_header(file)[1]}
    return tensors


def save_python(images: Sequence[Image], directory: Path) -> None:
    for image in images:
        with (directory / image.name).open("wb") as file:
            file.write(image.memory.numpy().data)
            file.flush()
            os.fsync(file.fileno())
