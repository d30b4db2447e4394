"""Sizes on the examples' command lines."""

from __future__ import annotations

import argparse

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "512MiB" or "1.5GB"; what argparse reports for anything else."""
    unit = next((unit for unit in UNITS if text.lower().endswith(unit.lower())), None)
    try:
        return int(float(text[: -len(unit)]) * UNITS[unit]) if unit else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; try 1GB or 512MiB") from None
