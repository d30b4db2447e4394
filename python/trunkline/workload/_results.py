"""What an emulated training came to: numbers from the counts of all ranks."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from trunkline.workload._checkpoint_results import saved_lines
from trunkline.workload._histogram import merged, percentiles
from trunkline.workload._readable import duration
from trunkline.workload._spec import Workload

ENOUGH = 0.99  # utilization that the emulator itself must reach


def phase_results(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a phase from the counts of each rank."""
    running = max(each["running_ns"] for each in ranks) / 1e9
    nbytes = sum(each["bytes"] for each in ranks)
    samples = sum(each["samples"] for each in ranks)
    steps, waits = merged(each["step_times"] for each in ranks), merged(each["waits"] for each in ranks)
    return {
        "utilization": fmean(published_utilization(each) for each in ranks),
        "utilization_dlio": fmean(dlio_utilization(each) for each in ranks),
        "steps": ranks[0]["steps"],
        "samples": samples,
        "bytes": nbytes,
        "gb_s": nbytes / running / 1e9 if running else 0.0,
        "samples_per_second": samples / running if running else 0.0,
        "running_seconds": running,
        "compute_seconds": max(each["busy_ns"] for each in ranks) / 1e9,
        "waited_seconds": max(each["running_ns"] - each["busy_ns"] for each in ranks) / 1e9,
        "late_loop_seconds": max(each["late_loop_ns"] for each in ranks) / 1e9,
        "loop_cpu_seconds": max(each["loop_cpu_ns"] for each in ranks) / 1e9,
        "step_seconds": percentiles(steps),
        "wait_seconds": percentiles(waits),
        "step_histogram_ns": [list(each) for each in steps],
        "epochs": [
            _epoch([each["epochs"][number] for each in ranks]) for number in range(len(ranks[0]["epochs"]))
        ],
    }


def published_utilization(counts: dict[str, Any]) -> float:
    """By the rules of MLPerf Storage: computation over running time, without the first step of all."""
    busy = counts["busy_ns"] - counts["first_busy_ns"]
    running = counts["running_ns"] - counts["first_running_ns"]
    return busy / running if running else 1.0


def dlio_utilization(counts: dict[str, Any]) -> float:
    """By the code of DLIO: the mean over epochs, each without its first step."""
    shares = [busy / running for _, busy, running in counts["epochs"] if running]
    return fmean(shares) if shares else 1.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _epoch(ranks: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    shares = [busy / running if running else 1.0 for _, busy, running in ranks]
    return {"steps": ranks[0][0], "utilization": fmean(shares)}


def document_of(
    workload: Workload,
    ranks: Sequence[dict[str, Any]],
    emulator: dict[str, Any] | None,
    directories: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the document of a run. `emulator`: results on the null device, None if this run was on it."""
    results = phase_results([each["train"] for each in ranks])
    evaluated = [each["evaluation"] for each in ranks if each["evaluation"] is not None]
    proof = emulator if emulator is not None else results
    late = _share(results["late_loop_seconds"], results["running_seconds"])
    own = {
        "utilization": proof["utilization"],
        "steps": proof["steps"],
        "cpu_share": proof["loop_cpu_seconds"] / proof["running_seconds"]
        if proof["running_seconds"]
        else 0.0,
        "late_share": late,
    }
    target = workload.target_utilization
    return {
        "workload": workload.name,
        "source": workload.source,
        "directories": directories,
        "null_device": directories is None,
        "ranks": len(ranks),
        **results,
        "target_utilization": target,
        "target_reached": None if target is None else results["utilization"] >= target,
        "emulator": own,
        "bounded_by_emulator": proof["utilization"] < ENOUGH or late > 1 - ENOUGH,
        "evaluation": phase_results(evaluated) if evaluated and evaluated[0]["steps"] else None,
        "checkpoints": None,
        "per_rank": [
            {
                "utilization": published_utilization(each["train"]),
                "bytes": each["train"]["bytes"],
                "waited_seconds": (each["train"]["running_ns"] - each["train"]["busy_ns"]) / 1e9,
            }
            for each in ranks
        ],
        "open_seconds": max(each["open_seconds"] for each in ranks),
    }


def text_of(document: dict[str, Any]) -> str:
    """Return the results for people."""
    ranks = document["ranks"]
    where = "the null device" if document["null_device"] else ", ".join(document["directories"])
    lines = [
        f"{document['workload']}, {ranks} accelerator{'s' if ranks > 1 else ''}, on {where}",
        f"  utilization         {document['utilization']:.2%}{_target(document)}",
        f"  by DLIO's code      {document['utilization_dlio']:.2%} (mean of epochs without their first step)",
        f"  read                {document['gb_s']:.3f} GB/s, {document['samples_per_second']:.6g} samples/s",
        f"  steps               {document['steps']} in {document['running_seconds']:.3f} s, "
        f"{document['compute_seconds']:.3f} s of them computing, {document['waited_seconds']:.3f} s waiting",
        f"  step time           {_row(document['step_seconds'])}",
        f"  wait before a step  {_row(document['wait_seconds'])}",
    ]
    if document["evaluation"] is not None:
        each = document["evaluation"]
        lines.append(
            f"  evaluation          {each['utilization']:.2%}, {each['gb_s']:.3f} GB/s, "
            f"{each['steps']} steps in {each['running_seconds']:.3f} s"
        )
    if document.get("checkpoints"):
        lines += saved_lines(document["checkpoints"])
    own = document["emulator"]
    lines.append(
        f"  the emulator itself {own['utilization']:.2%} on a null device, {own['cpu_share']:.1%} of a core"
    )
    if document["bounded_by_emulator"]:
        lines.append(
            "  BOUNDED BY THE EMULATOR: this machine cannot drive accelerators that fast; the storage may be "
            "faster than this says"
        )
    return "\n".join(lines)


def _target(document: dict[str, Any]) -> str:
    target = document["target_utilization"]
    if target is None:
        return ""
    return f" (target {target:.0%}: {'reached' if document['target_reached'] else 'missed'})"


def _row(percentiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in percentiles.items())
