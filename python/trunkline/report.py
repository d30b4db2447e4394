"""Draws the results of `trunkline bench --json` as one page of HTML that needs nothing else.

The page holds figures as inline SVG and tables; it loads nothing from anywhere.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline._html import escaped, page, table
from trunkline._html import figure as html_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = dict[str, Any]

MISSING_MATPLOTLIB = "drawing a report needs matplotlib, which is not installed: pip install matplotlib"

_OURS, _OURS_PALE, _FIO = "#1f6feb", "#9cc3f7", "#c9c9c9"
_IO_PATHS = {"direct": "#1a7f5a", "bounced": "#e0a030", "buffered": "#c25b4e", "gds": "#7a5bc2"}
_PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "max")


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(results: Results, path: str | Path) -> None:
    """Draw `results`, the document that `trunkline bench --json` printed, as a self-contained page at `path`.

    Raises ImportError if matplotlib is missing, ValueError if `results` is not such a document, OSError if
    the page cannot be written.
    """
    if not available():
        raise ImportError(MISSING_MATPLOTLIB)
    if results.get("command") != "bench" or not results.get("results"):
        raise ValueError("results: not a document of `trunkline bench --json` with measurements in it")
    if results.get("schema") != 1:
        raise ValueError(f"results: schema {results.get('schema')} is not supported; upgrade trunkline")
    Path(path).write_text(_page(results), encoding="utf-8")


def _page(results: Results) -> str:
    rows = results["results"]
    compared = "fio" in results
    parts = [
        "<h1>trunkline bench</h1>",
        f'<p class="lead">{_lead(results)}</p>',
        "<h2>Throughput</h2>",
        _figure(
            _throughput(rows),
            "GB is 10⁹ bytes. Medians; dots are the single measurements." + _fio_note(compared),
        ),
        f'<div class="wide">{_results_table(rows, compared)}</div>',
        '<h2>Latency and CPU time</h2><div class="pair">',
        _figure(_latency(rows), "Of single transfers, from submission to completion."),
        _figure(_cpu(rows), "User and system time of the whole process during the transfers."),
        "</div>",
    ]
    if len(results["paths"]) > 1:
        parts += ["<h2>Paths</h2>", f'<div class="wide">{_paths_table(results)}</div>']
    parts += [
        "<h2>I/O paths</h2>",
        _figure(
            _io_paths(rows),
            "direct: device to memory without a copy; bounced: through a buffer of the engine, because "
            "memory or offset were not aligned; buffered: through the page cache.",
        ),
        "<h2>Machine and options</h2>",
        _facts(results),
    ]
    return page("trunkline bench", parts)


def _lead(results: Results) -> str:
    options, engine = results["options"], results["engine"]
    paths = ", ".join(f"<code>{escaped(path['path'])}</code>" for path in results["paths"])
    how = (
        f"{escaped(engine['backend'])}, {_count(engine['lanes'], 'lane')}, queue depth "
        f"{engine['queue_depth']}, blocks of {_block_sizes(results)}, {escaped(options['order'])}"
    )
    return f"{paths} · {how} · {escaped(results['time'])}"


def _block_sizes(results: Results) -> str:
    most = _bytes(results["engine"]["block_bytes"])
    least = results["options"].get("least_block_bytes")
    return most if least is None else f"{_bytes(least)} to {most}"


def _fio_note(compared: bool) -> str:
    note = " fio ran on the same files with the same parameters; its writes include the final fsync."
    return note if compared else ""


# Figures ----------------------------------------------------------------------------------------------------


def _new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9.5}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _figure(figure: Figure, caption: str) -> str:
    import matplotlib as mpl

    target = io.StringIO()
    # Text stays text, so that it can be searched and copied; no date: the same results make the same page.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trunkline"}):
        figure.savefig(target, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = target.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return html_figure(svg, caption)


def _names(rows: Sequence[Results]) -> list[str]:
    return [str(row["name"]) for row in rows]


def _throughput(rows: Sequence[Results]) -> Figure:
    """Bars of each row: without and with fsync where they differ, and fio's."""
    figure, axes = _new_figure(9, 0.9 + 0.85 * len(rows))
    bars: list[tuple[float, float, float, str, str]] = []  # position, GB/s, the largest single, colour, label
    for index, row in enumerate(rows):
        kinds = [("gb_s", _OURS, "Trunkline")]
        if "gb_s_with_sync" in row:
            kinds.append(("gb_s_with_sync", _OURS_PALE, "Trunkline with fsync"))
        named = [(row[key], colour, label) for key, colour, label in kinds]
        if "fio" in row:
            fio = row["fio"]
            label = "fio (writes with fsync)"
            named.append((fio["gb_s"] if "gb_s" in fio else fio["gb_s_with_sync"], _FIO, label))
        height = 0.8 / 3
        for place, (value, colour, label) in enumerate(named):
            position = index + (place - (len(named) - 1) / 2) * height
            singles = [value]
            if place < len(kinds):
                singles = [run[kinds[place][0]] for run in row["runs"]]
                axes.plot(singles, [position] * len(singles), ".", color="#1d2329", markersize=3, alpha=0.55)
            bars.append((position, value, max(value, *singles), colour, label))
    seen: set[str] = set()
    for position, value, end, colour, label in bars:
        axes.barh(position, value, height=0.24, color=colour, label=None if label in seen else label)
        beside = (end, position)
        axes.annotate(f"{value:.2f}", beside, (6, 0), textcoords="offset points", va="center", fontsize=8.5)
        seen.add(label)
    axes.set_yticks(range(len(rows)), _names(rows))
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.grid(axis="x", color="#eceff2")
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    return figure


