"""What an inference came to: numbers from the counts of all ranks, and the text for people."""

from collections.abc import Sequence
from typing import Any

from trunkline._readable import duration
from trunkline._sizes import size
from trunkline.workload._histogram import merged, percentile_seconds, percentiles
from trunkline.workload._spec import Inference, Workload

_ENOUGH_LATE = 0.01  # share of the latencies that the emulator itself may add


def inference_document(workload: Workload, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results from the counts of each rank."""
    inference = workload.inference
    assert inference is not None
    total = {key: sum(each[key] for each in ranks) for key in ("queries", "samples", "bytes", "in_time")}
    running = max(each["running_ns"] for each in ranks) / 1e9
    times = {name: merged(each["times"][name] for each in ranks) for name in ranks[0]["times"]}
    spent = sum(upper * count for upper, count in times["latency"])
    late = sum(each["late_ns"] for each in ranks)
    return {
        "mode": inference.mode,
        "queries": total["queries"],
        "samples": total["samples"],
        "bytes": total["bytes"],
        "running_seconds": running,
        "queries_per_second": total["queries"] / running,
        "samples_per_second": total["samples"] / running,
        "gb_s": total["bytes"] / running / 1e9,
        "utilization": sum(each["compute_ns"] / each["running_ns"] for each in ranks) / len(ranks),
        **{f"{name}_seconds": percentiles(times[name]) for name in ("latency", "queue", "read", "log")},
        "latency_histogram_ns": [list(each) for each in times["latency"]],
        "deadline": _deadline(inference, times["latency"], total["in_time"], total["queries"]),
        "load": _load([each["load"] for each in ranks]),
        "log": _log(inference, [each["log"] for each in ranks]),
        "late_seconds": percentiles(times["late_start"]),
        "bounded_by_emulator": late > _ENOUGH_LATE * spent,
    }


def _deadline(
    inference: Inference, latencies: Sequence[tuple[int, int]], in_time: int, queries: int
) -> dict[str, Any] | None:
    if inference.deadline_seconds is None:
        return None
    latency = percentile_seconds(latencies, inference.percentile)
    share = in_time / queries
    return {
        "seconds": inference.deadline_seconds,
        "percentile": inference.percentile,
        "latency_seconds": latency,
        "within": share,
        "reached": share >= inference.percentile / 100,
    }


def _load(ranks: Sequence[dict[str, int] | None]) -> dict[str, Any] | None:
    loads = [each for each in ranks if each is not None]
    if not loads:
        return None
    longest = max(each["ns"] for each in loads)
    total = sum(each["bytes"] for each in loads)
    return {"bytes": total, "seconds": longest / 1e9, "gb_s": total / longest if longest else 0.0}


def _log(inference: Inference, ranks: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    logs = [each for each in ranks if each is not None]
    if not logs or inference.logging is None:
        return None
    return {
        "fsync": inference.logging.sync,
        **{key: sum(each[key] for each in logs) for key in ("records", "bytes", "syncs")},
        "sync_seconds": percentiles(merged(each["sync_times"] for each in logs)),
    }


def text_of_inference(document: dict[str, Any]) -> str:
    """Return the results for people."""
    ranks = document["ranks"]
    unit = "queries" if document["mode"] == "server" else "batches"
    lines = [
        f"{document['workload']}, inference in {document['mode']} mode on {ranks} "
        f"accelerator{'s' if ranks > 1 else ''}, in {', '.join(document['directories'])}",
        *_load_lines(document["load"]),
        f"  {unit:<20}{document['queries']} in {document['running_seconds']:.3f} s: "
        f"{document['queries_per_second']:.6g} a second, {document['samples_per_second']:.6g} samples/s, "
        f"{document['gb_s']:.3f} GB/s read",
        f"  utilization         {document['utilization']:.2%}",
        f"  latency             {_row(document['latency_seconds'])}",
    ]
    if document["mode"] == "server":
        lines.append(f"  of it in the queue  {_row(document['queue_seconds'])}")
    waiting = "of it reading" if document["mode"] == "server" else "waiting for data"
    lines.append(f"  {waiting:<20}{_row(document['read_seconds'])}")
    if document["log"] is not None:
        lines.append(f"  of it logging       {_row(document['log_seconds'])}")
    lines += [*_deadline_lines(document["deadline"]), *_log_lines(document)]
    if document["bounded_by_emulator"]:
        lines.append(
            f"  BOUNDED BY THE EMULATOR: it was late by {_row(document['late_seconds'])}; run it on an idle "
            "machine, or with fewer ranks"
        )
    return "\n".join(lines)


def _load_lines(load: dict[str, Any] | None) -> list[str]:
    if load is None:
        return []
    return [
        f"  model load          {size(load['bytes'])} in {load['seconds']:.3f} s, {load['gb_s']:.3f} GB/s"
    ]


def _deadline_lines(deadline: dict[str, Any] | None) -> list[str]:
    if deadline is None:
        return []
    reached = "reached" if deadline["reached"] else "missed"
    return [
        f"  deadline            {duration(deadline['seconds'])} for {deadline['percentile']:g} % of the "
        f"queries: {reached}, {deadline['within']:.2%} are within it (p{deadline['percentile']:g} "
        f"{duration(deadline['latency_seconds'])})"
    ]


def _log_lines(document: dict[str, Any]) -> list[str]:
    log = document["log"]
    if log is None:
        return []
    kept = f", kept in {document['logs']}; --remove removes them" if document["logs"] else ", removed"
    return [
        f"  log                 {log['records']} records, {size(log['bytes'])}, {log['syncs']} times "
        f"made durable ({log['fsync']}): {_row(log['sync_seconds'])}{kept}"
    ]


def _row(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in times.items())
