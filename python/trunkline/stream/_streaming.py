"""What is behind a model whose weights are streamed."""

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from trunkline._core import WeightStream


class Passes(Protocol):
    """What counts how often the layers ran."""

    passes: int
    seconds: float


@dataclass
class Streaming:
    """The stream of a model and what counts its use."""

    stream: WeightStream | None  # none: there is nothing that could be streamed
    binding: Passes | None
    resident_bytes: int  # outside of the stream
    streamed_bytes: int  # through slots, by each pass
    pack: str  # the file that is read, or the folder of the checkpoint


streaming_of: "weakref.WeakKeyDictionary[Any, Streaming]" = weakref.WeakKeyDictionary()


def stats(model: Any) -> dict[str, Any]:
    """Return what a model of trunkline.transformers.from_pretrained has done so far.

    "passes" through its layers (one for the prompt, one for each further token) and the "seconds" that they
    took, of which "wait_seconds" were spent waiting for storage, "verify_seconds" on checksums, and
    "compute_seconds" on the rest; "bytes_read", also ahead of the next pass; "gb_s", streamed bytes by second
    of the passes. "streamed_bytes" are read in each pass, "resident_bytes" stay, "memory_bytes" is what all
    weights and slots take; "source" is the file that is read, or the folder.

    Raises TypeError for any other model. Thread-safe.
    """
    streaming = streaming_of.get(model) if hasattr(model, "parameters") else None
    if streaming is None:
        raise TypeError(
            "model: must be one that trunkline.transformers.from_pretrained returned, not "
            f"{type(model).__name__}"
        )
    counts: dict[str, Any] = {} if streaming.stream is None else streaming.stream.stats()
    placement = {"memory_bytes": 0, "slots": 0} if streaming.stream is None else streaming.stream.placement
    passes = 0 if streaming.binding is None else streaming.binding.passes
    seconds = 0.0 if streaming.binding is None else streaming.binding.seconds
    wait, verify = counts.get("wait_seconds", 0.0), counts.get("verify_seconds", 0.0)
    slots = placement["slots"] * placement.get("slot_bytes", 0)
    return {
        "passes": passes,
        "seconds": seconds,
        "wait_seconds": wait,
        "verify_seconds": verify,
        "compute_seconds": max(0.0, seconds - wait - verify),
        "bytes_read": counts.get("bytes_read", 0),
        "gb_s": streaming.streamed_bytes * passes / seconds / 1e9 if seconds else 0.0,
        "streamed_bytes": streaming.streamed_bytes,
        "resident_bytes": streaming.resident_bytes + placement["memory_bytes"] - slots,
        "memory_bytes": streaming.resident_bytes + placement["memory_bytes"],
        "source": streaming.pack,
    }
