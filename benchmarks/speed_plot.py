"""The picture of the README and of docs/performance.md: bars beside those of peers, from kept results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from highlights import find
from tables import Row

COLOURS = {True: "#00897b", False: "#b0b7bd"}  # ours, others


class Panel(NamedTuple):
    """Some measurements in one unit: pairs of ours and a peer, or one of ours with several peers."""

    title: str
    better: str
    digits: int
    groups: tuple[tuple[str, str, str, tuple[str, ...]], ...]  # what we are called, section, case, peers


_SAVES = (("tl.save .pt", ".pt", "torch.save"), ("tl.save .safetensors", ".safetensors", "safetensors"))
_STEP = ("tl.Checkpointer", "Checkpointer", "DCP")
PANELS = (
    Panel(
        "Save 1 GB durably, disk of 1 GB/s",
        "GB/s, longer is better",
        2,
        tuple((name, "saving", f"one disk, {case}", (peer,)) for name, case, peer in (*_SAVES, _STEP)),
    ),
    Panel(
        "Save 1 GB durably, disk without a limit",
        "GB/s, longer is better",
        1,
        tuple(
            (name, "saving", f"one disk, unthrottled, {case}", (peer,))
            for name, case, peer in (*_SAVES, _STEP)
        ),
    ),
    Panel(
        "Processor time per GB",
        "seconds, shorter is better",
        2,
        (
            ("tl.save .pt", "saving: processor time", "one disk, .pt", ("torch.save",)),
            ("tl.Checkpointer", "saving: processor time", "one disk, Checkpointer", ("DCP",)),
            ("tl.load .pt", "loading: processor time", "one disk, .pt", ("torch.load",)),
        ),
    ),
    Panel(
        "Generate with a tenth of the weights in memory",
        "tokens/s, longer is better",
        2,
        (
            (
                "Trunkline, one disk, batch of 4",
                "streaming",
                "one disk, least memory",
                ("accelerate", "DeepSpeed"),
            ),
            (
                "Trunkline, four disks, batch of 1",
                "streaming",
                "4 disks, least memory, batch 1",
                ("accelerate, btrfs RAID-0", "DeepSpeed, btrfs RAID-0"),
            ),
        ),
    ),
)


def bars(panel: Panel, rows: list[Row]) -> list[list[tuple[str, float, bool]]]:
    """Groups of bars: name, length, and whether it is ours."""
    groups = []
    for name, section, case, peers in panel.groups:
        found = [find(rows, section, case, peer) for peer in peers]
        group = [(name, float(found[0]["median"]), True)]
        group += [
            (row["peer"], float(row["peer_median"]), False) for row in found if row["value"] is not None
        ]
        groups.append(group)
    return groups


def digest(rows: list[Row]) -> str:
    """A short hash of the data behind the picture, which the file carries."""
    shown = [[*panel[:3], bars(panel, rows)] for panel in PANELS]
    return f"data {hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]}"


def draw(rows: list[Row], path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": "trunkline", "font.size": 9, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(2, 2, figsize=(11, 5.6), layout="constrained")
    for panel, ax in zip(PANELS, axes.flat, strict=True):
        _draw_panel(panel, bars(panel, rows), ax)
    figure.savefig(path, metadata={"Date": None, "Description": digest(rows)})
    plt.close(figure)


def _draw_panel(panel: Panel, groups: list[list[tuple[str, float, bool]]], ax: Any) -> None:
    position, ticks, names = 0.0, [], []
    for group in groups:
        for name, length, is_ours in group:
            ax.barh(position, length, height=0.8, color=COLOURS[is_ours])
            ax.annotate(
                f"{length:.{panel.digits}f}",
                (length, position),
                (3, 0),
                textcoords="offset points",
                va="center",
            )
            ticks.append(position)
            names.append(name)
            position += 1
        position += 0.5
    ax.set_yticks(ticks, names)
    ax.invert_yaxis()
    ax.set_title(f"{panel.title}\n{panel.better}", loc="left", fontsize=9)
    ax.margins(x=0.12)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.tick_params(bottom=False, labelbottom=False, left=False)
