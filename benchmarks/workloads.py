"""Emulated training jobs (trunkline workload) on all disks: where storage is the limit, how much of fio's
bandwidth they reach; where storage or computation is, how far the utilization is from the planned one; and
how well it repeats; and beside dlio_benchmark where it is installed.

The time that a batch computes is chosen so that one accelerator would read half, or twice, what the disks
give. Files are fewer than in the published workloads; samples are as large, except for unet3d's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median

import dlio_peer
import fio_peer
from measurement import Comparison, interleave
from workbench import MIB, Workbench

from trunkline import workload

SECONDS = 4.0  # of a run that storage limits
READ_BYTES = MIB  # of a request of fio, at most
DEPTH = 64
# What is changed of built-in workloads: their data sets would fill the disks many times.
JOBS: dict[str, list[str]] = {
    "unet3d_h100": [
        "dataset.num_files_train=64",
        "dataset.record_length_bytes=18325078",  # an eighth of the published ones
        # With a spread as published, one disk would have a tenth more bytes than the others.
        "dataset.record_length_bytes_stdev=1000000",
        "reader.prefetch_size=24",  # nearly as many bytes ahead as published
    ],
    "resnet50_h100": ["dataset.num_files_train=16"],
    "cosmoflow_h100": ["dataset.num_files_train=400"],
    "retinanet": ["dataset.num_files_train=3000"],
    "dlrm": ["dataset.num_files_train=8", "dataset.num_samples_per_file=262144"],
}


def measure(bench: Workbench) -> list[Comparison]:
    rows = [each for name in JOBS for each in measure_job(bench, name)]
    return [*rows, *null_device(bench), *dlio_peer.measure(bench)]


def measure_job(bench: Workbench, name: str) -> list[Comparison]:
    directories = [directory / name for directory in bench.disks.directories]
    files = [directory / "fio" for directory in bench.disks.directories]
    base = workload.load(name, JOBS[name])
    batch_bytes = workload.plan(base, 1)["accelerator"]["gb_s"] * 1e9 * _compute_seconds(base)
    with bench.without_limit():
        workload.generate(base, directories)
        bench.fio(files, "write")
    disks = _fio(bench, files, base) if not bench.limit_mb_s else bench.limit_mb_s * len(files) / 1e3
    runs: dict[float, list[float]] = {
        0.5: [],
        2.0: [],
    }  # utilization, by the share of the disks that is needed
    planned = {}

    def emulate(need: float) -> float:
        seconds = batch_bytes / (need * disks * 1e9)
        steps = max(20, round(SECONDS * disks * 1e9 / batch_bytes))
        job = workload.load(
            name,
            [
                *JOBS[name],
                f"train.computation_time={seconds}",
                f"train.total_training_steps={steps}",
                "train.epochs=100",
            ],
        )
        planned[need] = min(1.0, disks / workload.plan(job, 1)["accelerator"]["gb_s"])
        bench.disks.rest()
        result = workload.run(job, directories)
        runs[need].append(result["utilization"])
        return float(result["gb_s"])

    got = interleave(
        bench.rounds,
        {
            "storage limits": lambda: emulate(2.0),
            "computation limits": lambda: emulate(0.5),
            "fio": lambda: _fio(bench, files, base),
        },
        f"workloads, {name}",
    )
    for each in (*directories, *files):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    case = f"{name}, storage limits"
    rows = [
        Comparison(
            *("workloads", case, "GB/s", f"fio randread on {len(files)} files"),
            *(got["storage limits"], got["fio"]),
            at_least=0.97,
        )
    ]
    for need, what in ((2.0, "storage"), (0.5, "computation")):
        found = [100 * each for each in runs[need][1:]]  # without the round that warms up
        expected = [100 * planned[need]] * len(found)
        rows.append(_distance(f"{name}, {what} limits", "the plan", found, expected, 3))
        middle = [median(found)] * len(found)
        rows.append(_distance(f"{name}, {what} limits, repeated", "their median", found, middle, 1))
    return rows


def _distance(case: str, peer: str, found: list[float], expected: list[float], at_most: float) -> Comparison:
    """Percentage points between utilizations: of the worst round."""
    worst = max(abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True))
    return Comparison(
        *("workloads", f"{case}: utilization", "%", f"{peer}, distance of the worst run in points"),
        *([worst] * len(found), expected),
        compared="ours",
        at_most=at_most,
    )


def _compute_seconds(job: workload.Workload) -> float:
    assert job.train is not None
    return job.train.compute_seconds.mean


def _fio(bench: Workbench, files: list[Path], job: workload.Workload) -> float:
    """GB/s of random reads as large as the job's: of a sample, or of a column's part of a row group."""
    wanted = job.dataset.record_bytes.mean
    if job.dataset.format == "parquet":
        columns = [column.sample_bytes for column in job.dataset.columns if column.is_read]
        wanted = job.dataset.rows_per_group * sum(columns) / len(columns)
    if job.dataset.format == "tfrecord":  # samples of one file that are read together
        wanted = READ_BYTES
    block = min(READ_BYTES, max(4096, int(wanted) // 4096 * 4096))
    bench.disks.rest()
    total = round(SECONDS * (bench.limit_mb_s or 1000) * 1e6 * len(files))
    run = fio_peer.run(
        *(files, "randread"),
        block_bytes=block,
        depth=DEPTH,
        engine=bench.fio_engine,
        total_bytes=total,
        randrepeat=0,
        norandommap=1,
    )
    return run.bytes_per_second / 1e9


def null_device(bench: Workbench) -> list[Comparison]:
    """The emulator itself: DLRM, whose steps are the shortest, and how many batches a second there can be."""
    dlrm = workload.load("dlrm", ["train.total_training_steps=8000"])
    fastest = workload.load("dlrm", ["train.total_training_steps=8000", "train.computation_time=0"])
    got = interleave(
        bench.rounds,
        {
            "dlrm": lambda: 100 * float(workload.run(dlrm, None)["utilization"]),
            "fastest": lambda: _batches_per_second(fastest, 1),
            "fastest, 2 ranks": lambda: _batches_per_second(fastest, 2),
        },
        "workloads, null device",
    )
    fixed = [1.0] * bench.rounds

    def row(case: str, unit: str, found: list[float], at_least: float) -> Comparison:
        return Comparison("workloads", case, unit, "none", found, fixed, compared="ours", at_least=at_least)

    return [
        row("dlrm, null device: utilization", "%", got["dlrm"], 99),
        row("null device, 1 rank: batches/s", "1/s", got["fastest"], 2000),
        row("null device, 2 ranks in step: batches/s", "1/s", got["fastest, 2 ranks"], 2000),
    ]


def _batches_per_second(job: workload.Workload, ranks: int) -> float:
    result = workload.run(job, None, ranks=ranks)
    return float(result["steps"] / result["running_seconds"])
