"""Time lines of several ranks, charts, and the page of a run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support_replaced import each_value_replaced

from trunkline._svg import Axis, Chart, Series, axis
from trunkline.workload import cli, compare, run, write_report
from trunkline.workload._parse import parse_text
from trunkline.workload._results import text_of
from trunkline.workload._time_line import MOST_BUCKETS, merged_time_line

WORKLOAD = """
model: {name: tiny}
reader: {batch_size: 2}
train: {computation_time: 0.0005, epochs: 3}
dataset: {format: jpeg, num_files_train: 8, record_length: 500, num_files_eval: 4}
evaluation: {eval_time: 0.0001}
workflow: {evaluation: true}
"""


def rank(width_ns: int, first: int, *buckets: tuple[int, int, int]) -> dict[str, Any]:
    """The time line of a rank; a bucket is (compute_ns, wait_ns, bytes)."""
    lists = {key: [each[n] for each in buckets] for n, key in enumerate(("compute_ns", "wait_ns", "bytes"))}
    return {"time_line": {"width_ns": width_ns, "first": first, **lists}}


def test_time_lines_are_added_up_at_the_coarser_width() -> None:
    fine = rank(1_000_000, 5, (10, 20, 1), (30, 40, 2), (50, 60, 4))  # from 5 to 8 ms
    coarse = rank(2_000_000, 2, (100, 200, 8), (300, 400, 16), (0, 0, 0), (7, 0, 32))  # from 4 to 12 ms
    merged = merged_time_line([fine, coarse])
    assert merged["bucket_seconds"] == 0.002
    assert merged["bytes"] == [9, 22, 0, 32]
    assert merged["compute_seconds"] == pytest.approx([55e-9, 190e-9, 0, 3.5e-9])
    assert merged["wait_seconds"] == pytest.approx([110e-9, 250e-9, 0, 0])
    assert merged["utilization"] == [pytest.approx(1 / 3), pytest.approx(19 / 44), None, 1.0]


def test_time_lines_are_bounded() -> None:
    """Also where ranks run at different times."""
    early, late = rank(1000, 0, *[(1, 0, 1)] * 512), rank(1000, 10_000, *[(1, 0, 1)] * 512)
    merged = merged_time_line([early, late])
    assert MOST_BUCKETS / 2 < len(merged["bytes"]) <= MOST_BUCKETS
    assert sum(merged["bytes"]) == 1024
    assert merged["bucket_seconds"] == 16_000 / 1e9


def test_a_phase_without_steps_has_an_empty_time_line() -> None:
    merged = merged_time_line([rank(1000, 0)])
    lists = ("compute_seconds", "wait_seconds", "bytes", "utilization", "checkpoint_spans")
    in_flight = ("reads_in_flight", "bytes_in_flight")
    assert merged == {"bucket_seconds": 0.0, **{key: [] for key in lists}, **dict.fromkeys(in_flight)}
    merged = merged_time_line([rank(1000, 0)], [lane(1000, 0, (5, 5.0))])
    assert [merged[key] for key in in_flight] == [[], []]


def lane(width_ns: int, first: int, *buckets: tuple[int, float]) -> dict[str, Any]:
    """The reads in flight of a lane; a bucket is (read_ns, byte_ns)."""
    lists = {key: [each[n] for each in buckets] for n, key in enumerate(("read_ns", "byte_ns"))}
    return {"width_ns": width_ns, "first": first, **lists}


def test_reads_in_flight_are_added_up_where_accelerators_ran() -> None:
    steps = rank(1000, 10, *[(500, 500, 1)] * 4)  # from 10 to 14 us
    lanes = [
        lane(1000, 8, *[(2000, 8000.0)] * 5),  # two reads of 4 bytes all the time, from 8 to 13 us
        lane(2000, 6, (4000, 100.0)),  # two, from 12 to 14 us
        lane(1000, 20, (1000, 1.0)),  # after the last step
    ]
    merged = merged_time_line([steps, steps], lanes)
    assert merged["bucket_seconds"] == 0.000002  # of the widest
    assert merged["reads_in_flight"] == [2.0, 1.0 + 2.0]
    assert merged["bytes_in_flight"] == [8.0, 4.0 + 0.05]


def test_checkpoints_are_placed_on_the_time_line() -> None:
    steps = rank(1000, 10, *[(500, 500, 1)] * 4)
    saves = [(2_000, 9_000), (9_500, 11_000), (12_000, 13_500), (20_000, 30_000)]
    spans = merged_time_line([steps], None, saves)["checkpoint_spans"]
    assert spans == [[0, pytest.approx(1e-6)], [2e-6, 3.5e-6], [1e-5, 2e-5]]  # none from before the start


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_time_line_of_a_run_is_complete(ranks: int) -> None:
    document = run(parse_text(WORKLOAD, "tiny.yaml"), None, ranks)
    line = document["time_line"]
    assert 0 < len(line["bytes"]) <= MOST_BUCKETS
    assert sum(line["compute_seconds"]) == pytest.approx(document["compute_seconds"])
    spent = sum(line["compute_seconds"]) + sum(line["wait_seconds"])
    if ranks == 1:  # of several, results have the longest time, and the time line the mean
        assert spent == pytest.approx(document["running_seconds"])
    # Not before the first step, nor after the evaluations that follow each epoch.
    assert sum(count for _, count in document["wait_histogram_ns"]) == ranks * (document["steps"] - 3)
    assert sum(document["evaluation"]["time_line"]["compute_seconds"]) == pytest.approx(
        document["evaluation"]["compute_seconds"]
    )


def elements(svg: str, name: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{name}")


def test_lines_have_gaps_where_there_is_no_value() -> None:
    chart = Chart("t", Axis("x", 0, 10), Axis("y", 0, 1))
    chart.line([0, 1, 2, 3, 4, 5], Series("s", "#000000", [0.0, 1.0, None, None, 0.5, None]))
    [line] = elements(chart.svg(), "polyline")
    assert line.get("points") == "64.0,206.0 131.2,26.0"
    [point] = elements(chart.svg(), "circle")
    assert (point.get("cx"), point.get("cy")) == ("332.8", "116.0")


def test_areas_are_stacked() -> None:
    chart = Chart("t", Axis("x", 0, 2), Axis("y", 0, 1))
    chart.stack([0, 1, 2], [Series("a", "#111111", [0.5, 1.0]), Series("b", "#222222", [0.25, None])])
    lower, upper = elements(chart.svg(), "path")
    assert str(lower.get("d")).startswith("M64.0,116.0 L400.0,116.0 L400.0,26.0 L736.0,26.0 L736.0,206.0")
    assert str(upper.get("d")).startswith("M64.0,71.0 L400.0,71.0 L400.0,26.0 L736.0,26.0 L736.0,26.0")


def test_spans_are_shaded_over_the_whole_height() -> None:
    chart = Chart("t", Axis("x", 0, 10), Axis("y", 0, 1))
    chart.spans([(0.0, 5.0), (9.0, 9.0)], Series("<save>", "#444444", ()))
    wide, narrow, legend = (each for each in elements(chart.svg(), "rect") if each.get("fill") == "#444444")
    assert [wide.get(key) for key in ("x", "y", "width", "height")] == ["64.0", "26", "336.0", "180"]
    assert narrow.get("width") == "1.0"  # can be seen
    assert wide.get("fill-opacity") == legend.get("fill-opacity") == "0.3"
    assert "&lt;save&gt;: 0 to 5" in chart.svg()


def test_columns_say_their_numbers_and_names_are_escaped() -> None:
    chart = Chart("a < b & c", axis("x", [1, 1000], is_log=True), axis("y", [7.0]))
    chart.columns([1, 10, 100, 1000], Series("<s>", "#333333", [7.0, 0.0, 3.0]))
    svg = chart.svg()
    assert "1 to 10: 7" in svg
    assert "100 to 1000: 3" in svg
    assert len([each for each in elements(svg, "rect") if each.get("fill") == "#333333"]) == 2 + 1  # legend
    assert "&lt;s&gt;" in svg


@pytest.mark.parametrize(
    ("made", "ticks"),
    [
        (axis("", [0.0, 7.3]), [0, 2, 4, 6, 8, 10]),
        (axis("", []), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (axis("", [1.0, 1e5], is_log=True), [1, 10, 100, 1e3, 1e4, 1e5]),
        (axis("", [0.02, 0.3], is_log=True), [0.02, 0.05, 0.1, 0.2]),
        (axis("", [0.0, 5.0], is_log=True), [5, 10, 20, 50]),
    ],
)
def test_axes_have_round_numbers(made: Axis, ticks: list[float]) -> None:
    assert made.ticks() == pytest.approx(ticks)


class _Page(HTMLParser):
    """Checks that elements are closed, and collects what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.loads += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    assert page.loads == []
    assert "script" not in page.names
    return page


