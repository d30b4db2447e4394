"""Sizes for people."""


def size(count: float) -> str:
    """A number of bytes: 13.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # which would be 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
