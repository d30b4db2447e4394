"""Mixed work, ranges of block sizes, logs of latencies, gdsio and `bench diff` of the command line."""

import csv
import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support_program import PROGRAM

SMALL = ["--size", "8MiB", "--block", "64KiB", "--queue-depth", "8", "--repeat", "1"]
RANGE = ["--size", "8MiB", "--block", "4KiB-64KiB", "--queue-depth", "8", "--repeat", "1"]


def run(*arguments: str | Path, expect: int = 0, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program; its exit status must be `expect`. `path`: PATH, in place of ours."""
    result = subprocess.run(
        [str(PROGRAM), "bench", *map(str, arguments)],
        env={**os.environ, **({} if path is None else {"PATH": path})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == expect, result.stderr
    return result


def bench(*arguments: str | Path, path: str | None = None) -> dict[str, Any]:
    """The JSON of a benchmark."""
    document: dict[str, Any] = json.loads(run(*arguments, "--json", path=path).stdout)
    return document


def logged(log: Path) -> list[dict[str, str]]:
    """The transfers in a log of latencies."""
    with log.open(newline="") as file:
        return list(csv.DictReader(file))


def only_row(document: dict[str, Any]) -> dict[str, Any]:
    [row] = document["results"]
    assert isinstance(row, dict)
    return row


# IOPS, mixed work, ranges -----------------------------------------------------------------------------------


def test_iops_are_transfers_a_second(tmp_path: Path) -> None:
    row = only_row(bench(tmp_path, *SMALL, "--read"))
    [single] = row["runs"]
    assert row["transfers"] == 128
    assert single["iops"] == pytest.approx(128 / single["seconds"])
    assert row["iops"] == single["iops"]
    assert "IOPS" in run(tmp_path, *SMALL, "--read").stdout


@pytest.mark.parametrize("order", [[], ["--random"]], ids=["sequential", "random"])
@pytest.mark.parametrize("blocks", [SMALL, RANGE], ids=["equal", "range"])
def test_a_mix_is_verified_in_both_directions(tmp_path: Path, order: list[str], blocks: list[str]) -> None:
    document = bench(tmp_path, *blocks, "--mix", "70", "--verify", "--repeat", "2", "--files", "2", *order)
    row = only_row(document)
    assert (row["name"], row["operation"], row["read_percent"]) == ("mixed 70/30", "mixed", 70)
    assert row["verified"]
    assert all(each["bytes"] == 2 * (8 << 20) for each in row["runs"])
    parts = row["reads"], row["writes"]
    assert sum(part["latency_us"]["count"] for part in parts) == row["transfers"]
    assert parts[0]["latency_us"]["count"] / row["transfers"] == pytest.approx(0.7, abs=0.15)
    assert all(part["gb_s"] > 0 and part["iops"] > 0 for part in parts)
    assert row["gb_s_with_sync"] <= row["gb_s"]
    assert list(tmp_path.iterdir()) == []


def test_a_mix_goes_on_for_the_duration(tmp_path: Path) -> None:
    row = only_row(bench(tmp_path, *SMALL, "--mix", "50", "--duration", "0.3"))
    assert row["runs"][0]["seconds"] >= 0.3
    table = run(tmp_path, *SMALL, "--mix", "50").stdout
    for part in ("mixed 50/50", "  reads", "  writes"):
        assert part in table


def test_a_mix_is_added_to_the_rows_that_are_named(tmp_path: Path) -> None:
    rows = bench(tmp_path, *SMALL, "--mix", "0", "--read")["results"]
    assert [row["name"] for row in rows] == ["read", "mixed 0/100"]
    assert rows[1]["reads"]["gb_s"] == 0


def test_a_mix_never_writes_to_an_existing_file(tmp_path: Path) -> None:
    data = tmp_path / "model.bin"
    data.write_bytes(bytes(range(256)) * 4096)
    message = run(data, *SMALL, "--mix", "70", "--size", "1MiB", expect=2).stderr
    assert f"--mix: {data} is an existing file, which bench only reads" in message
    assert data.read_bytes() == bytes(range(256)) * 4096


@pytest.mark.parametrize("text", ["101", "-1", "x", "70%"])
def test_a_mix_is_a_percentage(tmp_path: Path, text: str) -> None:
    assert "--mix: must be a whole number from 0 to 100" in run(tmp_path, "--mix", text, expect=2).stderr


@pytest.mark.parametrize("order", [[], ["--random"]], ids=["sequential", "random"])
def test_a_range_covers_every_byte_in_blocks_of_its_sizes(tmp_path: Path, order: list[str]) -> None:
    log = tmp_path / "log.csv"
    document = bench(tmp_path, *RANGE, "--read", "--seed", "7", "--log", log, *order)
    assert document["options"]["least_block_bytes"] == 4096
    assert document["options"]["block_bytes"] == 65536
    lines = logged(log)
    pieces = sorted((int(line["offset"]), int(line["bytes"])) for line in lines)
    assert pieces[0][0] == 0
    assert all(at + size == after for (at, size), (after, _) in itertools.pairwise(pieces))
    assert sum(pieces[-1]) == 8 << 20
    assert all(size % 4096 == 0 and size <= 65536 for _, size in pieces)
    assert len({size for _, size in pieces}) == 16
    first = log.read_text()
    bench(tmp_path, *RANGE, "--read", "--seed", "7", "--log", log, *order)
    again = sorted((int(each["offset"]), int(each["bytes"])) for each in logged(log))
    assert again == pieces
    assert first != log.read_text()  # other latencies


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_mixes_and_varies_alike(tmp_path: Path) -> None:
    document = bench(tmp_path, *RANGE, "--mix", "70", "--random", "--seed", "3", "--compare", "fio")
    row = only_row(document)
    for argument in ("--rw=randrw", "--rwmixread=70", "--bsrange=4096-65536", "--randseed=3"):
        assert argument in row["fio"]["command"]
    assert row["fio"]["runs"][0]["bytes"] == row["runs"][0]["bytes"]
    assert row["fio"]["iops"] > 0
    assert "70% of them read" in document["fio"]["terms"]


# The log of latencies ---------------------------------------------------------------------------------------


def test_percentiles_are_those_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    document = bench(tmp_path, *SMALL, "--mix", "60", "--read", "--repeat", "2", "--log", log)
    assert document["options"]["log"] == str(log)
    lines = logged(log)
    assert {(line["row"], line["run"]) for line in lines} == {
        (name, number) for name in ("read", "mixed 60/40") for number in "12"
    }
    mixed = document["results"][1]
    for row, operations in (
        (document["results"][0], ("read",)),
        (mixed, ("read", "write")),
        ({"name": mixed["name"], **mixed["reads"]}, ("read",)),
        ({"name": mixed["name"], **mixed["writes"]}, ("write",)),
    ):
        values = sorted(
            float(line["latency_us"])
            for line in lines
            if line["row"] == row["name"] and line["operation"] in operations
        )
        latency = row["latency_us"]
        assert latency["exact"] is True
        assert latency["count"] == len(values)
        assert latency["mean"] == pytest.approx(sum(values) / len(values))
        for name, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("p99.9", 99.9), ("max", 100)):
            rank = max(1, math.ceil(percent / 100 * len(values)))
            assert latency[name] == pytest.approx(values[rank - 1])
    times = [float(line["time_us"]) for line in lines if (line["row"], line["run"]) == ("read", "2")]
    assert times == sorted(times)
    assert times[0] == 0
    assert bench(tmp_path, *SMALL, "--read")["results"][0]["latency_us"]["exact"] is False


def test_a_log_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "log.csv"
    assert f"mkdir -p {missing.parent}" in run(tmp_path, *SMALL, "--log", missing, expect=2).stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--log", "--output", "--trace"])
def test_a_fifo_is_rejected_before_it_is_opened(tmp_path: Path, option: str) -> None:
    """Nobody reads it: opening it would wait for ever, and Ctrl-C would not end that."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    message = run(tmp_path, *SMALL, option, fifo, expect=2).stderr
    assert f"{option} {fifo} is a FIFO" in message
    assert ">(gzip" in message


def test_a_pipe_of_the_shell_receives_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    command = [str(PROGRAM), "bench", str(tmp_path), *SMALL, "--read", "--repeat", "1", "--log"]
    line = f"{shlex.join(command)} >(cat > {shlex.quote(str(log))}; echo read)"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line + " | cat"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("read\n"), done.stdout  # the reader of the log has ended, too
    assert log.read_text().startswith("row,run,")


# gdsio ------------------------------------------------------------------------------------------------------

GDSIO = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/arguments"
echo "IoType: READ XferType: CPUONLY Threads: 8 DataSetSize: 8192/8192(KiB) IOSize: 64(KiB)" \\
  "Throughput: 2.000000 GiB/sec, Avg_Latency: 250.500000 usecs ops: 128 total_time 0.004000 secs"
"""


def fake_gdsio(folder: Path, text: str = GDSIO) -> str:
    """PATH with a program that stands in for gdsio in `folder`."""
    folder.mkdir()
    program = folder / "gdsio"
    program.write_text(text)
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_gdsio_is_compared_on_the_same_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    path = fake_gdsio(tmp_path / "tools")
    options = ["--lanes", "1", "--write-mode", "overwrite", "--compare", "gdsio"]
    document = bench(data, *SMALL, *options, path=path)
    assert document["options"]["compare"] == ["gdsio"]
    for row, kind in zip(document["results"], ("0", "1"), strict=True):
        [file] = document["paths"][0]["files"]
        assert row["gdsio"]["command"][1:] == [
            *("-f", file, "-d", "0", "-w", "8", "-s", "8192K", "-i", "64K", "-x", "1", "-I", kind)
        ]
        assert row["gdsio"]["gb_s"] == pytest.approx(2 * (1 << 30) / 1e9)
        assert row["gdsio"]["iops"] == pytest.approx(32000)
        assert row["gdsio"]["ratio_gb_s"] == pytest.approx(row["gb_s"] / row["gdsio"]["gb_s"])
        assert row["gdsio"]["runs"][0]["latency_us"]["mean"] == 250.5
    assert len((tmp_path / "tools/arguments").read_text().splitlines()) == 2
    table = run(data, *SMALL, *options, path=path).stdout
    assert "gdsio GB/s" in table
    assert "gdsio ran 8 threads" in table
    assert list(data.iterdir()) == []


def test_gdsio_that_fails_is_an_error_with_its_output(tmp_path: Path) -> None:
    path = fake_gdsio(tmp_path / "tools", "#!/bin/sh\necho no GPU here >&2\nexit 3\n")
    message = run(tmp_path, *SMALL, "--read", "--compare", "gdsio", expect=1, path=path).stderr
    assert "gdsio ended with status 3: no GPU here" in message
    assert "run it by hand: " in message


@pytest.mark.skipif(Path("/usr/local/cuda/gds/tools/gdsio").exists(), reason="gdsio is installed")
def test_without_gdsio_it_says_what_to_install(tmp_path: Path) -> None:
    message = run(tmp_path, *SMALL, "--compare", "gdsio", expect=2, path=str(tmp_path)).stderr
    assert "there is no gdsio in PATH" in message
    assert "gds-tools" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mix", "70"], "does not mix reads and writes"),
        (["--block", "4KiB-64KiB"], "does not choose block sizes from a range"),
        (["--files", "2"], "on one file only"),
        (["--direct", "never"], "always uses O_DIRECT"),
    ],
)
def test_what_gdsio_cannot_do_is_an_error(tmp_path: Path, options: list[str], message: str) -> None:
    result = run(tmp_path, *SMALL, *options, "--compare", "fio,gdsio", expect=2)
    assert message in result.stderr
    assert "use --compare fio" in result.stderr


# bench diff -------------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    file = tmp_path / "results.json"
    bench(data, *SMALL, "--output", file)
    return file


def scaled(results: Path, factor: float, row: str = "read") -> Path:
    """A copy of the results in which one row is `factor` times as fast."""
    document = json.loads(results.read_text())
    for each in document["results"]:
        if each["name"] == row:
            each["gb_s"] *= factor
    copy = results.with_name(f"{factor}.json")
    copy.write_text(json.dumps(document))
    return copy


def test_diff_exits_with_1_only_if_a_row_is_slower_by_more_than_allowed(results: Path) -> None:
    slower = scaled(results, 0.9)
    assert run("diff", results, slower, "--fail-over", "5%", expect=1).stdout.count("slower") == 1
    run("diff", results, slower, "--fail-over", "11%")
    run("diff", results, slower)
    run("diff", slower, results, "--fail-over", "0%")
    run("diff", results, results, "--fail-over", "0")
    assert "--fail-over: it is empty" in run("diff", results, slower, "--fail-over", "", expect=2).stderr


def test_diff_has_a_document(results: Path) -> None:
    slower = scaled(results, 0.5, "write fresh")
    text = run("diff", results, slower, "--fail-over", "5%", "--json", expect=1).stdout
    document = json.loads(text)
    assert (document["command"], document["schema"]) == ("bench diff", 1)
    assert document["slower"] is True
    assert document["fail_over"] == pytest.approx(0.05)
    [change] = [each for each in document["changes"] if each["slower"]]
    assert (change["name"], change["metric"]) == ("write fresh", "gb_s")
    assert change["ratio"] == pytest.approx(0.5)
    metrics = {each["metric"] for each in document["changes"] if each["name"] == "write fresh"}
    assert {"gb_s", "gb_s_with_sync", "iops", "cpu_s_per_gb", "latency_us.p99"} <= metrics


def test_diff_names_rows_and_options_that_differ(results: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    bench(tmp_path / "data", *SMALL, "--read", "--mix", "50", "--random", "--output", other)
    text = run("diff", results, other).stdout
    assert f"mixed 50/50: only in {other}" in text
    assert f"write fresh: only in {results}" in text
    assert 'measured with another option: order: "sequential" -> "random"' in text
    document = json.loads(run("diff", results, other, "--json").stdout)
    assert document["only_after"] == ["mixed 50/50"]
    assert document["only_before"] == ["write fresh", "write preallocated", "write overwrite"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "is not a JSON document"),
        ("[]", 'lacks "command": "bench"'),
        ('{"command": "bench", "schema": 1, "results": []}', "it has no results"),
        (
            '{"command": "bench", "schema": 1, "results": [{"name": "other", "gb_s": 1}]}',
            "no row in common",
        ),
    ],
)
def test_diff_of_something_else_is_wrong_usage(results: Path, text: str | None, message: str) -> None:
    other = results.with_name("other.json")
    if text is not None:
        other.write_text(text)
    failed = run("diff", results, other, "--fail-over", "5%", "--json", expect=2)
    assert message in failed.stderr
    assert message in json.loads(failed.stdout)["error"]["message"]


def test_diff_rejects_other_arguments(results: Path) -> None:
    for arguments in ([], [results], [results, results, "--fail-over", "five"], [results, results, "--nope"]):
        run("diff", *arguments, expect=2)
    message = run(results.parent, "diff", results, results, expect=2).stderr
    assert "for a directory of that name write ./diff" in message


def test_a_directory_named_diff_can_be_measured(tmp_path: Path) -> None:
    (tmp_path / "diff").mkdir()
    document = json.loads(
        subprocess.run(
            [str(PROGRAM), "bench", "./diff", *SMALL, "--read", "--json"],
            cwd=tmp_path,
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
    )
    assert only_row(document)["name"] == "read"