def test_a_page_has_all_charts_and_loads_nothing(tmp_path: Path) -> None:
    document = run(parse_text(WORKLOAD, "tiny.yaml"), None, 2)
    document["workload"] = "<b>tiny"
    path = tmp_path / "run.html"
    write_report(json.loads(json.dumps(document)), path)
    assert parsed(path).names.count("svg") >= 3 + 3 + 1 + 1  # training, evaluation, steps, ranks
    text = path.read_text(encoding="utf-8")
    assert "&lt;b&gt;tiny" in text
    assert "<b>" not in text
    assert "tiny.yaml" in text


def in_flight_document() -> dict[str, Any]:
    """Of a run of one phase, which read and saved."""
    document = run(parse_text(WORKLOAD, "tiny.yaml", ["workflow.evaluation=false"]), None, 1)
    line = document["time_line"]
    end = len(line["bytes"]) * line["bucket_seconds"]
    line["reads_in_flight"] = [3.0 for _ in line["bytes"]]
    line["bytes_in_flight"] = [2_000_000.0 for _ in line["bytes"]]
    line["checkpoint_spans"] = [[0.0, end / 2], [end, 2 * end]]
    return document


def test_a_page_shows_reads_in_flight_and_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    document = in_flight_document()
    write_report(document, path)
    text = path.read_text(encoding="utf-8")
    charts = dict(re.findall(r"<title>([A-Z][^<]*over time)</title>(.*?)</svg>", text))
    assert [*charts][:3] == [
        "Utilization over time",
        "Reads in flight over time",
        "Bytes in flight over time",
    ]
    assert len(charts) == 5
    for chart in charts.values():
        assert chart.count("<title>checkpoint: ") == 2
        assert chart.count(">checkpoint</text>") == 1
    for name in charts:  # the plot reaches to the end of the last checkpoint, and steps fill half of it
        [last] = re.findall(
            r'<rect x="([\d.]+)"[^>]*width="([\d.]+)"[^>]*><title>checkpoint: [^<]*</title></rect>'
            r"(?!.*<title>checkpoint)",
            charts[name],
        )
        assert float(last[0]) == pytest.approx(400, abs=0.2)
        assert float(last[0]) + float(last[1]) == pytest.approx(736, abs=0.2)
    assert text.count("Checkpoints were saved in the shaded times.") == 1
    # On a narrow screen, tables with long rows are scrolled, not the page.
    assert text.count("<table") - text.count('<div class="wide"><table') == 1  # the summary


