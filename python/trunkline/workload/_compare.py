"""Two runs side by side."""

from collections.abc import Mapping
from typing import Any

from trunkline._readable import duration
from trunkline.workload._documents import check_results, number_in, run_text

_PERCENTILES = ("p50", "p90", "p99", "p99.9", "max")
# Where a figure is in the results, and how it is shown.
_FIGURES: tuple[tuple[str, str], ...] = (
    ("utilization", "share"),
    ("utilization_dlio", "share"),
    ("gb_s", "number"),
    ("samples_per_second", "number"),
    ("running_seconds", "seconds"),
    ("compute_seconds", "seconds"),
    ("waited_seconds", "seconds"),
    *((f"step_seconds.{name}", "seconds") for name in _PERCENTILES),
    *((f"wait_seconds.{name}", "seconds") for name in _PERCENTILES),
    ("evaluation.utilization", "share"),
    ("evaluation.gb_s", "number"),
    ("queries_per_second", "number"),
    *((f"latency_seconds.{name}", "seconds") for name in _PERCENTILES),
    ("deadline.within", "share"),
    *(
        (f"{part}.{name}", kind)
        for part in ("save", "restore", "checkpoints.save")
        for name, kind in (("mean_seconds", "seconds"), ("gb_s", "number"), ("gb_s_slowest_rank", "number"))
    ),
    ("open_seconds", "seconds"),
    ("emulator.utilization", "share"),
)


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the results of two runs: what run() returns, or what `trunkline workload run --json` prints.

    Returns {"figures": [{"figure", "a", "b", "ratio"}, ...], "warnings": [...]}. A figure is named by its
    place in the results, such as "wait_seconds.p99"; ratio is b / a, None where a is 0 or one run has no such
    figure. Warnings are sentences: what makes the figures hard to compare, such as another workload or number
    of ranks. Raises ValueError if `a` or `b` is not the result of a run.
    """
    for name, each in (("a", a), ("b", b)):
        check_results(name, each)
    figures = []
    for figure, _ in _FIGURES:
        one, other = number_in("a", a, figure), number_in("b", b, figure)
        if one is not None or other is not None:
            ratio = other / one if one and other is not None else None
            figures.append({"figure": figure, "a": one, "b": other, "ratio": ratio})
    return {"figures": figures, "warnings": _warnings(a, b)}


def _warnings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    said = []
    if bool(a.get("null_device")) != bool(b.get("null_device")):
        used = {True: "the null device", False: "storage"}
        said.append(f"A used {used[bool(a.get('null_device'))]}, B {used[bool(b.get('null_device'))]}")
    said += [
        f"{key} differs: {a.get(key)} and {b.get(key)}"
        for key in ("workload", "ranks", "device_gb_s")
        if a.get(key) != b.get(key)
    ]
    one, other = a.get("parameters"), b.get("parameters")
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [*one, *(key for key in other if key not in one)]
        said += [
            f"{key} differs: {one.get(key)} and {other.get(key)}"
            for key in keys
            if one.get(key) != other.get(key)
        ]
    elif a.get("steps") != b.get("steps"):
        said.append(f"steps differs: {a.get('steps')} and {b.get('steps')}")
    said += [
        f"{name} is bounded by the emulator: its storage may be faster than its figures say"
        for name, each in (("A", a), ("B", b))
        if each.get("bounded_by_emulator") and not each.get("null_device")
    ]
    return said


def comparison_text(
    names: tuple[str, str], runs: tuple[Mapping[str, Any], Mapping[str, Any]], comparison: Mapping[str, Any]
) -> str:
    """Return the comparison for people. `names`: of the files."""
    lines = [
        f"{letter}  {name}: {run_text(run)}"
        for letter, name, run in zip(("A", "B"), names, runs, strict=True)
    ]
    lines += ["", f"{'':<24}{'A':>12}{'B':>12}{'B / A':>10}"]
    kinds = dict(_FIGURES)
    for row in comparison["figures"]:
        shown = [_shown(row[key], kinds[row["figure"]]) for key in ("a", "b")]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(f"{row['figure']:<24}{shown[0]:>12}{shown[1]:>12}{ratio:>10}")
    return "\n".join([*lines, *(f"WARNING: {each}" for each in comparison["warnings"])])


def _shown(value: float | None, kind: str) -> str:
    if value is None:
        return "-"
    return {"share": f"{value:.2%}", "seconds": duration(value), "number": f"{value:.6g}"}[kind]
