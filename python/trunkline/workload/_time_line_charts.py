"""Charts of the time line of a phase, for the page of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from trunkline._html import figure
from trunkline._readable import duration
from trunkline._svg import Axis, Chart, Series, axis

_BLUE, _GREEN, _ORANGE, _VIOLET = "#1f6feb", "#1a7f5a", "#e0a030", "#8250df"
# What an accelerator does, from below: where in the time line, name, colour.
_ACTIVITIES = (("compute_seconds", "computing", _GREEN), ("wait_seconds", "waiting", _ORANGE))


def charts_over_time(phase: Mapping[str, Any], extend: bool = True) -> list[str]:
    """Return the charts of a phase, with their captions, as HTML.

    extend: show checkpoints that are saved after the last step, too.
    """
    line = phase["time_line"]
    count, width = len(line["bytes"]), line["bucket_seconds"]
    if not count:
        return ["<p>No step was run.</p>"]
    end = count * width
    # Documents of earlier versions have no spans.
    saves = [(low, high) for low, high in line.get("checkpoint_spans", ()) if extend or low < end]
    last = max([end, *(high for _, high in saves)]) if extend else end
    time = Axis("seconds since the first step", 0.0, last)
    middles = [(number + 0.5) * width for number in range(count)]
    each = f"Each value is the mean of {duration(width)}."
    marks = " Checkpoints were saved in the shaded times." if saves else ""
    return [
        _figure(
            _utilization(phase, time, middles),
            saves,
            f"Time of computation divided by running time. {each}{marks}",
        ),
        *_in_flight(line, time, middles, saves),
        _figure(
            _bandwidth(phase, time, middles),
            saves,
            "Bytes of samples, spread over the step that uses them, of all accelerators.",
        ),
        _figure(
            _activities(line, time),
            saves,
            "Of an accelerator, on average. Where the areas do not reach 100 %, it was not running.",
        ),
    ]


def percent_text(share: float) -> str:
    """A share as an axis shows it."""
    return f"{share * 100:.3g} %"


def _figure(chart: Chart, saves: Sequence[tuple[float, float]], caption: str) -> str:
    if saves:
        chart.spans(saves, Series("checkpoint", _VIOLET, ()))
    return figure(chart.svg(), caption)


def _utilization(phase: Mapping[str, Any], time: Axis, middles: Sequence[float]) -> Chart:
    chart = Chart("Utilization over time", time, Axis("utilization", 0.0, 1.0, text=percent_text))
    chart.line(middles, Series("utilization", _BLUE, phase["time_line"]["utilization"]))
    if phase["utilization"] is not None:
        chart.level(phase["utilization"], f"in all: {phase['utilization']:.1%}")
    return chart


def _in_flight(
    line: Mapping[str, Any], time: Axis, middles: Sequence[float], saves: Sequence[tuple[float, float]]
) -> list[str]:
    reads, nbytes = line.get("reads_in_flight"), line.get("bytes_in_flight")
    if reads is None or nbytes is None:  # nothing was read
        return []
    megabytes = [each / 1e6 for each in nbytes]
    figures = []
    for title, unit, values, caption in (
        (
            "Reads in flight over time",
            "reads",
            reads,
            "Reads that were sent to storage and had not ended, of all accelerators, on average. Large reads "
            "are sent in pieces, which count each.",
        ),
        ("Bytes in flight over time", "MB", megabytes, "Bytes of these reads."),
    ):
        chart = Chart(title, time, axis(unit, values))
        chart.line(middles, Series(title.partition(" over")[0].lower(), _BLUE, values))
        figures.append(_figure(chart, saves, caption))
    return figures


def _bandwidth(phase: Mapping[str, Any], time: Axis, middles: Sequence[float]) -> Chart:
    rates = _rates(phase["time_line"])
    known = [rate for rate in rates if rate is not None]
    chart = Chart("Read bandwidth over time", time, axis("GB/s", [*known, phase["gb_s"]]))
    chart.line(middles, Series("samples consumed", _BLUE, rates))
    return chart


def _rates(line: Mapping[str, Any]) -> list[float | None]:
    """Return the GB/s of each bucket while accelerators ran, None where they did not."""
    rates: list[float | None] = []
    for nbytes, *spent in zip(line["bytes"], *(line[key] for key, _, _ in _ACTIVITIES), strict=True):
        running = sum(spent)
        rates.append(nbytes / running / 1e9 if running else None)
    return rates


def _activities(line: Mapping[str, Any], time: Axis) -> Chart:
    width = line["bucket_seconds"]
    edges = [number * width for number in range(len(line["bytes"]) + 1)]
    chart = Chart(
        "What accelerators do over time", time, Axis("share of the time", 0.0, 1.0, text=percent_text)
    )
    layers = [Series(name, colour, [each / width for each in line[key]]) for key, name, colour in _ACTIVITIES]
    chart.stack(edges, layers)
    return chart
