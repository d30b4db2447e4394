"""Samples at random places of files, read as a training reads them, and compared with the files."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy

import trunkline as tl

SAMPLE_BYTES = 100_000
BATCH = 100
RUNS = 3


def check(loader: tl.data.Loader) -> None:
    """Compare all samples of an epoch with the files."""
    index = loader.index
    files = [numpy.memmap(path, numpy.uint8, "r") for path in index.paths]
    firsts = numpy.cumsum([0, *(file.size // SAMPLE_BYTES for file in files)])
    for batch in loader:
        for sample, number in zip(batch.array(), batch.indices.tolist(), strict=True):
            file = int(numpy.searchsorted(firsts, number, side="right")) - 1
            begin = (number - int(firsts[file])) * SAMPLE_BYTES
            if not numpy.array_equal(sample, files[file][begin : begin + SAMPLE_BYTES]):
                raise SystemExit(f"demo: sample {number} differs from byte {begin} of {index.paths[file]}")


def measure(files: list[Path], forget: Callable[[list[Path]], None]) -> dict[str, object]:
    """Return the rates of whole epochs, each in another order, in GB/s.

    `forget`: drops files from the page cache, as it does before each epoch. There are no samples if all files
    are shorter than one.
    """
    index = tl.data.index(files, format="records", record_bytes=SAMPLE_BYTES, stride_bytes=SAMPLE_BYTES)
    facts: dict[str, object] = {"samples": len(index), "sample_bytes": SAMPLE_BYTES, "batch": BATCH}
    if len(index) == 0:
        return facts
    check(tl.data.Loader(index, BATCH))
    rates = []
    for seed in range(RUNS):
        forget(files)
        start = time.perf_counter()
        read = 0
        with tl.data.Loader(index, BATCH, seed=seed) as loader:
            for batch in loader:
                read += int(batch.lengths.sum())
            rates.append(read / (time.perf_counter() - start) / 1e9)
    return {**facts, "gb_s": rates, "median_gb_s": statistics.median(rates)}


def line(facts: dict[str, object]) -> str:
    if "median_gb_s" not in facts:
        return "samples: the files are too short for one"
    return (
        f"training samples: {facts['samples']} of 100 kB in random order, batches of {BATCH}, "
        f"by tl.data.Loader: {facts['median_gb_s']:.2f} GB/s "
        f"(cold, median of {RUNS} epochs; every byte compared)"
    )
