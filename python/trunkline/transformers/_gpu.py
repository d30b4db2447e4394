"""What of a streamed model is in the memory of a GPU, and what passes through it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trunkline import _core
from trunkline._errors import OutOfBudget, Unsupported
from trunkline.stream._tensors import StreamUnit

# One is computed with, one is being filled, one waits to be.
_SLOTS = 3
_SHARE = 0.5


@dataclass(frozen=True)
class Share:
    """Which units stay on the GPU, and how large the slots for the others are together."""

    stays: list[bool]
    slots_bytes: int


def default_budget(device: torch.device) -> int:
    """Return half of the GPU's memory that is free, in bytes."""
    return int(torch.cuda.mem_get_info(device)[0] * _SHARE)


def share_out(units: Sequence[StreamUnit], resident_bytes: int, budget: int, folder: str) -> Share:
    """Place units beside what stays in any case. Raises OutOfBudget, which names the least that would do."""
    sizes = [_core.device_slot_bytes([unit]) for unit in units]
    least = resident_bytes + min(sum(sizes), 2 * max(sizes, default=0))
    if budget < least:
        raise OutOfBudget(
            None,
            f"memory_budget: {budget} bytes of the GPU's memory cannot hold what stays there of {folder} "
            f"({resident_bytes} bytes of embeddings, norms and head) and two units of up to "
            f"{max(sizes, default=0)}; the least is {least} bytes ({least / 1e9:.3f} GB), or less with a "
            "smaller unit_bytes where units hold several weights",
            folder,
        )
    if not units:
        return Share([], 0)
    placement = _core.place_units(sizes, budget - resident_bytes, _SLOTS)
    return Share(placement["resident"], placement["slots"] * placement["slot_bytes"])


def check_not_capturing() -> None:
    """Raise Unsupported while a CUDA graph is captured: it would replay weights that are not there."""
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            None,
            "a CUDA graph is being captured, and cannot hold a model whose weights are streamed: they are "
            "elsewhere each time; run it without graphs",
        )
