"""The command line, run as users run it: the program of the package, or the one that TRUNKLINE_CLI names."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_program import PROGRAM

from trunkline import cli, stream

CASES = ["read", "write fresh", "write preallocated", "write overwrite"]
SMALL = ["--size", "8MiB", "--block", "64KiB", "--queue-depth", "8", "--repeat", "1"]


def run(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the program; its exit status must be `expect`."""
    result = subprocess.run(
        [str(PROGRAM), *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == expect, result.stderr
    return result


def bench(*arguments: str | Path) -> dict[str, Any]:
    """The JSON of a benchmark."""
    document: dict[str, Any] = json.loads(run("bench", *arguments, "--json").stdout)
    return document


@pytest.fixture
def kept_file(tmp_path: Path) -> Path:
    """A file that an earlier benchmark laid out and left."""
    directory = tmp_path / "kept"
    directory.mkdir()
    run("bench", directory, *SMALL, "--read", "--keep")
    (file,) = directory.iterdir()
    return file


# What bench prints ------------------------------------------------------------------------------------------


def test_bench_document_has_every_row_and_its_numbers(tmp_path: Path) -> None:
    document = bench(tmp_path, *SMALL, "--repeat", "2")
    assert document["command"] == "bench"
    assert document["schema"] == 1
    assert document["environment"]["kernel"] == os.uname().release
    assert document["engine"]["backend"] in {"io_uring", "libaio", "threads"}
    assert document["engine"]["queue_depth"] == 8
    assert document["engine"]["block_bytes"] == 64 * 1024
    assert document["paths"][0]["explain"]["filesystem"]
    assert [row["name"] for row in document["results"]] == CASES
    for row in document["results"]:
        assert len(row["runs"]) == 2
        assert row["gb_s"] > 0
        assert row["cpu_s_per_gb"] >= 0
        latency = row["latency_us"]
        percentiles = [latency[name] for name in ("p50", "p90", "p95", "p99", "p99.9", "max")]
        assert percentiles == sorted(percentiles)
        assert percentiles[0] > 0
        assert latency["count"] >= 2 * 128
        assert sum(row["bytes_by_path"].values()) == sum(run["bytes"] for run in row["runs"]) == 2 * (8 << 20)
        assert row["verified"] is False
        assert ("gb_s_with_sync" in row) == (row["operation"] == "write")
        if "gb_s_with_sync" in row:
            assert row["gb_s_with_sync"] <= row["gb_s"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "threads"])
@pytest.mark.parametrize("order", [[], ["--random"]], ids=["sequential", "random"])
@pytest.mark.parametrize("memory", ["aligned", "ordinary"])
def test_bench_verifies_on_every_engine(tmp_path: Path, engine: str, order: list[str], memory: str) -> None:
    arguments = [*SMALL, "--verify", "--files", "2", "--engine", engine, "--memory", memory, *order]
    result = subprocess.run(
        [str(PROGRAM), "bench", str(tmp_path), *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if result.returncode == 1 and "was refused here" in result.stderr:
        pytest.skip(f"{engine} is refused here: {result.stderr}")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["engine"]["backend"] == engine
    assert [row["name"] for row in document["results"]] == CASES
    assert all(row["verified"] for row in document["results"])
    assert all(row["runs"][0]["bytes"] == 2 * (8 << 20) for row in document["results"])
    assert list(tmp_path.iterdir()) == []


def test_several_paths_are_driven_together(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir()
    document = bench(*directories, *SMALL, "--write", "--write-mode", "overwrite")
    (row,) = document["results"]
    shares = row["runs"][0]["per_path"]
    assert [share["path"] for share in shares] == [str(directory) for directory in directories]
    assert all(share["bytes"] == 8 << 20 for share in shares)
    assert row["runs"][0]["bytes"] == 3 * (8 << 20)


def test_duration_goes_on_past_one_pass(tmp_path: Path) -> None:
    document = bench(tmp_path, *SMALL, "--read", "--duration", "0.3")
    (row,) = document["results"]
    assert row["runs"][0]["seconds"] >= 0.3
    assert row["runs"][0]["bytes"] > 8 << 20


@pytest.mark.parametrize("direct", ["auto", "never"])
def test_direct_never_goes_through_the_page_cache(tmp_path: Path, direct: str) -> None:
    document = bench(tmp_path, *SMALL, "--direct", direct, "--write", "--write-mode", "overwrite")
    moved = document["results"][0]["bytes_by_path"]
    expected = direct == "auto" and document["paths"][0]["explain"]["direct"]
    assert document["direct"] is expected
    assert (moved["buffered"] == 0) is expected


def test_output_is_what_json_prints(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    printed = bench(tmp_path, *SMALL, "--read", "--output", file)
    assert json.loads(file.read_text()) == printed


def test_table_names_rows_and_columns(tmp_path: Path) -> None:
    table = run("bench", tmp_path, *SMALL, "--verify").stdout
    for part in [*CASES, "GB/s", "with fsync", "CPU s/GB", "p99.9", "I/O path", "verified: every byte"]:
        assert part in table


@pytest.mark.parametrize(("size", "is_enough"), [("31MiB", False), ("32MiB", True)])
def test_the_table_says_if_there_is_too_little_to_measure(tmp_path: Path, size: str, is_enough: bool) -> None:
    table = run("bench", tmp_path, "--size", size, "--block", "1MiB", "--read", "--repeat", "1").stdout
    assert ("too little to measure throughput" not in table) is is_enough


# What verifying finds, and what is left alone ---------------------------------------------------------------


def test_verify_reads_a_kept_file_again(kept_file: Path) -> None:
    before = kept_file.read_bytes()
    document = bench(kept_file, *SMALL, "--verify")
    assert [row["name"] for row in document["results"]] == ["read"]
    assert document["results"][0]["verified"] is True
    assert kept_file.read_bytes() == before


@pytest.mark.parametrize("offset", [40, 4096 * 3 + 17, (8 << 20) - 1])
def test_verify_names_the_first_wrong_byte(kept_file: Path, offset: int) -> None:
    with kept_file.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    result = run("bench", kept_file, *SMALL, "--verify", "--json", expect=1)
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "corrupt"
    assert error["path"] == str(kept_file)
    assert f"offset {offset} " in error["message"]
    assert f"offset {offset} " in result.stderr


def test_verify_refuses_a_file_of_other_content(tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_bytes(bytes(1 << 20))
    assert "does not start as a file" in run("bench", file, "--verify", "--repeat", "1", expect=1).stderr


def test_existing_files_of_any_size_are_read_and_never_changed(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    content = os.urandom(3_000_001)
    file.write_bytes(content)
    file.chmod(0o444)
    document = bench(file, "--block", "64KiB", "--repeat", "1")
    assert document["results"][0]["runs"][0]["bytes"] == len(content)
    assert document["paths"][0]["existing"] is True
    assert file.read_bytes() == content
    assert "only reads" in run("bench", file, "--write", expect=2).stderr
    assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]


# Interrupts -------------------------------------------------------------------------------------------------


@pytest.fixture
def long_bench(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, int]]:
    """A benchmark that does not end by itself, on a separate terminal, where it shows its progress."""
    controller, terminal = pty.openpty()
    command = [str(PROGRAM), "bench", str(tmp_path), "--size", "64MiB", "--read", "--duration", "3600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    try:
        yield process, tmp_path, controller
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        os.close(controller)


def _wait_for(text: str, terminal: int) -> str:
    seen = ""
    deadline = time.monotonic() + 60
    while text not in seen:
        assert time.monotonic() < deadline, seen
        ready, _, _ = select.select([terminal], [], [], 1)
        if ready:
            try:
                seen += os.read(terminal, 4096).decode()
            except OSError:  # EIO: the other end of the terminal was closed
                pytest.fail(f"the benchmark ended: {seen}")
    return seen


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_leave_no_files(
    long_bench: tuple[subprocess.Popen[bytes], Path, int], signum: signal.Signals
) -> None:
    process, directory, terminal = long_bench
    progress = _wait_for("read 1/3: ", terminal)
    assert "\r" in progress
    assert len(list(directory.iterdir())) == 1
    process.send_signal(signum)
    process.wait(timeout=60)
    assert process.returncode == -signum
    assert list(directory.iterdir()) == []


# Usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PATH"),
        (["/no/such/directory"], "ENOENT"),
        ([".", "--block", "1000"], "--block"),
        ([".", "--size", "lots"], "--size"),
        ([".", "--size", "0"], "--size"),
        ([".", "--write-mode", "append"], "--write-mode"),
        ([".", "--device", "cuda:x"], "cpu, cuda"),
        ([".", "--compare", "gdsio,fio", "--mix", "70"], "gdsio does not mix reads and writes"),
        ([".", "--engine", "spdk"], '--backend: "spdk" is not one of auto, io_uring, libaio, threads'),
        ([".", "--backend", "memory"], "--backend: memory"),
        ([".", "--memory", "gpu"], "--memory"),
        ([".", "--direct", "maybe"], "--direct"),
        ([".", "--repeat", "0"], "--repeat"),
        ([".", "--duration", "nan"], "--duration"),
        ([".", "--duration", "x"], '--duration: "x" is not a duration; write 90, 60s, 2min or 1h'),
        ([".", "--lanes", "1000"], "lanes"),
        ([".", "--report", "out.html"], "needs the Python package with matplotlib"),
        ([".", "--output", "/no/such/directory/out.json"], "create it (mkdir -p /no/such/directory)"),
        ([".", "--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_usage_exits_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = subprocess.run(
        [str(PROGRAM), "bench", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2, result.stderr
    assert message in result.stderr + result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--output", "--trace", "--log", "--report"])
def test_bench_replaces_no_file_that_it_measures(tmp_path: Path, option: str) -> None:
    data = tmp_path / "model.bin"
    data.write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "link").symlink_to("model.bin")
    for named in ("model.bin", "link"):
        result = subprocess.run(
            [sys.executable, "-m", "trunkline", "bench", str(data), option, named],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 2, result.stderr
        assert f"{option} {named} is the file to be measured" in result.stderr
    assert data.read_bytes() == bytes(range(256)) * 4096


@pytest.mark.parametrize("options", [[], ["--read"], ["--write"], ["--verify"]])
@pytest.mark.parametrize("is_first", [True, False])
def test_bench_keeps_files_that_are_named_with_directories(
    tmp_path: Path, options: list[str], is_first: bool
) -> None:
    data, directory = tmp_path / "model.bin", tmp_path / "directory"
    data.write_bytes(bytes(range(256)) * 4096)
    data.chmod(0o640)
    directory.mkdir()
    paths = [data, directory] if is_first else [directory, data]
    message = run("bench", *paths, "--size", "1MB", *options, expect=2).stderr
    assert str(data) in message
    if options != ["--write"]:
        assert "name either directories" in message
    assert data.read_bytes() == bytes(range(256)) * 4096
    assert data.stat().st_mode & 0o777 == 0o640
    assert list(directory.iterdir()) == []


def test_no_command_and_unknown_commands_exit_2() -> None:
    assert "a subcommand is required: one of doctor, bench, tune, checkpoint" in run(expect=2).stderr
    run("measure", expect=2)
    assert "unknown option '--measure'" in run("--measure", expect=2).stderr
    run("checkpoint", expect=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--engin", "io_uring"], "unknown option '--engin'. Did you mean '--engine'?"),
        (["bench", ".", "--lanes", "x"], '--lanes: must be a whole number from 1 to 64, not "x"\n'),
        (
            ["bench", ".", "--queue-depth", "-1"],
            '--queue-depth: must be a whole number from 1 to 4096, not "-1"\n',
        ),
        (["bench", ".", "--nope"], "unknown option '--nope'\n"),
        (["bench"], "PATH is required\n"),
        (["bench", ".", "--size"], "--size requires a value\n"),
    ],
)
def test_wrong_arguments_are_reported_with_the_command_and_its_help(
    arguments: list[str], message: str
) -> None:
    told = run(*arguments, expect=2).stderr
    assert told.startswith("trunkline bench: ")
    assert message in told
    assert told.endswith("\nSee trunkline bench --help.\n")
    assert "bench" in run("--help").stdout
    assert run("--version").stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["foo"], None),
        (["plam"], "plan"),
        (["bnech"], None),  # two of five characters differ
        (["docter", "--json"], "doctor"),
    ],
)
def test_an_unknown_command_is_answered_with_those_there_are(arguments: list[str], meant: str | None) -> None:
    told = run(*arguments, expect=2).stderr
    assert told.startswith(f"trunkline: unknown subcommand '{arguments[0]}'")
    if meant is None:
        assert "; there are doctor, bench, tune" in told
        assert "or, of the Python package, pack, plan" in told
    else:
        assert f". Did you mean '{meant}'?" in told


def test_other_names_of_subcommands_are_recognized() -> None:
    for given, meant in (("list", "ls"), ("delete", "rm"), ("remove", "rm")):
        told = run("checkpoint", given, expect=2).stderr
        assert f"unknown subcommand '{given}'. Did you mean '{meant}'?" in told


@pytest.mark.parametrize("command", ["plan", "workload"])
def test_a_command_of_the_package_is_not_called_unknown(command: str) -> None:
    """Where the program is run without the package, as after cmake --install."""
    told = run(command, "--help", expect=2).stderr
    assert told.startswith(f"trunkline {command}: requires the Python package")
    error = json.loads(run(command, "model", "--json", expect=2).stdout)["error"]
    assert error["kind"] == "unsupported"
    assert command in run("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "command", "status"),
    [
        (["foo"], "trunkline", 2),
        (["bench"], "bench", 2),
        (["bench", "/no/such/directory"], "bench", 2),
        (["bench", ".", "--block", "1000"], "bench", 2),
        (["bench", ".", "--repeat", "0"], "bench", 2),
        (["bench", ".", "--report="], "bench", 2),
        (["bench", ".", "--size", "1000TB"], "bench", 1),
        (["doctor", "--no-such-option"], "doctor", 2),
        (["checkpoint", "delete", "."], "checkpoint", 2),
        (["checkpoint", "export", "/no/such/directory", "out.pt"], "checkpoint export", 2),
        (["workload", "rn"], "workload", 2),
        (["workload", "run"], "workload run", 2),
        (["workload", "run", "no-such-workload", "--null-device"], "workload run", 2),
        (["tune", "/no/such/directory"], "tune", 2),
        (["checkpoint", "show", ".", "--step", "latest"], "checkpoint show", 2),
        (["checkpoint", "ls", "/no/such/directory"], "checkpoint ls", 2),
        (["pack"], "pack", 2),
        (["pack", "/no/such/directory", "out"], "pack", 2),
        (["plan", "/no/such/directory"], "plan", 2),
        (["plan", ".", "--batch", "many"], "plan", 2),
    ],
)
def test_every_failure_is_json_with_json(
    tmp_path: Path, arguments: list[str], command: str, status: int
) -> None:
    if command in ("pack", "plan"):
        pytest.importorskip("transformers")
    result = subprocess.run(
        [sys.executable, "-m", "trunkline", *arguments, "--json"],
        cwd=tmp_path,
        env=os.environ | {"TRUNKLINE_CLI": str(PROGRAM)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == status, result.stderr
    document = json.loads(result.stdout)
    assert (document["command"], document["schema"]) == (command, 1)
    assert document["error"].keys() == {"kind", "errno", "message", "path"}
    assert document["error"]["message"]
    assert result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_path_is_answered_with_what_to_do() -> None:
    told = run("bench", "nope", "--json", expect=2)
    error = json.loads(told.stdout)["error"]
    assert (error["kind"], error["path"]) == ("system", "nope")
    assert error["message"].startswith("cannot measure nope: no such file or directory (ENOENT); create")


def test_a_report_is_named_as_a_page(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "trunkline", "bench", ".", "--report", "out.txt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert (
        result.stderr
        == "trunkline bench: --report: out.txt must end with .html: a report is a page of HTML\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_names_the_option(tmp_path: Path) -> None:
    message = run("bench", tmp_path, "--size", "1MB", "--device", "cuda:63", expect=1).stderr
    assert message.startswith("trunkline bench: --device cuda:63: ")
    assert message.endswith("; use --device cpu\n")
    assert list(tmp_path.iterdir()) == []


def test_missing_space_is_told_before_anything_is_written(tmp_path: Path) -> None:
    result = run("bench", tmp_path, "--size", "1000TB", expect=1)
    assert "missing" in result.stderr
    assert list(tmp_path.iterdir()) == []


# fio --------------------------------------------------------------------------------------------------------


def test_compare_without_fio_says_how_to_get_it(tmp_path: Path) -> None:
    result = subprocess.run(
        [str(PROGRAM), "bench", str(tmp_path), *SMALL, "--compare", "fio"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "apt-get install fio" in result.stderr


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("order", [[], ["--random"]], ids=["sequential", "random"])
def test_fio_does_the_same_work(tmp_path: Path, order: list[str]) -> None:
    document = bench(tmp_path, *SMALL, "--lanes", "2", "--files", "2", "--compare", "fio", *order)
    assert document["fio"]["version"].startswith("fio")
    for row in document["results"]:
        assert row["fio"]["runs"][0]["bytes"] == row["runs"][0]["bytes"]
        ours = row["gb_s_with_sync"] if row["operation"] == "write" else row["gb_s"]
        theirs = row["fio"]["gb_s_with_sync"] if row["operation"] == "write" else row["fio"]["gb_s"]
        assert row["fio"]["ratio_gb_s"] == pytest.approx(ours / theirs)
        assert "--bs=65536" in row["fio"]["command"]
        assert f"--direct={int(document['direct'])}" in row["fio"]["command"]
    assert list(tmp_path.iterdir()) == []


# doctor -----------------------------------------------------------------------------------------------------


def test_doctor_tells_of_machine_backends_and_paths(tmp_path: Path) -> None:
    document = json.loads(run("doctor", tmp_path, "--json").stdout)
    assert document["usable"] is True
    assert document["environment"]["cores"] >= 1
    assert [each["backend"] for each in document["backends"]] == ["io_uring", "libaio", "threads"]
    assert all(each["works"] or each["why"] for each in document["backends"])
    assert document["paths"][0]["explain"]["why"]
    assert isinstance(document["advice"], list)
    text = run("doctor", tmp_path).stdout
    for part in ("machine", "kernel", "backends, best first", str(tmp_path), "I/O path", "alignment"):
        assert part in text
    assert list(tmp_path.iterdir()) == []


def test_doctor_of_a_path_that_cannot_be_used_exits_1(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    document = json.loads(run("doctor", missing, "--json", expect=1).stdout)
    assert document["usable"] is False
    assert "ENOENT" in document["paths"][0]["error"]["message"]
    assert any(str(missing) in advice for advice in document["advice"])


# Reports ----------------------------------------------------------------------------------------------------


def console(*arguments: str | Path, python: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `trunkline` as the Python package installs it."""
    command = [*(python or [sys.executable, "-m", "trunkline"]), *map(str, arguments)]
    environment = os.environ | {"TRUNKLINE_CLI": str(PROGRAM)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_report_is_a_page_that_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = tmp_path / "da<ta"
    data.mkdir()
    page = tmp_path / "report.html"
    result = console("bench", data, *SMALL, "--report", page, "--json")
    assert result.returncode == 0, result.stderr
    assert [row["name"] for row in json.loads(result.stdout)["results"]] == CASES
    text = page.read_text()
    assert text.count("<svg") == 4
    for part in [*CASES, "with fsync", "CPU s/GB", os.uname().release, "da&lt;ta"]:
        assert part in text
    assert "da<ta" not in text
    for loading in ("<script", "<link", "<img", "src=", "@import"):
        assert loading not in text
    assert list(data.iterdir()) == []


def test_report_is_refused_before_the_benchmark_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = console("bench", tmp_path, *SMALL, "--report", tmp_path / "missing" / "report.html")
    assert result.returncode == 2
    assert "report.html: no such file or directory (ENOENT)" in result.stderr
    assert result.stdout == ""
    assert console("bench", tmp_path, "--report").returncode == 2


def test_an_option_is_not_taken_for_the_name_of_the_report(tmp_path: Path) -> None:
    result = console("bench", tmp_path, "--report", "--json")
    assert result.returncode == 2
    assert "--report requires a file name, and --json is an option" in result.stderr
    assert "--report=--json" in json.loads(result.stdout)["error"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_report_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys, trunkline.report, trunkline.cli;"
        "trunkline.report.available = lambda: False;"
        "sys.exit(trunkline.cli.main(sys.argv[1:]))"
    )
    result = console("bench", tmp_path, "--report", tmp_path / "r.html", python=[sys.executable, "-c", code])
    assert result.returncode == 2
    assert "pip install matplotlib" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_console_passes_everything_else_to_the_program(tmp_path: Path) -> None:
    result = console("bench", tmp_path, *SMALL, "--read", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["command"] == "bench"
    assert console("bench", "/no/such/directory").returncode == 2


def test_closed_standard_streams_change_nothing() -> None:
    """As cron may start it; files that it opens must not get their numbers."""
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        result = subprocess.run(
            ["sh", "-c", f'"$0" doctor --json {closed}', str(PROGRAM)],
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, (closed, result.stderr)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ctrl_c_while_the_modules_of_a_command_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    class Importing:
        def main(self, arguments: list[str]) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr(stream, "cli", Importing(), raising=False)
    assert cli.main(["plan", "folder", *options]) == 130
    printed = capsys.readouterr()
    assert "trunkline plan: interrupted" in printed.err
    assert "Traceback" not in printed.err
    assert (json.loads(printed.out)["error"]["message"] == "interrupted") if options else not printed.out
