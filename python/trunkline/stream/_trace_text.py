"""What a trace of routing says about sizes of the cache of experts: as text, and as charts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trunkline._html import check_plot_name, escaped, figure, page, table, write_page
from trunkline._sizes import size
from trunkline._svg import Axis, Chart, Series, axis

_BLUE, _GREEN, _ORANGE, _PURPLE = "#1f6feb", "#1a7f5a", "#e0a030", "#7a5bc2"
_POLICIES = (
    ("hit_rate", "Trunkline", _BLUE),
    ("lru", "LRU", _ORANGE),
    ("lfu", "LFU", _GREEN),
    ("static", "static", _PURPLE),
)  # by their keys
_HEADS = (
    "memory for experts",
    "of all",
    "budget",
    *(label for _, label, _ in _POLICIES),
    "tokens/s",
    "bound by",
)
_WIDTHS = (18, 8, 11, 11, 7, 7, 8, 12)


def trace_lines(trace: Mapping[str, Any]) -> list[str]:
    """Return the lines of "trace" in the result of plan()."""
    rows = [_HEADS, *map(_cells, trace["sizes"])]
    aligned = [
        "  " + row[0].ljust(_WIDTHS[0]) + "".join(map(str.rjust, row[1:-1], _WIDTHS[1:])) + f"  {row[-1]}"
        for row in rows
    ]
    return [
        f"  {_lead(trace)}",
        "  hit rate over the memory for experts, and that of other policies:",
        *aligned,
    ]


def write_plot(document: Mapping[str, Any], path: str) -> None:
    """Draw the hit rate over the memory for experts: a chart in a file .svg, or a page in a file .html.

    `document`: the result of plan() with a trace. Raises ValueError for another suffix, OSError if the file
    cannot be written.
    """
    check_plot_name(path)
    trace = document["trace"]
    chart = _hit_rates(trace["sizes"]).svg()
    if path.endswith(".svg"):
        write_page(chart, Path(path))
        return
    title = f"trunkline plan: {document['model']}"
    parts = [
        f"<h1>{escaped(document['model'])}</h1>",
        f'<p class="lead">{escaped(_lead(trace))}</p>',
        "<h2>Hit rate</h2>",
        figure(
            chart,
            "Of all steps of the trace, beginning with an empty cache. LRU evicts what was not used for "
            "longest, LFU what was used least; static keeps what the first half of the trace uses most.",
        ),
        "<h2>Speed</h2>",
        figure(
            _speeds(trace["sizes"]).svg(),
            f"Predicted for a batch of {document['batch_size']} and storage of "
            f"{document['bandwidth'] / 1e9:.2f} GB/s, with all other weights in memory.",
        ),
        "<h2>Numbers</h2>",
        f'<div class="wide">{table(list(map(escaped, _HEADS)), _html_rows(trace["sizes"]))}</div>',
    ]
    write_page(page(title, parts), Path(path))


def _html_rows(sizes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [list(map(escaped, _cells(each))) for each in sizes]


def _lead(trace: Mapping[str, Any]) -> str:
    return (
        f"trace {trace['file']}: {trace['steps']:,} steps of {trace['model']}; "
        f"{trace['first_uses']:.1%} of the uses are the first of an expert"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        size(row["cached_bytes"]),
        f"{row['cached']:.0%}",
        size(row["memory_budget"]),
        *(f"{row[key]:.1%}" for key, _, _ in _POLICIES),
        f"{row['tokens_per_second']:.3g}",
        row["bound"],
    ]


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _hit_rates(sizes: Sequence[Mapping[str, Any]]) -> Chart:
    chart = Chart(
        "Hit rate over the memory for experts", _shares(), Axis("hit rate", 0.0, 1.0, text=_percent)
    )
    for key, label, colour in reversed(_POLICIES):  # ours above the others
        chart.line([row["cached"] for row in sizes], Series(label, colour, [row[key] for row in sizes]))
    return chart


def _speeds(sizes: Sequence[Mapping[str, Any]]) -> Chart:
    rates = [row["tokens_per_second"] for row in sizes]
    chart = Chart("Tokens per second over the memory for experts", _shares(), axis("tokens/s", rates))
    chart.line([row["cached"] for row in sizes], Series("tokens/s", _BLUE, rates))
    return chart


def _shares() -> Axis:
    return Axis("share of the experts in memory", 0.0, 1.0, text=_percent)