def _latency(rows: Sequence[Results]) -> Figure:
    figure, axes = _new_figure(5.4, 3.4)
    for row in rows:
        values = [row["latency_us"][name] / 1e3 for name in _PERCENTILES]
        axes.plot(range(len(values)), values, marker="o", markersize=4, label=str(row["name"]))
    axes.set_xticks(range(len(_PERCENTILES)), list(_PERCENTILES))
    axes.set_ylabel("latency (ms)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    axes.tick_params(axis="y", which="minor", labelsize=8)
    axes.grid(axis="y", which="both", color="#eceff2")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _cpu(rows: Sequence[Results]) -> Figure:
    figure, axes = _new_figure(5.4, 3.4)
    compared = any("fio" in row for row in rows)
    width = 0.38 if compared else 0.6
    for index, row in enumerate(rows):
        bars = [(row["cpu_s_per_gb"], _OURS, "Trunkline")]
        if "fio" in row:
            bars.append((row["fio"]["cpu_s_per_gb"], _FIO, "fio"))
        for place, (value, colour, label) in enumerate(bars):
            position = index + (place - (len(bars) - 1) / 2) * width
            axes.bar(position, value, width=width * 0.92, color=colour, label=label if index == 0 else None)
            axes.text(position, value, f"{value:.3f}", ha="center", va="bottom", fontsize=8.5)
    axes.set_xticks(range(len(rows)), [name.replace(" ", "\n", 1) for name in _names(rows)])
    axes.set_ylabel("CPU seconds per GB")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.25)
    axes.grid(axis="y", color="#eceff2")
    if compared:
        axes.legend(frameon=False, fontsize=9)
    return figure


