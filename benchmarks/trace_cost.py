#!/usr/bin/env python3
"""What recording a trace costs: blocking reads from the page cache, with and without one.

    python benchmarks/trace_cost.py [--rounds 40] [--json]

Times are CPU times of the reading thread, which moves all of the bytes itself: they hardly change with what
else the machine does. Rounds with and without a trace alternate, in changing order, and each pair is
compared: the median of the ratios is what is reported, beside its quartiles. Two rounds without a trace are
compared in the same way ("noise"): what the machine itself does to such a ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import trunkline as tl

SIZES = {"4 KiB": 4096, "1 MiB": 1 << 20}
BYTES_A_ROUND = {4096: 64 << 20, 1 << 20: 1 << 30}
FILE_BYTES = 32 << 20


def reads(file: tl.File, nbytes: int) -> Callable[[], float]:
    """Return a function that reads what a round reads, and returns the seconds that took."""
    buffer = tl.pinned_empty(nbytes)
    count = BYTES_A_ROUND[nbytes] // nbytes
    offsets = [index * nbytes % FILE_BYTES for index in range(count)]

    def measure() -> float:
        began = time.thread_time()
        for offset in offsets:
            file.pread(buffer, offset)
        return time.thread_time() - began

    return measure


def compare(measure: Callable[[], float], trace: Path, rounds: int) -> dict[str, float]:
    """Ratios of the times with a trace to those without, and of two without."""
    traced: list[float] = []
    noise: list[float] = []
    seconds: list[float] = []

    def one(is_traced: bool) -> float:
        with tl.trace(trace) if is_traced else nullcontext():
            return measure()

    measure()
    for index in range(rounds):
        order = (True, False, False) if index % 2 else (False, False, True)
        times = [(is_traced, one(is_traced)) for is_traced in order]
        plain = [each for is_traced, each in times if not is_traced]
        traced.append(next(each for is_traced, each in times if is_traced) / plain[index % 2 - 1])
        noise.append(plain[1] / plain[0])
        seconds += plain
    quartiles = statistics.quantiles(traced, n=4)
    return {
        "ratio": statistics.median(traced),
        "ratio_lower_quartile": quartiles[0],
        "ratio_upper_quartile": quartiles[2],
        "noise_ratio": statistics.median(noise),
        "seconds_off": statistics.median(seconds),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        data = Path(folder) / "data"
        data.write_bytes(bytes(FILE_BYTES))
        with tl.open(data, direct="never") as file:
            for name, nbytes in SIZES.items():
                result = compare(reads(file, nbytes), Path(folder) / "trace.json", options.rounds)
                result["microseconds_off"] = (
                    result.pop("seconds_off") / (BYTES_A_ROUND[nbytes] // nbytes) * 1e6
                )
                results[name] = result
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for name, result in results.items():
        print(
            f"{name} reads, page cache: {result['microseconds_off']:.2f} us each without a trace; with one "
            f"{100 * (result['ratio'] - 1):+.1f} % ({100 * (result['ratio_lower_quartile'] - 1):+.1f} to "
            f"{100 * (result['ratio_upper_quartile'] - 1):+.1f}); noise "
            f"{100 * (result['noise_ratio'] - 1):+.1f} %"
        )


if __name__ == "__main__":
    main()
