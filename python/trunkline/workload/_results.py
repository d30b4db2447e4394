"""What an emulated training came to: numbers from the counts of all ranks."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from trunkline._readable import duration, percent
from trunkline.workload._checkpoint_results import saved_lines
from trunkline.workload._documents import run_text
from trunkline.workload._histogram import merged, percentiles
from trunkline.workload._parameters import parameters_of
from trunkline.workload._spec import Workload
from trunkline.workload._time_line import merged_time_line

ENOUGH = 0.99  # utilization that the emulator itself must reach
_FEW_STEPS = 20  # measured ones: fewer say little


def phase_results(
    ranks: Sequence[dict[str, Any]],
    reads: Sequence[dict[str, Any]] | None = None,
    saves: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """Return the results of a phase from the counts of each rank; `reads`, `saves`: of merged_time_line()."""
    running = max(each["running_ns"] for each in ranks) / 1e9
    nbytes = sum(each["bytes"] for each in ranks)
    samples = sum(each["samples"] for each in ranks)
    steps, waits = merged(each["step_times"] for each in ranks), merged(each["waits"] for each in ranks)
    return {
        "utilization": _mean(published_utilization(each) for each in ranks),
        "utilization_dlio": _mean(dlio_utilization(each) for each in ranks),
        "steps": ranks[0]["steps"],
        "samples": samples,
        "bytes": nbytes,
        "gb_s": nbytes / running / 1e9 if running else 0.0,
        "samples_per_second": samples / running if running else 0.0,
        "running_seconds": running,
        "compute_seconds": max(each["busy_ns"] for each in ranks) / 1e9,
        "waited_seconds": max(each["running_ns"] - each["busy_ns"] for each in ranks) / 1e9,
        "first_step_seconds": max(each["first_running_ns"] for each in ranks) / 1e9,
        "late_loop_seconds": max(each["late_loop_ns"] for each in ranks) / 1e9,
        "loop_cpu_seconds": max(each["loop_cpu_ns"] for each in ranks) / 1e9,
        "step_seconds": percentiles(steps),
        "wait_seconds": percentiles(waits),
        "step_histogram_ns": [list(each) for each in steps],
        "wait_histogram_ns": [list(each) for each in waits],
        "epochs": [
            _epoch([each["epochs"][number] for each in ranks]) for number in range(len(ranks[0]["epochs"]))
        ],
        "time_line": merged_time_line(ranks, reads, saves),
    }


def published_utilization(counts: dict[str, Any]) -> float | None:
    """By the rules of MLPerf Storage: computation over running time, without the first step of all.

    None if there was no other step.
    """
    busy = counts["busy_ns"] - counts["first_busy_ns"]
    running = counts["running_ns"] - counts["first_running_ns"]
    return busy / running if running else None


def dlio_utilization(counts: dict[str, Any]) -> float | None:
    """By the code of DLIO: the mean over epochs, each without its first step; None if none had another."""
    shares = [busy / running for _, busy, running in counts["epochs"] if running]
    return fmean(shares) if shares else None


def _mean(shares: Iterable[float | None]) -> float | None:
    """Return the mean; None if one is missing."""
    known = list(shares)
    measured = [each for each in known if each is not None]
    return fmean(measured) if len(measured) == len(known) else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _epoch(ranks: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    shares = [busy / running if running else None for _, busy, running in ranks]
    return {"steps": ranks[0][0], "utilization": _mean(shares)}


def _reads_of(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    lanes = [each["reads_in_flight"] for each in ranks]
    return None if None in lanes else [lane for each in lanes for lane in each]


def _saves_of(ranks: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return begin and end of each checkpoint: from the first rank that begins to the last one that ends."""
    spans = [each["checkpoints"]["spans"] for each in ranks if each["checkpoints"] is not None]
    return [
        (min(begin for begin, _ in each), max(end for _, end in each)) for each in zip(*spans, strict=True)
    ]


def document_of(
    workload: Workload,
    ranks: Sequence[dict[str, Any]],
    emulator: dict[str, Any] | None,
    directories: Sequence[str] | None,
    device_gb_s: float | None = None,
) -> dict[str, Any]:
    """Return the document of a run.

    emulator: results on the null device, None if this run was on it. device_gb_s: of a null device that takes
    time.
    """
    reads, saves = _reads_of(ranks), _saves_of(ranks)
    results = phase_results([each["train"] for each in ranks], reads, saves)
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
    target, reached = workload.target_utilization, results["utilization"]
    return {
        "workload": workload.name,
        "source": workload.source,
        "directories": directories,
        "null_device": directories is None,
        "device_gb_s": device_gb_s,
        "ranks": len(ranks),
        "parameters": parameters_of(workload),
        **results,
        "target_utilization": target,
        "target_reached": None if target is None or reached is None else reached >= target,
        "emulator": own,
        "bounded_by_emulator": (proof["utilization"] is not None and proof["utilization"] < ENOUGH)
        or late > 1 - ENOUGH,
        "evaluation": phase_results(evaluated, reads, saves) if evaluated and evaluated[0]["steps"] else None,
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
    lines = [
        run_text(document),
        f"  utilization         {_utilization(document)}{_target(document)}",
        f"  by DLIO's code      {percent(document['utilization_dlio'])} (mean over the epochs, each without "
        "its first step)",
        f"  read                {document['gb_s']:.3f} GB/s, {document['samples_per_second']:.6g} samples/s",
        f"  steps               {document['steps']} in {document['running_seconds']:.3f} s, "
        f"{document['compute_seconds']:.3f} s of them computing, {document['waited_seconds']:.3f} s waiting",
        f"  first step          {duration(document['first_step_seconds'])} with its wait; left out of the "
        "utilization, as readers start in it",
        f"  step time           {_row(document['step_seconds'])}",
        f"  wait before a step  {_row(document['wait_seconds'])}",
    ]
    if ranks > 1:
        shares = [each["utilization"] for each in document["per_rank"]]
        if None not in shares:
            lines.append(f"  over the ranks      {min(shares):.2%} to {max(shares):.2%} utilization")
    if document["evaluation"] is not None:
        each = document["evaluation"]
        lines.append(
            f"  evaluation          {percent(each['utilization'])}, {each['gb_s']:.3f} GB/s, "
            f"{each['steps']} steps in {each['running_seconds']:.3f} s"
        )
    if document.get("checkpoints"):
        lines += saved_lines(document["checkpoints"])
    own = document["emulator"]
    lines.append(
        f"  the emulator itself {percent(own['utilization'])} on a null device, {own['cpu_share']:.1%} of a "
        "core"
    )
    measured = max(0, document["steps"] - 1)
    if measured < _FEW_STEPS:
        lines.append(
            f"  FEW STEPS: only {measured} {'was' if measured == 1 else 'were'} measured; for a result that "
            "you can rely on, use a larger data set (--scale) or more epochs (--set train.epochs=N)"
        )
    if document["bounded_by_emulator"]:
        lines.append(
            "  BOUNDED BY THE EMULATOR: this machine cannot drive accelerators that fast; the storage may be "
            "faster than this says"
        )
    return "\n".join(lines)


def _utilization(document: dict[str, Any]) -> str:
    if document["utilization"] is None:
        return "not measurable: there was only the first step, which is left out"
    return f"{document['utilization']:.2%} without the first step"


def _target(document: dict[str, Any]) -> str:
    target = document["target_utilization"]
    if target is None or document["target_reached"] is None:
        return ""
    return f" (target {target:.0%}: {'reached' if document['target_reached'] else 'missed'})"


def _row(percentiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in percentiles.items())
