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


_PROCESSOR = "s per GB"
HIGHLIGHTS = (
    Highlight("save 1 GB durably as `.pt`", "saving", "one disk, .pt", ("torch.save", "fio"), "GB/s"),
    Highlight(
        *("save 1 GB durably as `.safetensors`", "saving", "one disk, .safetensors"),
        *(("safetensors", "fio"), "GB/s"),
    ),
    Highlight(
        *("save 1 GB durably with a `Checkpointer`", "saving", "one disk, Checkpointer"),
        *(("DCP", "fio"), "GB/s"),
    ),
    Highlight(
        *("the same, disk without a limit", "saving", "one disk, unthrottled, Checkpointer"),
        *(("DCP",), "GB/s", 1),
    ),
    Highlight(
        *("processor time of saving `.pt`", "saving: processor time", "one disk, .pt"),
        *(("torch.save",), _PROCESSOR),
    ),
    Highlight(
        *("a background save blocks training for", "overlap", "caller is held, s"), *(("memcpy",), _PROCESSOR)
    ),
    Highlight(
        *("load and verify 1 GB of `.pt`", "loading", "one disk, .pt"), *(("torch.load", "fio"), "GB/s")
    ),
    Highlight(
        *("processor time of that", "loading: processor time", "one disk, .pt"),
        *(("torch.load",), _PROCESSOR),
    ),
    Highlight(
        *("read from four disks as one `Volume`", "sequential", "Volume of 4, read, page-aligned memory"),
        *(("fio on 4 files",), "GB/s"),
    ),
    Highlight(
        *("random reads of 112 KiB", "random", "400 x 112 KiB, into 40 targets, depth 32"),
        *(("fio randread, depth 32",), "GB/s"),
    ),
    Highlight(
        *("generate, a tenth of the weights in memory, one disk", "streaming", "one disk, least memory"),
        *(("DeepSpeed", "accelerate"), "tokens/s"),
    ),
    Highlight(
        *("the same, batch of one, four disks", "streaming", "4 disks, least memory, batch 1"),
        *(("DeepSpeed, btrfs RAID-0", "accelerate, btrfs RAID-0"), "tokens/s"),
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
    for label, section, case, peers, unit, digits in HIGHLIGHTS:
        found = [find(rows, section, case, peer) for peer in peers]
        others = [
            f"{row['peer']} {row['peer_median']:.{digits}f}" for row in found if row["value"] is not None
        ]
        ours = next((row for row in found if "earlier" not in row), found[0])
        lines.append(f"| {label} | {ours['median']:.{digits}f} {unit} | {'; '.join(others)} |")
    return "\n".join(lines)
