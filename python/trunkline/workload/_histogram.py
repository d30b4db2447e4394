"""Histograms of durations: (largest nanoseconds, count) of each bucket, ascending."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

Histogram = Sequence[tuple[int, int]]
_PERCENTS = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}


def merged(histograms: Iterable[Histogram]) -> list[tuple[int, int]]:
    """Return the exact sum of histograms."""
    counts: Counter[int] = Counter()
    for histogram in histograms:
        for upper, count in histogram:
            counts[upper] += count
    return sorted(counts.items())


def percentile_seconds(histogram: Histogram, percent: float) -> float:
    """Return the duration that `percent` of all did not exceed; 0 without any."""
    rank = math.ceil(percent / 100 * sum(count for _, count in histogram))
    seen = 0
    for upper, count in histogram:
        seen += count
        if seen >= rank:
            return upper / 1e9
    return 0.0


def percentiles(histogram: Histogram) -> dict[str, float]:
    """Return the durations, in seconds, that all reports have."""
    return {name: percentile_seconds(histogram, percent) for name, percent in _PERCENTS.items()}
