#!/usr/bin/env python3
"""Draws a trace of trunkline as a picture: a row for each track, a bar for each slice.

python scripts/draw_trace.py TRACE.json OUT.png      one that exists
python scripts/draw_trace.py --example OUT.png       a load of a file of tensors: docs/images/trace.png
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

COLOURS = {
    "operation": "#b8c4d6",
    "transfer": "#2f6fb3",
    "wait": "#e0e0e0",
    "copy": "#e08a2e",
    "checksum": "#4f9e62",
    "checkpoint": "#8a5fa8",
    "stream": "#c2568a",
}


def example(folder: Path) -> Path:
    """Record the saving and loading of a file of tensors; return the trace."""
    import torch

    import trunkline as tl

    state = {f"layer.{index}": torch.ones(4 << 20) for index in range(8)}
    engine = tl.Engine(block_bytes=2 << 20)
    tl.save(state, folder / "model.safetensors", engine=engine)
    with tl.trace(folder / "trace.json"):
        tl.save(state, folder / "model.safetensors", engine=engine)
        tl.load(folder / "model.safetensors", engine=engine)
    return folder / "trace.json"


def draw(trace: Path, picture: Path) -> None:
    """Draw the slices of the trace, and write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    events: list[dict[str, Any]] = json.loads(trace.read_bytes())["traceEvents"]
    names: dict[tuple[int, int], str] = {}
    groups: dict[int, str] = {}
    for event in events:
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["name"] == "process_name":
            groups[event["pid"]] = event["args"]["name"]
    slices = [event for event in events if event["ph"] == "X"]
    tracks = sorted({(event["pid"], event["tid"]) for event in slices})
    rows = {track: row for row, track in enumerate(tracks)}
    figure, axes = pyplot.subplots(figsize=(11, 0.28 * len(tracks) + 1.2), dpi=110)
    for event in sorted(slices, key=lambda each: -float(each["dur"])):
        category = event["cat"].rpartition(",")[2]
        axes.barh(
            rows[event["pid"], event["tid"]],
            event["dur"] / 1000,
            left=event["ts"] / 1000,
            height=0.8,
            color=COLOURS.get(category, "#999999"),
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_yticks(range(len(tracks)))
    axes.set_yticklabels([f"{groups[pid]}: {names.get((pid, tid), tid)}" for pid, tid in tracks], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    seen = {event["cat"].rpartition(",")[2] for event in slices}
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in seen],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.06 + 0.5 / len(tracks)),
        ncol=len(seen),
        fontsize=7,
        frameon=False,
    )
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def main() -> int:
    """Draw what the command line names."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, picture = sys.argv[1], Path(sys.argv[2])
    if source != "--example":
        draw(Path(source), picture)
        return 0
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        draw(example(Path(folder)), picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
