"""Numbers for people: quantities, and durations with a unit that suits them."""


def quantity(value: float) -> str:
    """Return any other number: 0.0124, 1.236, 12,360."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Time between two events: 1.5 ms; for long ones 3.1 h."""
    for scale, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.3g} {unit}"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def percent(share: float | None) -> str:
    """A share of the time: 96.07%."""
    return "not measured" if share is None else f"{share:.2%}"
