"""Time lines of all ranks as one: computing, waiting and bytes in each bucket of time."""

from collections.abc import Sequence
from typing import Any

MOST_BUCKETS = 1000


def merged_time_line(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the time line of a phase from the counts of each rank.

    {"bucket_seconds", "compute_seconds", "wait_seconds", "bytes", "utilization"}: all but the first are lists
    with a value for each bucket, from the start on. Seconds are those of one accelerator, on average; bytes
    those of all. The utilization is None where no accelerator ran, as during evaluations.
    """
    lines = [each["time_line"] for each in ranks if each["time_line"]["bytes"]]
    if not lines:
        return {"bucket_seconds": 0.0, **{key: [] for key in (*_SUMS.values(), "utilization")}}
    width = max(each["width_ns"] for each in lines)
    while _extent(lines, width)[1] > MOST_BUCKETS:
        width *= 2
    first, count = _extent(lines, width)
    sums = {key: [0] * count for key in _SUMS}
    for line in lines:
        for key, values in sums.items():
            for number, value in enumerate(line[key], line["first"]):
                values[number * line["width_ns"] // width - first] += value
    compute, wait = ([ns / len(ranks) / 1e9 for ns in sums[key]] for key in ("compute_ns", "wait_ns"))
    return {
        "bucket_seconds": width / 1e9,
        "compute_seconds": compute,
        "wait_seconds": wait,
        "bytes": sums["bytes"],
        "utilization": [
            busy / (busy + waited) if busy + waited else None
            for busy, waited in zip(compute, wait, strict=True)
        ],
    }


_SUMS = {"compute_ns": "compute_seconds", "wait_ns": "wait_seconds", "bytes": "bytes"}


def _extent(lines: Sequence[dict[str, Any]], width: int) -> tuple[int, int]:
    """Return the number of the first bucket, and how many there are, if each is so wide."""
    first = min(each["first"] * each["width_ns"] // width for each in lines)
    last = max((each["first"] + len(each["bytes"]) - 1) * each["width_ns"] // width for each in lines)
    return first, last - first + 1
