"""The short table of the README: what most people look for, with the peer that they would use otherwise."""

from __future__ import annotations

from typing import NamedTuple

from tables import Row


class Highlight(NamedTuple):
    """A line of the table: a case of a section, and its peers in the order in which they are shown."""

    label: str
    section: str
    case: str
    peers: tuple[str, ...]
    unit: str
    digits: int = 2
    also: str = ""  # our own result elsewhere, kept as a peer of the case


_PROCESSOR = "s per GB"
HIGHLIGHTS = (
    Highlight(
        *("save 1 GB durably with a `Checkpointer`", "saving", "one disk, Checkpointer"),
        *(("DCP", "fio"), "GB/s"),
    ),
    Highlight(
        *("CPU time to save `.pt`", "saving: processor time", "one disk, .pt"),
        *(("torch.save",), _PROCESSOR),
    ),
    Highlight(
        *("CPU time to load and verify `.pt`", "loading: processor time", "one disk, .pt"),
        *(("torch.load",), _PROCESSOR),
    ),
    Highlight(
        *("generate, batch 4, one disk", "streaming", "one disk, least memory"),
        *(("DeepSpeed", "accelerate"), "tokens/s"),
    ),
    Highlight(
        *("generate, batch 1, four disks", "streaming", "4 disks, least memory, batch 1"),
        *(("DeepSpeed, btrfs RAID-0", "accelerate, btrfs RAID-0"), "tokens/s"),
        also="one disk",
    ),
)


def find(rows: list[Row], section: str, case: str, peer: str) -> Row:
    """The row of a case beside the peer whose name begins so."""
    for row in rows:
        if (row["section"], row["case"]) == (section, case) and row["peer"].startswith(peer):
            return row
    raise SystemExit(f"the results have no row {section}: {case} beside {peer}")


def markdown(rows: list[Row]) -> str:
    """The table."""
    lines = ["| | Trunkline | others |", "|---|---|---|"]
    for label, section, case, peers, unit, digits, also in HIGHLIGHTS:
        found = [find(rows, section, case, peer) for peer in peers]
        others = [
            f"{row['peer']} {row['peer_median']:.{digits}f}" for row in found if row["value"] is not None
        ]
        ours = next((row for row in found if "earlier" not in row), found[0])
        own = f"{ours['median']:.{digits}f} {unit}"
        if also:
            own += f" ({also}: {find(rows, section, case, also)['peer_median']:.{digits}f})"
        lines.append(f"| {label} | {own} | {'; '.join(others)} |")
    return "\n".join(lines)
