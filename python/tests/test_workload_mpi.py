"""Workloads whose ranks mpirun starts."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trunkline.workload import cli, load
from trunkline.workload._mpi_ranks import free_address

RANKS = 4
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpirun (openmpi-bin) or mpi4py is not installed",
)
# Open MPI as root, and with more ranks than cores.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
TRUNKLINE = (sys.executable, "-m", "trunkline")
DATA = "dataset: {format: jpeg, num_files_train: 96, num_files_eval: 16, record_length_bytes: 5000}\n"


def mpirun(*command: str | Path, ranks: int = RANKS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["mpirun", "-n", str(ranks), *map(str, command)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(
        f"model: {{name: tiny}}\n{DATA}"
        "reader: {batch_size: 2, batch_size_eval: 2, sample_shuffle: seed}\n"
        "train: {computation_time: 0.001, epochs: 2}\n"
        "evaluation: {eval_time: 0.001}\nworkflow: {evaluation: true}\n"
    )
    return file


def run_here(*arguments: str | Path) -> dict[str, Any]:
    done = subprocess.run(
        [*TRUNKLINE, "workload", "run", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def form_of(value: Any) -> Any:
    """The keys of a document, and which of its values are numbers."""
    if isinstance(value, dict):
        return {key: form_of(each) for key, each in value.items()}
    return type(value).__name__ if not isinstance(value, int | float) else "number"


@needs_mpi
def test_a_run_counts_as_with_processes_of_one_machine(spec: Path, tmp_path: Path) -> None:
    data, page = tmp_path / "data", tmp_path / "report.html"
    assert cli.main(["workload", "generate", str(spec), "--data", str(data)]) == 0
    run = ("workload", "run", spec, "--data", data)
    done = mpirun(*TRUNKLINE, *run, "--json", "--report", page)
    assert done.returncode == 0, done.stderr
    document, expected = json.loads(done.stdout), run_here(spec, "--data", data, "--ranks", str(RANKS))
    assert form_of(document) == form_of(expected)
    assert document["ranks"] == len(document["per_rank"]) == RANKS
    for key in ("steps", "samples", "bytes", "compute_seconds", "parameters"):
        assert document[key] == expected[key]
    assert document["evaluation"]["samples"] == expected["evaluation"]["samples"]
    for key in ("step_histogram_ns", "wait_histogram_ns"):
        assert sum(count for _, count in document[key]) == sum(count for _, count in expected[key])
    assert [each["bytes"] for each in document["per_rank"]] == [
        each["bytes"] for each in expected["per_rank"]
    ]
    assert done.stderr.count("report: ") == 1
    assert page.read_text().count("<html") == 1


@needs_mpi
def test_checkpoints_of_a_training(spec: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    data = tmp_path / "data"
    with spec.open("a") as file:
        file.write("checkpoint: {type: all_ranks, epochs_between_checkpoints: 1}\n")
    text = spec.read_text().replace("{evaluation: true}", "{evaluation: false, checkpoint: true}")
    spec.write_text(text.replace("{name: tiny}", "{name: tiny, model_size_bytes: 100000}"))
    assert cli.main(["workload", "generate", str(spec), "--data", str(data)]) == 0
    done = mpirun(*TRUNKLINE, "workload", "run", spec, "--data", data, "--json")
    assert done.returncode == 0, done.stderr
    document, expected = json.loads(done.stdout), run_here(spec, "--data", data, "--ranks", str(RANKS))
    assert form_of(document) == form_of(expected)
    assert document["checkpoints"]["model"] == expected["checkpoints"]["model"]


@needs_mpi
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--null-device", "--ranks", "4"], 2, "--ranks cannot be combined with mpirun"),
        (["--data", "missing"], 2, "there is no directory"),
        (["--help"], 0, ""),
    ],
)
def test_one_rank_reports_errors(spec: Path, arguments: list[str], status: int, message: str) -> None:
    done = mpirun(*TRUNKLINE, "workload", "run", spec, *arguments, ranks=2)
    assert done.returncode == status, done.stderr
    assert done.stderr.count("trunkline workload run: ") == (1 if status else 0)
    assert message in done.stderr
    assert done.stdout.count("Usage: ") == (0 if status else 1)


@needs_mpi
def test_a_rank_that_fails_ends_the_run_with_its_name() -> None:
    done = mpirun(sys.executable, Path(__file__).with_name("mpi_jobs.py"), "fail")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("failed: the disk is on fire; the run is not complete") == 2
    assert done.stdout.count("rank 2 on ") == 2
    for rank in range(RANKS):
        assert f"rank {rank} exits with 2" in done.stdout


@needs_mpi
def test_ranks_that_do_not_notice_a_failure_are_ended() -> None:
    done = mpirun(sys.executable, Path(__file__).with_name("mpi_jobs.py"), "hang")
    assert done.returncode == 1
    assert "rank 2 on " in done.stderr
    assert "failed: the disk is on fire; the run is not complete" in done.stderr
    assert "exits with" not in done.stdout


def ranks_below(parent: int) -> Iterator[tuple[int, int]]:
    """(rank, process) of those that mpirun has started and that have loaded MPI."""
    for directory in Path("/proc").iterdir():
        try:
            if (
                not directory.name.isdecimal()
                or f"PPid:\t{parent}\n" not in (directory / "status").read_text()
            ):
                continue
            variables = dict(
                each.split("=", 1) for each in (directory / "environ").read_text().split("\0") if "=" in each
            )
            if "mpi4py" in (directory / "maps").read_text():
                yield int(variables["OMPI_COMM_WORLD_RANK"]), int(directory.name)
        except (OSError, KeyError):
            continue


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 120
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


@needs_mpi
def test_a_rank_that_is_killed_ends_the_run_with_its_name(spec: Path) -> None:
    command = [*TRUNKLINE, "workload", "run", str(spec), "--null-device", "--json"]
    command += ["--set", "train.computation_time=0.05", "--set", "train.epochs=100000"]
    with subprocess.Popen(
        ["mpirun", "-n", str(RANKS), *command],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        found = lambda: dict(ranks_below(process.pid))  # noqa: E731
        ranks = wait_for(lambda: len(there := found()) == RANKS and there)
        os.kill(ranks[2], signal.SIGKILL)
        output, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert output == ""
    assert "rank 2" in errors
    wait_for(lambda: not any(Path(f"/proc/{each}").exists() for each in ranks.values()))


@pytest.mark.parametrize(("variable", "rank"), [("OMPI_COMM_WORLD", 0), ("PMI", 0), ("PMI", 1)])
def test_without_mpi4py_rank_0_says_what_to_install(
    variable: str,
    rank: int,
    spec: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("OMPI_COMM_WORLD", "PMI"):
        for suffix in ("SIZE", "RANK"):
            monkeypatch.delenv(f"{name}_{suffix}", raising=False)
    monkeypatch.setenv(f"{variable}_SIZE", "4")
    monkeypatch.setenv(f"{variable}_RANK", str(rank))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert cli.main(["workload", "run", str(spec), "--null-device"]) == 1
    errors = capsys.readouterr().err
    assert ("pip install mpi4py" in errors) == (rank == 0)
    assert errors.count("\n") == (1 if rank == 0 else 0)


def test_one_process_of_mpirun_runs_as_without_it(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert load(str(spec)).train is not None
    assert cli.main(["workload", "run", str(spec), "--null-device", "--ranks", "2"]) == 0


def test_processes_of_torch_meet_at_a_free_port() -> None:
    torch = pytest.importorskip("torch.distributed")
    address = free_address("localhost")
    port = int(address.rpartition(":")[2])
    assert address == f"tcp://localhost:{port}"
    torch.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
