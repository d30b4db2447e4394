"""Random 112 KiB reads (the samples of an image data set), 400 submitted at once, queue depth 32, without a
limit, beside fio randread.
"""

from __future__ import annotations

from collections.abc import Callable

import fio_peer
import numpy as np
import torch
from measurement import Comparison, interleave, spent
from workbench import DEPTH, Workbench

import trunkline as tl

SAMPLE_BYTES = 112 << 10
BATCH = 400
BATCHES = 20


def measure(bench: Workbench) -> list[Comparison]:
    path = bench.first / "random"
    bench.disks.limit(0)
    with tl.open(path, "w") as file:
        file.pwrite(bench.source)
        file.sync()
    count = bench.bytes // SAMPLE_BYTES
    expected = bench.source[: count * SAMPLE_BYTES].view(count, SAMPLE_BYTES)
    targets = tl.torch.empty_pinned((BATCH, SAMPLE_BYTES), torch.uint8)
    generator = np.random.default_rng(3)

    def ours(engine: tl.Engine) -> Callable[[], float]:
        def once() -> float:
            batches = [generator.integers(0, count, BATCH).tolist() for _ in range(BATCHES)]
            with tl.open(path, engine=engine) as file:
                rows = list(targets)
                with spent() as time:
                    for batch in batches:
                        reads = [
                            tl.Read(file, row, SAMPLE_BYTES * sample)
                            for row, sample in zip(rows, batch, strict=True)
                        ]
                        tl.wait_all(engine.submit(reads))
            if not torch.equal(targets, expected[batches[-1]]):
                raise SystemExit("engine: a random read brought other bytes than were written")
            return BATCH * BATCHES * SAMPLE_BYTES / time.seconds / 1e9

        return once

    def fio() -> float:
        total = BATCH * BATCHES * SAMPLE_BYTES
        run = fio_peer.run(
            *([path], "randread"),
            block_bytes=SAMPLE_BYTES,
            depth=DEPTH,
            engine=bench.fio_engine,
            total_bytes=total,
            randrepeat=0,
            norandommap=1,
        )
        return run.bytes_per_second / 1e9

    with tl.Engine(lanes=1, queue_depth=DEPTH) as one_lane:
        ways = {"one lane": ours(one_lane), "default engine": ours(tl.default_engine()), "fio": fio}
        got = interleave(bench.rounds, ways, "random")
    path.unlink()
    case = f"batch of {BATCH} x 112 KiB"
    peer = f"fio randread, depth {DEPTH}"
    return [
        Comparison(
            "random",
            f"{case}, one lane, depth {DEPTH}",
            "GB/s",
            peer,
            got["one lane"],
            got["fio"],
            at_least=0.95,
        ),
        Comparison("random", f"{case}, default engine", "GB/s", peer, got["default engine"], got["fio"]),
    ]