def test_results_of_earlier_versions_have_a_page(tmp_path: Path) -> None:
    """They have neither reads in flight nor checkpoints in their time lines."""
    path, document = tmp_path / "run.html", in_flight_document()
    for key in ("reads_in_flight", "bytes_in_flight", "checkpoint_spans"):
        del document["time_line"][key]
    write_report(document, path)
    text = path.read_text(encoding="utf-8")
    assert "Utilization over time" in text
    assert "in flight" not in text
    assert "checkpoint:" not in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_of_one_step_has_a_page(tmp_path: Path, ranks: int) -> None:
    """Its utilization is not known, as the first step does not count."""
    document = run(parse_text(WORKLOAD, "tiny.yaml", ["train.total_training_steps=1"]), None, ranks)
    assert document["utilization"] is None
    write_report(document, tmp_path / "run.html")
    assert "not measured" in (tmp_path / "run.html").read_text(encoding="utf-8")
    text_of(document)


def test_results_that_are_not_complete_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    with pytest.raises(ValueError, match="results is not the result of a run"):
        write_report({"command": "bench"}, path)
    document = run(parse_text(WORKLOAD, "tiny.yaml"), None)
    del document["time_line"]
    with pytest.raises(ValueError, match=r"results: incomplete, or of another version .*'time_line'"):
        write_report(document, path)
    assert not path.exists()


