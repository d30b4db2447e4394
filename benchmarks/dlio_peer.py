"""dlio_benchmark beside the emulator: the same file of a workload, the same data, the same disk.

Utilization is by DLIO's own rule in both. Where the disk or computing is the limit, both should find the
same; where steps are short, DLIO finds its own limit. TRUNKLINE_DLIO_PYTHON names the interpreter of an
environment with dlio_benchmark, which needs MPI and TensorFlow.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from measurement import Comparison, interleave
from page_cache import make_cold
from workbench import Workbench

from trunkline import workload

PYTHON = "TRUNKLINE_DLIO_PYTHON"
NAME = "job"
SLOW_MB_S = 100
SECONDS = 300.0
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# By case: the limit of the disk (MB/s; None: that of the benchmark), files, bytes of a sample, and how long a
# batch of four computes.
CASES: dict[str, tuple[int | None, int, int, float]] = {
    f"samples of 4 MB, a disk of {SLOW_MB_S} MB/s limits": (SLOW_MB_S, 120, 4_000_000, 0.05),
    "samples of 4 MB, computation limits": (None, 40, 4_000_000, 0.5),
    "samples of 64 kB, steps of 2 ms": (None, 2000, 64_000, 0.002),
}
SAME = 3.0  # percentage points


def measure(bench: Workbench) -> list[Comparison]:
    python = os.environ.get(PYTHON)
    rows = []
    for case, (limit, files, sample_bytes, seconds) in CASES.items():
        title = f"{case}: utilization"
        if limit is not None and not bench.limit_mb_s:
            continue  # the disks are as they are
        if python is None:
            why_not = f"{PYTHON} is not set"
            rows.append(Comparison("workloads", title, "%", "dlio_benchmark", [], [], why_not=why_not))
            continue
        with tempfile.TemporaryDirectory(dir=bench.first) as folder:
            job = _Job(Path(folder), python, files, sample_bytes, seconds)
            with bench.without_limit():
                job.generate()
            bench.disks.limit(limit or bench.limit_mb_s)
            got = interleave(
                bench.rounds,
                {name: _cold(bench, job, run) for name, run in (("ours", job.ours), ("dlio", job.dlio))},
                f"workloads, {case}",
            )
            bench.disks.limit(bench.limit_mb_s)
        rows.append(_compared(title, got, is_short=seconds < 0.01))
    return rows


def _compared(title: str, got: dict[str, list[float]], *, is_short: bool) -> Comparison:
    named = ("workloads", title, "%", "dlio_benchmark")
    if is_short:
        return Comparison(*named, got["ours"], got["dlio"], at_least=1.0)
    return Comparison(*named, got["ours"], got["dlio"], compared="difference", at_least=-SAME)


def _cold(bench: Workbench, job: _Job, run: Callable[[], float]) -> Callable[[], float]:
    def once() -> float:
        make_cold([job.data])
        bench.disks.rest()
        return run()

    return once


class _Job:
    """One file of a workload, and the data that DLIO has generated for it."""

    def __init__(self, folder: Path, python: str, files: int, sample_bytes: int, seconds: float) -> None:
        self._folder, self._python = folder, python
        self.data = folder / "data"
        self._file = folder / "workload" / f"{NAME}.yaml"
        self._file.parent.mkdir()
        self._file.write_text(
            yaml.safe_dump(
                {
                    "model": "unet3d",
                    "framework": "pytorch",
                    "workflow": {"generate_data": False, "train": True},
                    "dataset": {
                        "data_folder": str(self.data),
                        "format": "npz",
                        "num_files_train": files,
                        "num_samples_per_file": 1,
                        "record_length": sample_bytes,
                    },
                    "reader": {
                        "data_loader": "pytorch",
                        "batch_size": 4,
                        "read_threads": 2,
                        "file_shuffle": "seed",
                        "sample_shuffle": "seed",
                    },
                    # A second epoch would come from the page cache, which DLIO reads through.
                    "train": {"epochs": 1, "computation_time": seconds},
                }
            )
        )

    def generate(self) -> None:
        self._run_dlio("++workload.workflow.generate_data=True", "++workload.workflow.train=False")
        make_cold([self.data])  # written back now, while the disk has no limit

    def ours(self) -> float:
        result = workload.run(workload.load(str(self._file)), [self.data])
        return 100 * float(result["utilization_dlio"])

    def dlio(self) -> float:
        self._run_dlio()
        summary: dict[str, Any] = json.loads((self._folder / "out/summary.json").read_text())
        return float(summary["metric"]["train_au_mean_percentage"])

    def _run_dlio(self, *overrides: str) -> None:
        out = self._folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        options = [f"--config-dir={self._folder}", f"workload={NAME}", f"hydra.run.dir={out}", *overrides]
        done = subprocess.run(
            [self._python, "-m", "dlio_benchmark.main", *options],
            env=os.environ | AS_ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        if done.returncode != 0:
            raise SystemExit(f"bench: dlio_benchmark failed ({done.returncode}):\n{done.stderr[-3000:]}")
