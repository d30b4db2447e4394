"""What decides how much a run reads and how long it computes, so that two runs can be compared."""

from typing import Any

from trunkline.workload._spec import Workload


def parameters_of(workload: Workload) -> dict[str, Any]:
    """Return the parameters of a workload as it was run: with the number of files that were there."""
    dataset, reader, train, evaluation = (
        workload.dataset,
        workload.reader,
        workload.train,
        workload.evaluation,
    )
    parameters: dict[str, Any] = {
        "format": dataset.format,
        "files": dataset.train.files,
        "samples_per_file": dataset.samples_per_file,
        "record_bytes": dataset.record_bytes.mean,
        "record_bytes_stdev": dataset.record_bytes.stdev,
        "read_bytes_per_sample": dataset.read_bytes,
    }
    if reader is not None:
        parameters |= {
            "batch_size": reader.batch_size,
            "batches_ahead": reader.batches_ahead,
            "file_shuffle": reader.file_shuffle,
            "sample_shuffle": reader.sample_shuffle,
        }
    if train is not None:
        parameters |= {
            "epochs": train.epochs,
            "total_steps": train.total_steps,
            "step_compute_seconds": train.compute_seconds.mean,
            "step_compute_seconds_stdev": train.compute_seconds.stdev,
        }
    if evaluation is not None:
        parameters |= {
            "evaluation_files": dataset.valid.files,
            "evaluation_step_compute_seconds": evaluation.compute_seconds.mean,
        }
    return parameters
