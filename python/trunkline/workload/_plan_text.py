"""A plan for people: as text, and as a chart over the number of accelerators."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trunkline._html import check_plot_name, escaped, figure, page, table
from trunkline._readable import duration, quantity
from trunkline._sizes import size
from trunkline._svg import Chart, Series, axis

_BLUE, _ORANGE, _PURPLE = "#1f6feb", "#e0a030", "#7a5bc2"
_DISK_NUMBERS = (
    ("read_gb_s", "reads {} GB/s"),
    ("iops", "does {} reads/s"),
    ("write_gb_s", "writes {} GB/s"),
    ("capacity_bytes", "holds {}"),
)


def plan_text(plan: Mapping[str, Any]) -> str:
    """Return the plan as text."""
    lines = [
        f"{_title(plan)}",
        "",
        *_aligned(_parts(plan)),
        "",
        *_checkpoint_lines(plan),
        *_aligned(_scaling(plan)),
        "",
        *_basis(plan),
        *(f"WARNING: {each}" for each in plan["warnings"]),
    ]
    return "\n".join(lines)


def write_plot(plan: Mapping[str, Any], path: str) -> None:
    """Write the plan over the number of accelerators: a chart in a file .svg, or a page in a file .html.

    Raises ValueError for another suffix, OSError if the file cannot be written.
    """
    check_plot_name(path)
    chart = _chart(plan).svg()
    if path.endswith(".svg"):
        text = chart
    else:
        [heads, *rows] = _parts(plan)
        [scaling_heads, *scaling] = _scaling(plan)
        text = page(
            f"trunkline workload plan: {plan['workload']}",
            [
                f"<h1>{escaped(_title(plan))}</h1>",
                table(_cells(heads), [_cells(row) for row in rows]),
                *(f"<p>{escaped(line)}</p>" for line in _checkpoint_lines(plan) if line),
                "<h2>Over the number of accelerators</h2>",
                figure(chart, "Bandwidth that storage must deliver to all accelerators together."),
                table(_cells(scaling_heads), [_cells(row) for row in scaling]),
                "<h2>What this stands on</h2>",
                *(f"<p>{escaped(line)}</p>" for line in _basis(plan)),
                *(f"<p><strong>{escaped(line)}</strong></p>" for line in plan["warnings"]),
            ],
        )
    Path(path).write_text(text, encoding="utf-8")


def _title(plan: Mapping[str, Any]) -> str:
    accelerators = f"{plan['accelerators']:,} accelerator{'s' if plan['accelerators'] != 1 else ''}"
    name = (
        plan["workload"] if plan["source"] == plan["workload"] else f"{plan['workload']} ({plan['source']})"
    )
    return f"{name} on {accelerators}, {plan['target_utilization']:.0%} of the time computing"


def _parts(plan: Mapping[str, Any]) -> list[list[str]]:
    both = [plan["training"], plan["inference"]]
    rows = [
        ["", "training", "inference"],
        ["bandwidth", *(_gb_s(each["gb_s"]) for each in both)],
        ["samples/s", *(quantity(each["samples_per_second"]) for each in both)],
        [
            f"reads/s (at most {plan['read_bytes'] >> 20} MiB)",
            *(quantity(each["reads_per_second"]) for each in both),
        ],
        ["capacity", *(size(each["capacity_bytes"]) for each in both)],
    ]
    if both[0]["disks"] is not None:
        rows.append(["disks", *(f"{each['disks']['needed']:,}" for each in both)])
        rows.append(["  because of", *(each["disks"]["bound_by"] for each in both)])
    if both[0]["servers"] is not None:
        rows.append(["servers", *(f"{each['servers']:,}" for each in both)])
    return rows


def _checkpoint_lines(plan: Mapping[str, Any]) -> list[str]:
    saving, given = plan["checkpoints"], plan["checkpoint_budget"]
    if saving is None:
        return []
    head = (
        f"checkpoints of {size(given['nbytes'])}: a failure every {duration(saving['mtbf_seconds'])}, "
        f"{given['restart_seconds']:g} s to restart"
    )
    lines = [head]
    if saving["save_seconds"] is not None:
        lines.append(
            f"to lose at most {given['share']:.1%} of the time, save every "
            f"{duration(saving['interval_seconds'])} in at most {duration(saving['save_seconds'])}, "
            f"which takes {_gb_s(saving['gb_s'])} of writing"
        )
    if saving["on_these_disks"] is not None:
        each = saving["on_these_disks"]
        lines.append(
            f"these disks save in {duration(each['save_seconds'])}: best every "
            f"{duration(each['interval_seconds'])}, which loses {each['lost_share']:.2%} of the time"
        )
    return [*lines, ""]


def _scaling(plan: Mapping[str, Any]) -> list[list[str]]:
    """Return a table with a row for each number of accelerators."""
    with_disks = plan["training"]["disks"] is not None
    with_servers = plan["training"]["servers"] is not None
    with_saves = plan["checkpoints"] is not None
    heads = ["accelerators", "GB/s", "reads/s"]
    heads += ["disks"] * with_disks + ["servers"] * with_servers + ["inference GB/s"] + ["disks"] * with_disks
    rows = [heads + ["save GB/s", "save every"] * with_saves]
    for each in plan["scaling"]:
        training, inference, saving = each["training"], each["inference"], each["checkpoints"]
        row = [
            f"{each['accelerators']:,}",
            quantity(training["gb_s"]),
            quantity(training["reads_per_second"]),
        ]
        row += [f"{training['disks']['needed']:,}"] if with_disks else []
        row += [f"{training['servers']:,}"] if with_servers else []
        row.append(quantity(inference["gb_s"]))
        row += [f"{inference['disks']['needed']:,}"] if with_disks else []
        if with_saves:
            possible = saving["gb_s"] is not None
            row.append(quantity(saving["gb_s"]) if possible else "-")
            row.append(duration(saving["interval_seconds"]) if possible else "-")
        rows.append(row)
    return rows


def _basis(plan: Mapping[str, Any]) -> list[str]:
    """Return sentences: which numbers the plan stands on."""
    disk, server = plan["disk"], plan["server"]
    lines = []
    for name, shown in _DISK_NUMBERS:
        if disk[name] is not None:
            value = size(disk[name]) if name == "capacity_bytes" else quantity(disk[name])
            lines.append(f"a disk {shown.format(value)} ({disk['sources'].get(name, 'given')})")
    if not lines:
        lines.append("to get a number of disks, pass --disk-gb-s, --disk-iops, --disk-capacity or --bench")
    if server is not None:
        parts = [] if server["gb_s"] is None else [f"carries {server['gb_s']:g} GB/s"]
        parts += [] if server["disks"] is None else [f"has {server['disks']} disks"]
        lines.append(f"a server {' and '.join(parts)} (given)")
    lines.append(
        f"one accelerator reads {_gb_s(plan['accelerator']['gb_s'])} when it never waits; inference reads "
        f"{plan['inference_ratio']:g} times the bytes of training"
    )
    if plan["checkpoint_budget"] is not None:
        lines.append(
            f"an accelerator fails every {plan['checkpoint_budget']['mtbf_hours']:g} hours; the training "
            "stops while it saves; intervals by Daly (2006)"
        )
    return lines


def _chart(plan: Mapping[str, Any]) -> Chart:
    counts = [float(row["accelerators"]) for row in plan["scaling"]]
    lines = [
        Series("training", _BLUE, [row["training"]["gb_s"] for row in plan["scaling"]]),
        Series("inference", _ORANGE, [row["inference"]["gb_s"] for row in plan["scaling"]]),
    ]
    if plan["checkpoints"] is not None:
        saves = [row["checkpoints"]["gb_s"] for row in plan["scaling"]]
        lines.append(Series("saving checkpoints", _PURPLE, saves))
    values = [value for line in lines for value in line.values if value]
    chart = Chart(
        _title(plan), axis("accelerators", counts, True, quantity), axis("GB/s", values, True, quantity)
    )
    for line in lines:
        chart.line(counts, line)
    return chart


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cells(row: Sequence[str]) -> list[str]:
    return [escaped(cell) for cell in row]


def _gb_s(value: float) -> str:
    return f"{quantity(value)} GB/s"
