"""The results of a run as one page of HTML: charts and tables, without scripts."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline._html import escaped, figure, page, table, wide, write_page
from trunkline._paths import path_name
from trunkline._readable import duration, percent
from trunkline._svg import Axis, Chart, Series, axis
from trunkline.workload._documents import check_results, run_text
from trunkline.workload._time_line_charts import charts_over_time, percent_text

if TYPE_CHECKING:
    from trunkline._types import Path as AnyPath

_BLUE, _ORANGE = "#1f6feb", "#e0a030"
_MOST_COLUMNS = 60  # of a histogram


def write_report(results: Mapping[str, Any], path: "AnyPath") -> None:
    """Write the results of a run as a page of HTML with charts, which needs no other file and no network.

    results: what run() returns, or what `trunkline workload run --json` prints. A file at `path` is replaced.
    Raises ValueError if `results` is not the result of a training job, OSError if the page cannot be written.
    """
    check_results("results", results)
    if "step_seconds" not in results:
        raise ValueError("results: are of checkpoints or inference; pages are only of training jobs")
    try:
        text = page(f"trunkline workload: {results['workload']}", _body(results))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"results: incomplete, or of another version of trunkline ({error!r})") from error
    write_page(text, Path(path_name(path, "path")))


def _body(results: Mapping[str, Any]) -> list[str]:
    parts = [
        f"<h1>{escaped(results['workload'])}</h1>",
        f'<p class="lead">{escaped(run_text(results))}</p>',
        table([], _summary(results), "facts"),
    ]
    if results["bounded_by_emulator"]:
        parts.append(
            "<p><strong>Bounded by the emulator</strong>: this machine cannot drive accelerators that fast; "
            "the storage may be faster than this says.</p>"
        )
    parts += ["<h2>Over time</h2>", *charts_over_time(results)]
    if results["evaluation"] is not None:
        parts += ["<h2>Evaluations over time</h2>", *charts_over_time(results["evaluation"], extend=False)]
    parts += ["<h2>Steps</h2>", *_steps(results)]
    if len(results["per_rank"]) > 1:
        parts += ["<h2>Accelerators</h2>", _ranks(results["per_rank"])]
    parts += ["<h2>Epochs</h2>", _epochs(results["epochs"]), "<h2>Parameters</h2>", _parameters(results)]
    return parts


def _summary(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    target = results["target_utilization"]
    unknown = target is None or results["target_reached"] is None
    reached = "" if unknown else f" (target {target:.0%}: {_reached(results)})"
    own = results["emulator"]
    rows = [
        ("utilization", f"{percent(results['utilization'])}{reached}"),
        ("by DLIO's code", percent(results["utilization_dlio"])),
        ("read", f"{results['gb_s']:.3f} GB/s, {results['samples_per_second']:.6g} samples/s"),
        ("steps", f"{results['steps']} in {duration(results['running_seconds'])}"),
        ("computing", duration(results["compute_seconds"])),
        ("waiting", duration(results["waited_seconds"])),
        ("the emulator itself", f"{percent(own['utilization'])} on a null device"),
    ]
    if results["evaluation"] is not None:
        each = results["evaluation"]
        rows.append(("evaluations", f"{percent(each['utilization'])}, {each['gb_s']:.3f} GB/s"))
    return rows


def _reached(results: Mapping[str, Any]) -> str:
    return "reached" if results["target_reached"] else "missed"


def _steps(results: Mapping[str, Any]) -> list[str]:
    names = list(results["step_seconds"])
    rows = [
        [label, *(duration(results[key][name]) for name in names)]
        for key, label in (("step_seconds", "time of a step"), ("wait_seconds", "wait before a step"))
    ]
    parts = [wide(table(["", *names], rows))]
    for key, label, colour in (
        ("step_histogram_ns", "Time of a step", _BLUE),
        ("wait_histogram_ns", "Wait before a step", _ORANGE),
    ):
        edges, counts, zeros = _columns(results[key])
        if not counts:
            continue
        chart = Chart(label, Axis("time", edges[0], edges[-1], True, duration), axis("steps", counts))
        chart.columns(edges, Series(label.lower(), colour, counts))
        without = f" {zeros} more took no time." if zeros else ""
        parts.append(figure(chart.svg(), f"{label}: number of steps, of all accelerators.{without}"))
    return parts


def _columns(histogram: Sequence[Sequence[int]]) -> tuple[list[float], list[float], int]:
    """Return edges in seconds and counts of wider buckets, and the count of what took no time."""
    zeros = sum(count for upper, count in histogram if upper == 0)
    timed = [(upper / 1e9, count) for upper, count in histogram if upper > 0]
    if not timed:
        return [], [], zeros
    low, high = timed[0][0] * 0.99, timed[-1][0] * 1.01
    low = min(low, high / 1.5)  # one value is a column, not the whole width
    width = math.log(high / low) / _MOST_COLUMNS
    counts = [0.0] * _MOST_COLUMNS
    for seconds, count in timed:
        counts[min(_MOST_COLUMNS - 1, int(math.log(seconds / low) / width))] += count
    return [low * math.exp(width * number) for number in range(_MOST_COLUMNS + 1)], counts, zeros


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    shares = [each["utilization"] for each in ranks]
    chart = Chart(
        "Utilization of each accelerator",
        Axis("rank", 0.0, float(len(ranks)), text=lambda rank: f"{rank:g}" if rank == int(rank) else ""),
        Axis("utilization", 0.0, 1.0, text=percent_text),
    )
    chart.columns([float(number) for number in range(len(ranks) + 1)], Series("utilization", _BLUE, shares))
    known = [share for share in shares if share is not None]
    caption = f"From {min(known):.2%} to {max(known):.2%}." if known else "Not measured: there was one step."
    return figure(chart.svg(), caption)


def _epochs(epochs: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [str(number), str(each["steps"]), percent(each["utilization"])]
        for number, each in enumerate(epochs, 1)
    ]
    return wide(table(["epoch", "steps", "utilization without the first steps"], rows))


def _parameters(results: Mapping[str, Any]) -> str:
    rows = [("workload file", escaped(results["source"]))]
    parameters = results["parameters"].items()
    rows += [(escaped(key), escaped(value)) for key, value in parameters if value is not None]
    return wide(table([], rows, "facts"))