def test_a_page_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    document = run(parse_text(WORKLOAD, "tiny.yaml", ["train.total_training_steps=1"]), None)
    path = tmp_path / "none" / "run.html"
    with pytest.raises(FileNotFoundError, match=f"^cannot write {path}: .*create it .mkdir -p {path.parent}"):
        write_report(document, path)


def test_results_with_any_value_replaced(tmp_path: Path) -> None:
    """Each is drawn and compared, or rejected with ValueError."""
    short = parse_text(WORKLOAD, "tiny.yaml", ["train.total_training_steps=2"])
    document = json.loads(json.dumps(run(short, None, 2)))
    for phase in (document, document["evaluation"]):
        for part in (phase, phase["time_line"]):
            part.update({key: value[:2] for key, value in part.items() if isinstance(value, list)})
    rejected = 0
    for changed in each_value_replaced(document):
        try:
            write_report(changed, tmp_path / "run.html")
        except ValueError:
            rejected += 1
        try:
            compare(document, changed)
        except ValueError:
            rejected += 1
    assert rejected > 100


def test_run_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "w.yaml", tmp_path / "out.html"
    file.write_text(WORKLOAD)
    command = ["workload", "run", str(file), "--null-device", "--json", "--report"]
    assert cli.main([*command, str(page)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 12
    assert f"report: {page}" in captured.err
    parsed(page)
    assert cli.main([*command, str(tmp_path / "none" / "out.html")]) == 2
    assert re.search(
        r"--report: cannot write .*out.html: no such file or directory .*mkdir -p", capsys.readouterr().err
    )


def test_a_report_is_named_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["workload", "run", "unet3d_h100", "--null-device", "--report", str(tmp_path / "out.txt")]
    assert cli.main(command) == 2
    assert capsys.readouterr().err.endswith("out.txt must end with .html: a report is a page of HTML\n")
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(WORKLOAD)
    (tmp_path / "published").mkdir()
    link = tmp_path / "link.html"
    link.symlink_to("published/page.html")
    arguments = ["run", str(tmp_path / "tiny.yaml"), "--null-device", "--report", str(link)]
    assert cli.main(["workload", *arguments]) == 0
    assert link.is_symlink()
    assert (tmp_path / "published" / "page.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "no space left on device (ENOSPC)"),
        (ValueError("no such results"), "no such results"),
    ],
)
def test_a_report_that_cannot_be_written_does_not_lose_the_results(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    file, page = tmp_path / "w.yaml", tmp_path / "out.html"
    file.write_text(WORKLOAD)

    def fail(document: dict[str, Any], path: str) -> None:
        raise error

    monkeypatch.setattr(cli, "write_report", fail)
    assert cli.main(["workload", "run", str(file), "--null-device", "--json", "--report", str(page)]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 12
    assert f"trunkline workload run: {message}" in captured.err
    assert not page.exists()
