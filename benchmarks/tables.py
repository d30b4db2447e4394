"""Results of a benchmark as tables in Markdown. A row is a comparison as measurement.py writes it as JSON."""

from __future__ import annotations

from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]


def markdown(rows: list[Row], notes: dict[str, str] | None = None) -> str:
    """A table for each section, with the note about it below."""
    lines: list[str] = []
    for section in dict.fromkeys(row["section"] for row in rows):
        own = [row for row in rows if row["section"] == section]
        lines += ["", f"| {section}, {own[0]['unit']} | ours | peer | compared | goal | peer |"]
        lines += ["|---|---|---|---|---|---|", *map(markdown_row, own)]
        if notes and section in notes:
            lines += ["", notes[section]]
    return "\n".join(lines[1:])


def markdown_row(row: Row) -> str:
    """One line: medians, what they come to beside each other, the goal for that, and the peer."""
    goal = (row["goal"] or "").replace(">=", "\u2265").replace("<=", "\u2264")
    if row["value"] is None:
        return f"| {row['case']} | | | | {goal} | {row['peer']}: {row['why_not']} |"
    sign = "+" if row["compared"] == "difference" else ""
    compared = f"{row['value']:{sign}.3f}{' **missed**' if row['met'] is False else ''}"
    return (
        f"| {row['case']} | {row['median']:.3f} | {row['peer_median']:.3f} | {compared} | {goal} "
        f"| {row['peer']} |"
    )
