"""What saving and restoring came to: numbers from the times of all ranks, and the text for people."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from trunkline._core import DurationHistogram
from trunkline._readable import duration
from trunkline._sizes import size
from trunkline.workload._histogram import percentiles
from trunkline.workload._model_shape import ModelShape, rank_bytes, total_bytes

Times = Sequence[
    Sequence[int]
]  # (number of the checkpoint, nanoseconds, nanoseconds of own reading or writing)


def transfer_results(nbytes: Sequence[int], times: Sequence[Times]) -> dict[str, Any] | None:
    """Return the results of all saves, or of all restores; None without any.

    `nbytes`, `times`: of each rank. A checkpoint takes as long as its slowest rank, as MLPerf Storage counts
    it.
    """
    if not times[0]:
        return None
    total, longest = sum(nbytes), DurationHistogram()
    each = []
    for at, (number, *_) in enumerate(times[0]):
        durations = [rank[at][1] for rank in times]
        longest.add_ns(max(durations))
        rates = [_rate(share, ns) for share, ns in zip(nbytes, durations, strict=True) if share]
        each.append(
            {
                "checkpoint": number,
                "seconds": max(durations) / 1e9,
                "gb_s": _rate(total, max(durations)),
                "gb_s_slowest_rank": min(rates, default=0.0),
            }
        )
    seconds = sum(one["seconds"] for one in each)
    histogram = longest.counts()
    return {
        "count": len(each),
        "bytes": total,
        "mean_seconds": seconds / len(each),
        "seconds": percentiles(histogram),
        "gb_s": _rate(total * len(each), seconds * 1e9),
        "gb_s_slowest_rank": min(one["gb_s_slowest_rank"] for one in each),
        "histogram_ns": [list(bucket) for bucket in histogram],
        "checkpoints": each,
        "per_rank": [_rank(share, rank) for share, rank in zip(nbytes, times, strict=True)],
    }


def saved_results(ranks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the results of the saves of a training from the counts of each rank."""
    counts = [each["checkpoints"] for each in ranks]
    return transfer_results([each["bytes"] for each in counts], [each["saves"] for each in counts])


def _rank(nbytes: int, times: Times) -> dict[str, Any]:
    mean = fmean(ns for _, ns, _ in times)
    own = fmean(ns for _, _, ns in times)
    return {
        "bytes": nbytes,
        "seconds": mean / 1e9,
        "gb_s": _rate(nbytes, mean),
        "own_seconds": own / 1e9,  # without waiting for other ranks and for the commit
    }


def _rate(nbytes: int, ns: float) -> float:
    return nbytes / ns if ns else 0.0


def model_document(declared: ModelShape, shape: ModelShape, ranks: int) -> dict[str, Any]:
    """Return what is saved by how many ranks, and what was scaled."""
    parallelism = shape.parallelism
    model, optimizer = rank_bytes(shape, 0)
    return {
        "ranks": ranks,
        "model_ranks": parallelism.ranks,
        "parallelism": {
            "tensor": parallelism.tensor,
            "pipeline": parallelism.pipeline,
            "data": parallelism.data,
            "zero_stage": parallelism.zero_stage,
        },
        "model_bytes": total_bytes(shape),  # of all ranks
        "checkpoint_bytes": sum(sum(rank_bytes(shape, rank)) for rank in range(ranks)),
        "rank_bytes": {"model": model, "optimizer": optimizer},  # of rank 0
        "scaled": _changes(declared, shape),
    }


def _changes(declared: ModelShape, shape: ModelShape) -> dict[str, Any] | None:
    """What is smaller than declared, as (declared, used)."""
    if declared == shape:
        return None
    found: dict[str, Any] = {"model_bytes": [total_bytes(declared), total_bytes(shape)]}
    if declared.transformer is not None and shape.transformer is not None:
        for name in ("hidden", "ffn", "vocabulary"):
            found[name] = [getattr(declared.transformer, name), getattr(shape.transformer, name)]
    for name in ("layer_elements", "group_elements", "flat_bytes"):
        if getattr(declared, name) != getattr(shape, name):
            found[name] = [getattr(declared, name), getattr(shape, name)]
    return found


def text_of_checkpoints(document: dict[str, Any]) -> str:
    """Return the results of a workload of checkpoints for people."""
    lines = [
        f"{document['workload']}, {_ranks(document['model'])}, in {', '.join(document['directories'])}",
        *_model_lines(document["model"]),
        *_transfer_lines("saved", document["save"]),
        *_transfer_lines("restored", document["restore"]),
    ]
    if document["restore"] is not None:
        lines.append("  verified            every restored byte is as it was saved")
    return "\n".join([*lines, *_left_lines(document)])


def saved_lines(document: dict[str, Any]) -> list[str]:
    """Return the lines about the checkpoints of a training."""
    lines = [*_model_lines(document["model"]), *_transfer_lines("saved", document["save"])]
    return [*lines, *_left_lines(document)]


def _model_lines(model: dict[str, Any]) -> list[str]:
    return [
        *_scaled(model["scaled"]),
        f"  a checkpoint        {size(model['checkpoint_bytes'])}, of rank 0 "
        f"{size(model['rank_bytes']['model'])} of weights and "
        f"{size(model['rank_bytes']['optimizer'])} of the optimizer",
    ]


def _left_lines(document: dict[str, Any]) -> list[str]:
    """What the run has left in the directories."""
    lines = []
    if document["save"] is not None:
        kept = "removed" if document["removed"] else f"kept in {document['folder']}; --remove removes them"
        lines.append(f"  these checkpoints   {kept}")
    if document["incomplete"]:
        lines.append(
            f"  not complete        {', '.join(document['incomplete'])}: an earlier run was killed; remove "
            "them"
        )
    return lines


def _transfer_lines(verb: str, results: dict[str, Any] | None) -> list[str]:
    """Return the line about saves or restores, none without any."""
    if results is None:
        return []
    seconds = results["seconds"]
    slowest = (
        f", slowest rank {results['gb_s_slowest_rank']:.3f} GB/s" if len(results["per_rank"]) > 1 else ""
    )
    return [
        f"  {verb:<20}{results['count']} times at {results['gb_s']:.3f} GB/s{slowest}; "
        f"mean {duration(results['mean_seconds'])}, p50 {duration(seconds['p50'])}, "
        f"max {duration(seconds['max'])}"
    ]


def _ranks(model: dict[str, Any]) -> str:
    parallel = model["parallelism"]
    of = f" of {model['model_ranks']}" if model["model_ranks"] != model["ranks"] else ""
    return (
        f"{model['ranks']}{of} rank{'s' if model['model_ranks'] > 1 else ''} (tensor {parallel['tensor']} x "
        f"pipeline {parallel['pipeline']} x data {parallel['data']}, ZeRO {parallel['zero_stage']})"
    )


def _scaled(scaled: dict[str, Any] | None) -> list[str]:
    if scaled is None:
        return []
    sizes = {name: pair for name, pair in scaled.items() if name != "model_bytes"}
    shown = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in sizes.items())
    before, after = scaled["model_bytes"]
    return [
        f"  SCALED DOWN         {size(before)} -> {size(after)} of all ranks: {shown}; layers "
        "and ranks are as declared"
    ]
