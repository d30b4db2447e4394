"""Random 112 KiB reads (the samples of an image data set), 400 submitted at once, queue depth 32, without a
limit, beside fio randread.

How much memory the bytes go to decides as much as how they are read: batches of 400 samples (46 MB each)
are more than a processor's cache, fio's 32 buffers are less. And who awaits a batch before the next lets the
disk run dry for a moment. So each case has a peer in the same mode: one batch at a time beside fio that
sends 400 when the last 400 are there; the next batch under way beside fio with 400 always in flight; a few
targets used in turn beside fio with its 32 buffers. "In one call" is one operation for a batch (read_ranges)
instead of a request for each sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import fio_peer
import numpy as np
import torch
from measurement import Comparison, interleave, spent
from workbench import DEPTH, Workbench

import trunkline as tl

SAMPLE_BYTES = 112 << 10
BATCH = 400
BATCHES = 40
# Targets used in turn: reads begin in order, at most DEPTH at once, so each is free when its turn comes.
FEW = DEPTH + 8


class Samples:
    """A file of samples, and the ways to read batches of them."""

    def __init__(self, bench: Workbench) -> None:
        self.path = bench.first / "random"
        bench.disks.limit(0)
        with tl.open(self.path, "w") as file:
            file.pwrite(bench.source)
            file.sync()
        self.bench = bench
        self.count = bench.bytes // SAMPLE_BYTES
        self.expected = bench.source[: self.count * SAMPLE_BYTES].view(self.count, SAMPLE_BYTES)
        self.memory = tl.torch.empty_pinned((2, BATCH, SAMPLE_BYTES), torch.uint8)
        self.generator = np.random.default_rng(3)

    def batches(self) -> list[list[int]]:
        """The samples of one run; what memory held before is gone."""
        self.memory.zero_()
        return [self.generator.integers(0, self.count, BATCH).tolist() for _ in range(BATCHES)]

    def check(self, batches: list[list[int]], targets: int, under_way: int) -> None:
        for number in range(BATCHES - under_way, BATCHES):
            last = self.memory[number % under_way][[n % targets for n in range(BATCH - targets, BATCH)]]
            if not torch.equal(last, self.expected[batches[number][-targets:]]):
                raise SystemExit("engine: a random read brought other bytes than were written")

    def ours(self, engine: tl.Engine, targets: int = BATCH, under_way: int = 1) -> Callable[[], float]:
        """A request for each sample. With `under_way` 2, a batch is submitted before the last is awaited."""

        def once() -> float:
            batches = self.batches()
            with tl.open(self.path, engine=engine) as file:
                rows = [[self.memory[k, n % targets] for n in range(BATCH)] for k in range(under_way)]
                pending: deque[list[tl.Future]] = deque()
                with spent() as time:
                    for number, batch in enumerate(batches):
                        reads = [
                            tl.Read(file, row, SAMPLE_BYTES * sample)
                            for row, sample in zip(rows[number % under_way], batch, strict=True)
                        ]
                        pending.append(engine.submit(reads))
                        if len(pending) == under_way:
                            tl.wait_all(pending.popleft())
                    for futures in pending:
                        tl.wait_all(futures)
            self.check(batches, targets, under_way)
            return BATCH * BATCHES * SAMPLE_BYTES / time.seconds / 1e9

        return once

    def ours_in_one_call(self, engine: tl.Engine, under_way: int = 1) -> Callable[[], float]:
        """async_read_ranges() for each batch, which reads in the order of the offsets."""

        def once() -> float:
            batches = self.batches()
            with tl.open(self.path, engine=engine) as file:
                pending: deque[tl.Future] = deque()
                with spent() as time:
                    for number, batch in enumerate(batches):
                        offsets = np.array(batch, np.int64) * SAMPLE_BYTES
                        target = self.memory[number % under_way]
                        pending.append(file.async_read_ranges(target, offsets, SAMPLE_BYTES))
                        if len(pending) == under_way:
                            pending.popleft().result()
                    for future in pending:
                        future.result()
            self.check(batches, BATCH, under_way)
            return BATCH * BATCHES * SAMPLE_BYTES / time.seconds / 1e9

        return once

    def fio(self, depth: int, at_once: int = 1) -> float:
        run = fio_peer.run(
            *([self.path], "randread"),
            block_bytes=SAMPLE_BYTES,
            depth=depth,
            engine=self.bench.fio_engine,
            total_bytes=BATCH * BATCHES * SAMPLE_BYTES,
            randrepeat=0,
            norandommap=1,
            iodepth_batch=at_once,
            iodepth_low=depth if at_once == 1 else 1,  # what is left in flight when the next are sent
        )
        return run.bytes_per_second / 1e9


def measure(bench: Workbench) -> list[Comparison]:
    samples = Samples(bench)
    with tl.Engine(lanes=1, queue_depth=DEPTH) as one_lane:
        ways = {
            "fio": lambda: samples.fio(DEPTH),
            "few": samples.ours(one_lane, FEW, under_way=2),
            "fio batches": lambda: samples.fio(BATCH, at_once=BATCH),
            "one batch": samples.ours(one_lane),
            "one batch, one call": samples.ours_in_one_call(one_lane),
            "fio 400": lambda: samples.fio(BATCH),
            "two batches": samples.ours(one_lane, under_way=2),
            "two batches, one call": samples.ours_in_one_call(one_lane, under_way=2),
            "default engine": samples.ours(tl.default_engine(), under_way=2),
        }
        got = interleave(bench.rounds, ways, "random")
    samples.path.unlink()

    fios = {
        "fio": f"fio randread, depth {DEPTH}",
        "fio 400": f"fio randread, depth {BATCH}",
        "fio batches": f"fio randread, {BATCH} at once",
    }

    def row(name: str, text: str, peer: str, at_least: float | None = None) -> Comparison:
        case = f"{BATCH} x 112 KiB, {text}"
        return Comparison("random", case, "GB/s", fios[peer], got[name], got[peer], at_least=at_least)

    return [
        row("one batch, one call", f"batch after batch, in one call, depth {DEPTH}", "fio batches", 0.95),
        row("two batches, one call", f"next batch under way, in one call, depth {DEPTH}", "fio 400", 0.95),
        row("one batch", f"batch after batch, depth {DEPTH}", "fio batches", 0.95),
        row("two batches", f"next batch under way, depth {DEPTH}", "fio 400", 0.95),
        row("few", f"into {FEW} targets, depth {DEPTH}", "fio", 0.95),
        row("one batch", f"batch after batch, depth {DEPTH}", "fio"),
        row("default engine", "next batch under way, default engine", "fio 400"),
    ]
