"""The memory that a workload needs, and whether this machine has it."""

import errno

from trunkline._core import free_memory_bytes
from trunkline._errors import OutOfBudget
from trunkline.workload._phase import reads_of
from trunkline.workload._samples import units_of
from trunkline.workload._spec import Workload


def batch_memory_bytes(workload: Workload) -> float:
    """Return the memory of all batches that exist at a time on one rank of a training, on average."""
    dataset, reader = workload.dataset, workload.reader
    assert reader is not None
    units = units_of(dataset, dataset.train.files)
    slots, units_per_read = reads_of(reader.batches_ahead, reader.batch_size, units)
    return slots * units_per_read * units.samples * dataset.read_bytes


def check_memory(workload: Workload, ranks: int) -> None:
    """Raise OutOfBudget if the batches need more memory than is left."""
    require_memory(
        batch_memory_bytes(workload) * ranks,
        f"the batches that {workload.name} reads ahead",
        "set a smaller reader.read_threads, reader.prefetch_size or reader.batch_size (overrides=)",
    )


def require_memory(needed: float, what: str, todo: str) -> None:
    """Raise OutOfBudget if this machine has less memory left. `what`: in the plural."""
    available = free_memory_bytes()
    if needed > available:
        raise OutOfBudget(
            errno.ENOMEM,
            f"{what} need {needed / 1e9:.2f} GB of memory, and {available / 1e9:.2f} GB are available; "
            f"{todo}",
        )
