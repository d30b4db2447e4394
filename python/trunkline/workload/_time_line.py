"""Time lines of all ranks as one: computing, waiting, bytes and reads in flight in each bucket of time."""

from collections.abc import Sequence
from typing import Any

MOST_BUCKETS = 1000


def merged_time_line(
    ranks: Sequence[dict[str, Any]],
    reads: Sequence[dict[str, Any]] | None = None,
    saves: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """Return the time line of a phase from the counts of each rank.

    reads: the reads in flight of each lane of each rank; None: nothing was read. saves: begin and end of each
    checkpoint, in nanoseconds of the ranks' clock.

    {"bucket_seconds", "compute_seconds", "wait_seconds", "bytes", "utilization", "reads_in_flight",
    "bytes_in_flight", "checkpoint_spans"}: lists with a value for each bucket, from the start on, but for the
    first and the last. Seconds are those of one accelerator, on average; bytes and what is in flight those of
    all. The utilization is None where no accelerator ran, as during evaluations; what is in flight is None
    where nothing was read. The spans are [begin, end] in seconds since the start.
    """
    lines = [each["time_line"] for each in ranks if each["time_line"]["bytes"]]
    if not lines:
        names = (*_SUMS.values(), "utilization", *_IN_FLIGHT.values(), "checkpoint_spans")
        unknown = dict.fromkeys(_IN_FLIGHT.values()) if reads is None else {}
        return {"bucket_seconds": 0.0, **{name: [] for name in names}, **unknown}
    width = max(each["width_ns"] for each in (*lines, *(reads or ())))
    while _extent(lines, width)[1] > MOST_BUCKETS:
        width *= 2
    first, count = _extent(lines, width)
    sums = _sums(lines, tuple(_SUMS), width, first, count)
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
        **_in_flight(reads, width, first, count),
        "checkpoint_spans": [
            [max(0, begin - first * width) / 1e9, (end - first * width) / 1e9]
            for begin, end in saves
            if end > first * width
        ],
    }


_SUMS = {"compute_ns": "compute_seconds", "wait_ns": "wait_seconds", "bytes": "bytes"}
_IN_FLIGHT = {"read_ns": "reads_in_flight", "byte_ns": "bytes_in_flight"}


def _in_flight(
    reads: Sequence[dict[str, Any]] | None, width: int, first: int, count: int
) -> dict[str, list[float] | None]:
    if reads is None:
        return dict.fromkeys(_IN_FLIGHT.values())
    sums = _sums(reads, tuple(_IN_FLIGHT), width, first, count)
    return {name: [value / width for value in sums[key]] for key, name in _IN_FLIGHT.items()}


def _sums(
    lines: Sequence[dict[str, Any]], keys: Sequence[str], width: int, first: int, count: int
) -> dict[str, list[Any]]:
    """Add the lines up in `count` wider buckets from number `first` on; leave out what is in no bucket."""
    sums: dict[str, list[Any]] = {key: [0] * count for key in keys}
    for line in lines:
        for key, values in sums.items():
            for number, value in enumerate(line[key], line["first"]):
                place = number * line["width_ns"] // width - first
                if 0 <= place < count:
                    values[place] += value
    return sums


def _extent(lines: Sequence[dict[str, Any]], width: int) -> tuple[int, int]:
    """Return the number of the first bucket, and how many there are, if each is so wide."""
    first = min(each["first"] * each["width_ns"] // width for each in lines)
    last = max((each["first"] + len(each["bytes"]) - 1) * each["width_ns"] // width for each in lines)
    return first, last - first + 1
