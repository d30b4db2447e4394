"""Runs a workload of inference: the model is loaded, then queries are answered."""

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trunkline._errors import exception_of
from trunkline._flock import DirectoryLock
from trunkline._progress import Progress
from trunkline.workload._batch_memory import require_memory
from trunkline.workload._inference_rank import InferenceJob, check_samples
from trunkline.workload._inference_results import inference_document
from trunkline.workload._launcher import Launcher
from trunkline.workload._require_torch import require_torch
from trunkline.workload._samples import found_workload, open_part
from trunkline.workload._spec import Workload

_LOGS = "inference-logs"


def run_inference(
    launcher: Launcher, workload: Workload, directories: Sequence[Path], ranks: int, remove: bool
) -> dict[str, Any]:
    """Answer the queries of a workload on so many ranks, of which each has the whole model.

    `remove`: remove the logs of this run at its end. Returns the document of the run. Raises ValueError if
    the data set or the model is another one or not complete.
    """
    workload = found_workload(workload, directories)
    inference = workload.inference
    assert inference is not None
    check_samples(workload, ranks)
    if inference.model_bytes:
        require_torch("models that are loaded")
    require_memory(
        launcher.per_machine(ranks) * (inference.model_bytes + _buffers(workload)),
        f"the model and the batches of {workload.name}",
        "run fewer ranks, or set a smaller inference.model_size_bytes or batch_size (overrides=)",
    )
    open_part(workload, "train", directories)  # finds what is missing, and makes the index for all ranks
    with _log_folder(directories[0], remove, inference.logging is not None) as logs:
        job = InferenceJob(workload, tuple(directories), logs)
        counts = _run(launcher, job, ranks)
    document = inference_document(workload, counts)
    return {
        "workload": workload.name,
        "source": workload.source,
        "directories": [str(each) for each in directories],
        "ranks": ranks,
        **document,
        "logs": None if logs is None or remove else str(logs),
    }


def _buffers(workload: Workload) -> float:
    inference = workload.inference
    assert inference is not None
    return max(1, inference.prefetch) * inference.batch_size * workload.dataset.read_bytes


@contextmanager
def _log_folder(directory: Path, remove: bool, is_logging: bool) -> Iterator[Path | None]:
    """Make a new folder for the logs; remove it at the end if that is wanted, or if the run fails."""
    if not is_logging:
        yield None
        return
    parent = directory / _LOGS
    is_new = not parent.exists()
    parent.mkdir(exist_ok=True)
    with ExitStack() as held:
        lock = held.enter_context(DirectoryLock(parent))
        if not lock.try_lock():
            raise exception_of(
                "system", errno.EBUSY, f"another process runs inference in {directory}", str(directory)
            )
        numbers = [int(each.name) for each in parent.iterdir() if each.name.isdecimal()]
        folder = parent / f"{max(numbers, default=0) + 1:06d}"
        folder.mkdir()
        keeps = False
        try:
            yield folder
            keeps = not remove
        finally:
            if not keeps:
                shutil.rmtree(folder)
                if is_new and not any(parent.iterdir()):
                    parent.rmdir()


def _run(launcher: Launcher, job: InferenceJob, ranks: int) -> list[dict[str, Any]]:
    assert job.workload.inference is not None
    progress = Progress(f"running {job.workload.name}", job.workload.inference.queries, "queries")
    return launcher.run(job, ranks, progress)
