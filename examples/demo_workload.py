"""An emulated training job at the end of the demo: whether this disk keeps an accelerator busy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trunkline import workload

NAME = "resnet50_h100"
CHANGES = ("dataset.num_files_train=2", "train.total_training_steps=15", "train.epochs=100")


def measure(directory: Path, report: Path, forget: Callable[[list[Path]], None]) -> dict[str, Any]:
    """Make a small data set in the directory, run the job, and write its report; return its results.

    `forget`: drops files from the page cache. Where there is no room for the data set, or no PyYAML, the
    results are only an "error".
    """
    try:
        job = workload.load(NAME, CHANGES)
        workload.generate(job, [directory])
        forget([path for path in directory.rglob("*") if path.is_file()])
        results = workload.run(job, [directory])
    except (OSError, ImportError) as error:
        return {"error": str(error)}
    workload.write_report(results, report)
    return {**results, "report": str(report)}


def line(results: dict[str, Any]) -> str:
    if "error" in results:
        return f"emulated training job: not run: {results['error']}"
    return (
        f"emulated training job (ResNet-50 on one H100, {results['steps']} steps of waits): "
        f"busy {results['utilization']:.1%} of the time, at {results['gb_s']:.2f} GB/s"
    )