def _io_paths(rows: Sequence[Results]) -> Figure:
    figure, axes = _new_figure(9, 0.9 + 0.42 * len(rows))
    used = [way for way in _IO_PATHS if any(row["bytes_by_path"][way] for row in rows)]
    for index, row in enumerate(rows):
        total = sum(row["bytes_by_path"].values()) or 1
        left = 0.0
        for way in used:
            share = 100 * row["bytes_by_path"][way] / total
            axes.barh(
                index, share, left=left, height=0.6, color=_IO_PATHS[way], label=way if index == 0 else None
            )
            left += share
    axes.set_yticks(range(len(rows)), _names(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of bytes")
    figure.legend(loc="outside upper right", ncols=4, frameon=False, fontsize=9)
    return figure


# Tables -----------------------------------------------------------------------------------------------------


def _bytes(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _duration(us: float) -> str:
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def _results_table(rows: Sequence[Results], compared: bool) -> str:
    with_gdsio = any("gdsio" in row for row in rows)
    header = ["", "GB/s", "with fsync", "IOPS", "CPU s/GB", "p50", "p99", "p99.9"]
    if compared:
        header += ["fio GB/s", "ratio", "fio IOPS", "fio CPU s/GB", "ratio"]
    if with_gdsio:
        header += ["gdsio GB/s", "ratio", "gdsio IOPS"]
    lines = []
    for row in rows:
        line = _own_columns(row["name"], row)
        if compared:
            fio = row["fio"]
            line += [
                f"{fio['gb_s'] if 'gb_s' in fio else fio['gb_s_with_sync']:.2f}",
                f"{fio['ratio_gb_s']:.3f}",
                _number(fio, "iops", 0),
                f"{fio['cpu_s_per_gb']:.3f}",
                f"{fio['ratio_cpu_s_per_gb']:.2f}",
            ]
        if with_gdsio:
            gdsio = row.get("gdsio", {})
            line += [_number(gdsio, "gb_s", 2), _number(gdsio, "ratio_gb_s", 3), _number(gdsio, "iops", 0)]
        lines.append(line)
        for part in ("reads", "writes"):
            if part in row:
                columns = _own_columns(part, row[part])
                lines.append(columns + [""] * (len(header) - len(columns)))
    return table(header, lines)


def _own_columns(name: str, row: Results) -> list[str]:
    """The columns of Trunkline's own numbers; empty where the row has none."""
    numbers = [
        _number(row, key, digits)
        for key, digits in (("gb_s", 2), ("gb_s_with_sync", 2), ("iops", 0), ("cpu_s_per_gb", 3))
    ]
    latencies = [_duration(row["latency_us"][each]) for each in ("p50", "p99", "p99.9")]
    return [escaped(name), *numbers, *latencies]


def _number(row: Results, name: str, digits: int) -> str:
    return f"{row[name]:.{digits}f}" if name in row else ""


def _paths_table(results: Results) -> str:
    """GB/s of each path in the first run of each row."""
    rows = results["results"]
    lines = [
        [escaped(path["path"]), *(f"{row['runs'][0]['per_path'][index]['gb_s']:.2f}" for row in rows)]
        for index, path in enumerate(results["paths"])
    ]
    return table(["GB/s, first run", *(escaped(name) for name in _names(rows))], lines)


def _facts(results: Results) -> str:
    environment, engine, options = results["environment"], results["engine"], results["options"]
    lines = [
        ("trunkline", escaped(results["trunkline"])),
        ("cpu", f"{escaped(environment['cpu'])}, {_count(environment['cores'], 'core')}"),
        ("memory", _bytes(environment["memory_bytes"])),
        ("kernel", escaped(environment["kernel"])),
        ("container", escaped(environment["container"] or "no sign of one")),
        ("huge pages", escaped(environment["huge_pages"] or "none")),
        ("engine", escaped(", ".join([engine["backend"], *engine["features"]]))),
        ("pinned budget", _bytes(engine["pinned_budget_bytes"])),
        ("buffers", escaped(options["memory"])),
        ("measurements", f"{options['repeat']} of each row, medians"),
        ("verified", "every byte" if options["verify"] else "no"),
    ]
    for path in results["paths"]:
        explain = path["explain"]
        alignment = explain["alignment"]
        way = "direct I/O" if explain["direct"] else "page cache"
        lines.append(
            (
                f"<code>{escaped(path['path'])}</code>",
                f"{_count(len(path['files']), 'file')} of {_bytes(path['file_bytes'])}; "
                f"{escaped(explain['filesystem'])} on {escaped(explain['device'])}; "
                f"{way}: {escaped(explain['why'])}; "
                f"alignment: memory {alignment['memory']}, offset {alignment['offset']} bytes",
            )
        )
        refused = explain["refused"]
        lines += [("refused", f"{escaped(each['what'])}: {escaped(each['why'])}") for each in refused]
    if "gdsio" in results:
        lines.append(("gdsio", escaped(results["gdsio"]["terms"])))
    if "fio" in results:
        lines.append((escaped(results["fio"]["version"]), escaped(results["fio"]["terms"])))
        lines += [
            (f"fio, {escaped(row['name'])}", f"<code>{escaped(' '.join(row['fio']['command']))}</code>")
            for row in results["results"]
            if "fio" in row
        ]
    return table([], lines, "facts")
