"""The ways to load and save safetensors files that the demo compares. Each loads every tensor of `files` and
returns them by name, or writes `tensors` to new, durable files of the same layout.
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


def load_pinned(files: Sequence[Path]) -> Tensors:
    """One read a file into page-aligned memory. A file lies in memory as it lies on disk, head included, so
    address and offset are aligned alike and the device writes straight into the tensors.
    """
    engine = tl.default_engine()
    tensors: Tensors = {}
    futures = []
    with ExitStack() as opened:
        for path in files:
            file = opened.enter_context(tl.open(path))
            _, entries = parse_header(file)
            memory = tl.torch.empty_pinned((file.size,), torch.uint8)
            # Submitted at once: while these bytes arrive, the next file's memory is made.
            futures += engine.submit([tl.Read(file, memory, 0)])
            tensors |= {entry.name: view(memory, entry) for entry in entries}
        tl.wait_all(futures)
    return tensors


def load_ordinary(files: Sequence[Path]) -> Tensors:
    """One read a tensor, all of a file in one batch, into memory that torch allocated: any address, any
    offset.
    """
    engine = tl.default_engine()
    tensors: Tensors = {}
    futures = []
    with ExitStack() as opened:
        for path in files:
            file = opened.enter_context(tl.open(path))
            reads = []
            for entry in parse_header(file)[1]:
                tensors[entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
                reads.append(tl.Read(file, tensors[entry.name], entry.begin))
            futures += engine.submit(reads)
        tl.wait_all(futures)
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
    """As load_pinned, into the memory of `images`: what a server does that changes weights in place."""
    with ExitStack() as opened:
        reads = []
        for image, path in zip(images, files, strict=True):
            file = opened.enter_context(tl.open(path))
            parse_header(file)  # its work belongs to a load, although the images know the result
            reads.append(tl.Read(file, image.memory, 0))
        tl.wait_all(tl.default_engine().submit(reads))
    return {entry.name: view(image.memory, entry) for image in images for entry in image.entries}


def save_pinned(images: Sequence[Image], directory: Path) -> None:
    """One write a file, all under way together, then one sync a file."""
    with ExitStack() as opened:
        targets = [opened.enter_context(tl.open(directory / image.name, "w")) for image in images]
        writes = [tl.Write(target, image.memory, 0) for target, image in zip(targets, images, strict=True)]
        tl.wait_all(tl.default_engine().submit(writes))
        for target in targets:
            target.sync()


def save_ordinary(images: Sequence[Image], tensors: Tensors, directory: Path) -> None:
    """One write a tensor from wherever it is, all in one batch."""
    with ExitStack() as opened:
        targets = [opened.enter_context(tl.open(directory / image.name, "w")) for image in images]
        writes = []
        for target, image in zip(targets, images, strict=True):
            writes.append(tl.Write(target, image.head, 0))
            writes += [tl.Write(target, tensors[entry.name], entry.begin) for entry in image.entries]
        tl.wait_all(tl.default_engine().submit(writes))
        for target in targets:
            target.sync()


# ----------------------------------------------------------------------------------------------------- others


def load_safetensors(files: Sequence[Path]) -> Tensors:
    tensors: Tensors = {}
    for path in files:
        tensors |= safetensors.torch.load_file(path)
    return tensors


def save_safetensors(images: Sequence[Image], directory: Path) -> None:
    for image in images:
        path = directory / image.name
        named = {entry.name: view(image.memory, entry) for entry in image.entries}
        safetensors.torch.save_file(named, path, {"format": "pt"})
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
