"""What the demo shows at its end: a table for the terminal and a page with pictures, both from the same
numbers.
"""

from __future__ import annotations

import base64
import html
import io
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"trunkline": "#1b6ca8", "fio": "#2f2f2f", "other": "#b9bec4"}


@dataclass
class Measured:
    """All runs of one way to load or to save."""

    direction: str  # "load" or "save"
    name: str
    kind: str  # "trunkline", "fio" or "other"
    note: str = ""
    gb_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)

    @property
    def median_gb_s(self) -> float:
        return median(self.gb_s)

    @property
    def median_cpu_s_per_gb(self) -> float:
        return median(self.cpu_s_per_gb)


def ratio_to_fio(row: Measured, rows: list[Measured]) -> float | None:
    fio = next((other for other in rows if other.kind == "fio" and other.direction == row.direction), None)
    return row.median_gb_s / fio.median_gb_s if fio and fio.gb_s else None


def as_json(rows: list[Measured]) -> list[dict[str, object]]:
    return [
        {
            "direction": row.direction,
            "name": row.name,
            "gb_s": row.gb_s,
            "median_gb_s": row.median_gb_s,
            "ratio_to_fio": ratio_to_fio(row, rows),
            "median_cpu_s_per_gb": row.median_cpu_s_per_gb,
        }
        for row in rows
        if row.gb_s
    ]


def wrapped(text: str) -> str:
    """The lines of the text, with those too long for a terminal of 80 columns wrapped."""
    lines = (
        textwrap.fill(line, 79, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")
    )
    return "\n".join(lines)


def table(rows: list[Measured]) -> str:
    """At most 80 columns wide while names have at most 43 characters and no speed reaches 10 GB/s."""
    lines = [f"{'':<45}{'GB/s':>6}{'of fio':>7}{'CPU s/GB':>9}  min..max"]
    direction = ""
    for row in rows:
        if not row.gb_s:
            continue
        if row.direction != direction:
            direction = row.direction
            lines.append(f"{direction} (median of {len(row.gb_s)} runs)")
        ratio = ratio_to_fio(row, rows)
        share = f"{ratio:.2f}" if ratio is not None else "-"
        spread = f"{min(row.gb_s):.2f}..{max(row.gb_s):.2f}"
        lines.append(
            f"  {row.name:<43}{row.median_gb_s:>6.2f}{share:>7}{row.median_cpu_s_per_gb:>9.3f}  {spread}"
        )
    return "\n".join(lines)


def figure(rows: list[Measured], direction: str) -> str:
    """Horizontal bars of the medians with every run as a dot, as an <img> that needs nothing else."""
    shown = [row for row in rows if row.direction == direction and row.gb_s]
    picture, axes = plt.subplots(figsize=(9, 0.55 * len(shown) + 1.2), layout="constrained")
    for place, row in enumerate(shown):
        axes.barh(place, row.median_gb_s, color=COLOURS[row.kind], height=0.62)
        axes.plot(row.gb_s, [place] * len(row.gb_s), "o", color="#e4572e", markersize=4, alpha=0.8)
        axes.annotate(
            f"{row.median_gb_s:.2f}",
            (max(row.gb_s), place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(max(row.gb_s) for row in shown))
    axes.set_xlabel("GB/s (bar: median, dots: runs)")
    axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=150)
    plt.close(picture)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{direction}: GB/s of each way" src="data:image/png;base64,{data}">'


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Trunkline demo</title>
<style>
 body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
 img {{ max-width: 100% }}
 table {{ border-collapse: collapse; margin: 1rem 0 }}
 th, td {{ padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd }}
 th:first-child, td:first-child {{ text-align: left }}
 tr.trunkline {{ font-weight: 600 }}
 dt {{ font-weight: 600 }}
</style></head><body>
<h1>Trunkline demo</h1>
<p>{model}. Every load was checked bit for bit against the safetensors library, and that library and torch
read every file that Trunkline saved.</p>
<h2>Loading</h2>{load}
<h2>Saving</h2>{save}
<table><tr><th>way</th><th>GB/s</th><th>of fio</th><th>CPU s/GB</th></tr>
{rows}
</table>
<h2>Generating within half the memory</h2>
<pre>{generation}</pre>
<h2>How it was measured</h2>
<dl>{facts}</dl>
</body></html>
"""


def write_page(path: Path, rows: list[Measured], model: str, facts: dict[str, str], generation: str) -> None:
    cells = []
    for row in rows:
        if not row.gb_s:
            continue
        ratio = ratio_to_fio(row, rows)
        share = f"{ratio:.2f}" if ratio is not None else "-"
        numbers = f"<td>{row.median_gb_s:.2f}</td><td>{share}</td><td>{row.median_cpu_s_per_gb:.3f}</td>"
        name = html.escape(f"{row.direction}: {row.name}")
        cells.append(f'<tr class="{row.kind}"><td>{name}</td>{numbers}</tr>')
    path.write_text(
        PAGE.format(
            model=html.escape(model),
            load=figure(rows, "load"),
            save=figure(rows, "save"),
            rows="\n".join(cells),
            generation=html.escape(generation),
            facts="".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items()),
        ),
        encoding="utf-8",
    )
