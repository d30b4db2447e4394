"""Charts as SVG: no library draws them, and nothing is loaded to show them."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 760, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 26, 44  # around the plot
_INK, _MUTED, _GRID = "#1d2329", "#57606a", "#e3e7eb"
_SHADE = 0.3  # opacity of what lies over a plot

Text = Callable[[float], str]


def plain(value: float) -> str:
    """A number as short as it can be: 1000000 as 1e+06."""
    return f"{value:.6g}"


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis, and how its numbers are written."""

    label: str
    low: float
    high: float
    is_log: bool = False
    text: Text = plain

    def place(self, value: float) -> float:
        """Where a value is, from 0 at the beginning to 1 at the end."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, low))
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0

    def ticks(self) -> list[float]:
        """Round numbers to label: at most about ten."""
        if not self.is_log:
            step = _round_up((self.high - self.low) / 6)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [number * step for number in range(first, last + 1)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1, 2, 5) if last - first <= 3 else (1,)
        every = max(1, (last - first) // 8)
        values = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
        return [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]


def axis(
    label: str, values: Sequence[float], is_log: bool = False, text: Text = plain, low: float = 0.0
) -> Axis:
    """Return an axis on which all values are: from `low`, or with a logarithm from the least one above 0."""
    if is_log:
        positive = [value for value in values if value > 0] or [1.0]
        least, most = min(positive), max(positive)
        return Axis(label, least, most if most > least else least * 10, True, text)
    most = max(values, default=low)
    return Axis(label, low, low + _round_up(most - low) if most > low else low + 1, False, text)


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next((factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * 0.999), value)


@dataclass(frozen=True)
class Series:
    """What a chart shows in one colour; None in `values`: nothing there."""

    label: str
    colour: str
    values: Sequence[float | None]


class Chart:
    """A plot with two axes; each method adds to it, and svg() returns it."""

    def __init__(self, title: str, x: Axis, y: Axis) -> None:
        """`title`: for those who cannot see it, and for whom the legend does not suffice."""
        self._title, self._x, self._y = title, x, y
        self._parts: list[str] = []
        self._legend: list[tuple[str, str, float]] = []  # label, colour, opacity

    def line(self, xs: Sequence[float], series: Series) -> None:
        """Connect the points; the line has gaps where there is no value."""
        self._legend.append((series.label, series.colour, 1.0))
        for run in _runs(series.values):
            points = " ".join(self._point(xs[number], series.values[number] or 0.0) for number in run)
            if len(run) == 1:
                x, y = self._point(xs[run[0]], series.values[run[0]] or 0.0).split(",")
                self._parts.append(f'<circle cx="{x}" cy="{y}" r="1.5" fill="{series.colour}"/>')
            else:
                self._parts.append(
                    f'<polyline points="{points}" fill="none" stroke="{series.colour}" stroke-width="1.6" '
                    'stroke-linejoin="round"/>'
                )

    def stack(self, edges: Sequence[float], layers: Sequence[Series]) -> None:
        """Fill areas above each other; value n reaches from edge n to the next one."""
        below = [0.0] * (len(edges) - 1)
        for layer in layers:
            self._legend.append((layer.label, layer.colour, 1.0))
            above = [low + (value or 0.0) for low, value in zip(below, layer.values, strict=True)]
            outline = [*self._steps(edges, above), *reversed(self._steps(edges, below))]
            self._parts.append(f'<path d="M{" L".join(outline)} Z" fill="{layer.colour}"/>')
            below = above

    def columns(self, edges: Sequence[float], series: Series) -> None:
        """Draw a bar for each value, from edge to edge; its number is shown under the pointer."""
        self._legend.append((series.label, series.colour, 1.0))
        for number, value in enumerate(series.values):
            if not value:
                continue
            left, top = self._point(edges[number], value).split(",")
            right, bottom = self._point(edges[number + 1], self._y.low).split(",")
            width = max(0.8, float(right) - float(left) - 0.6)
            height = max(0.8, float(bottom) - float(top))
            span = f"{self._x.text(edges[number])} to {self._x.text(edges[number + 1])}"
            self._parts.append(
                f'<rect x="{left}" y="{float(bottom) - height:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" fill="{series.colour}"><title>{html.escape(span)}: '
                f"{html.escape(self._y.text(value))}</title></rect>"
            )

    def level(self, value: float, label: str) -> None:
        """Draw a dashed horizontal line."""
        self._legend.append((label, _INK, 1.0))
        x, y = self._point(self._x.high, value).split(",")
        self._parts.append(
            f'<line x1="{_LEFT}" x2="{x}" y1="{y}" y2="{y}" stroke="{_INK}" stroke-dasharray="4 3"/>'
        )

    def spans(self, spans: Sequence[tuple[float, float]], series: Series) -> None:
        """Shade the whole height from one x to another; these are shown under the pointer. No values."""
        self._legend.append((series.label, series.colour, _SHADE))
        for low, high in spans:
            left = float(self._point(low, self._y.low).split(",")[0])
            right = float(self._point(high, self._y.low).split(",")[0])
            self._parts.append(
                f'<rect x="{left}" y="{_TOP}" width="{max(1.0, right - left):.1f}" '
                f'height="{_HEIGHT - _TOP - _BOTTOM}" fill="{series.colour}" fill-opacity="{_SHADE}">'
                f"<title>{html.escape(series.label)}: {html.escape(self._x.text(low))} to "
                f"{html.escape(self._x.text(high))}</title></rect>"
            )

    def svg(self) -> str:
        """Return the chart as an element that is also a file of its own."""
        return "".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
                f'width="{_WIDTH}" height="{_HEIGHT}" role="img" font-family="system-ui, sans-serif" '
                f'font-size="11" fill="{_INK}">',
                f"<title>{html.escape(self._title)}</title>",
                f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
                *self._grid(),
                *self._parts,
                *self._legend_parts(),
                "</svg>",
            ]
        )

    def _point(self, x: float, y: float) -> str:
        across = _LEFT + self._x.place(x) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - self._y.place(y) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    def _steps(self, edges: Sequence[float], values: Sequence[float]) -> list[str]:
        points = []
        for number, value in enumerate(values):
            points += [self._point(edges[number], value), self._point(edges[number + 1], value)]
        return points

    def _grid(self) -> list[str]:
        parts = []
        for value in self._y.ticks():
            x, y = self._point(self._x.low, value).split(",")
            parts.append(f'<line x1="{x}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="{_GRID}"/>')
            parts.append(
                f'<text x="{_LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">'
                f"{html.escape(self._y.text(value))}</text>"
            )
        bottom = _HEIGHT - _BOTTOM
        for value in self._x.ticks():
            x = self._point(value, self._y.low).split(",")[0]
            parts.append(f'<line x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}" stroke="{_MUTED}"/>')
            parts.append(
                f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">'
                f"{html.escape(self._x.text(value))}</text>"
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" stroke="{_MUTED}"/>'
            f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle" fill="{_MUTED}">'
            f"{html.escape(self._x.label)}</text>"
            f'<text x="4" y="14" fill="{_MUTED}">{html.escape(self._y.label)}</text>'
        )
        return parts

    def _legend_parts(self) -> list[str]:
        parts, right = [], float(_WIDTH - _RIGHT)
        for label, colour, opacity in reversed(self._legend):
            right -= 6.2 * len(label)
            parts.append(f'<text x="{right:.0f}" y="14">{html.escape(label)}</text>')
            shade = f' fill-opacity="{opacity}"' if opacity < 1 else ""
            parts.append(f'<rect x="{right - 14:.0f}" y="5" width="10" height="10" fill="{colour}"{shade}/>')
            right -= 28
        return parts


def _runs(values: Sequence[float | None]) -> list[list[int]]:
    """Return the numbers of the values that follow each other without a gap."""
    runs: list[list[int]] = [[]]
    for number, value in enumerate(values):
        if value is not None:
            runs[-1].append(number)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
