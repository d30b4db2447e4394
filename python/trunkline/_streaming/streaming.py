"""The state and the statistics of a model whose weights are streamed."""

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from trunkline._core import WeightStream


class Passes(Protocol):
    """Counts passes through the layers, and the seconds that they took."""

    passes: int
    seconds: float


@dataclass
class Streaming:
    """The stream of a model and what counts its use."""

    stream: WeightStream | None  # None: no weight is streamed
    hooks: Passes | None
    resident_bytes: int  # outside of the stream
    streamed_bytes: int  # through slots, in each pass
    pack: str  # the file that is read, or the folder of the checkpoint
    gpu_slots_bytes: int | None = None  # of a model on a GPU, which holds all of resident_bytes


streaming_of: "weakref.WeakKeyDictionary[Any, Streaming]" = weakref.WeakKeyDictionary()


def stats(model: Any) -> dict[str, Any]:
    """Return statistics of a model that trunkline.transformers.from_pretrained returned.

    "passes" counts passes through its layers (one for the prompt, one for each further token), and "seconds"
    the time that they took: "wait_seconds" waiting for storage, "verify_seconds" computing checksums, and
    "compute_seconds" for the rest. "gb_s" is streamed bytes per second of the passes. "bytes_read" counts
    from when the model was loaded, including what was read ahead for the next pass; "storage_gb_s" divides
    it by the seconds in which any read was in flight. "limit_seconds" is the shortest time that the passes
    could have taken, the longer of reading at that rate and computing, and "of_limit" its share of "seconds"
    (None before the first pass). "streamed_bytes" are read in each pass, "resident_bytes" stay in memory,
    and "memory_bytes" is the size of all weights and slots in memory; "source" is the file or folder that is
    read.

    For a model on a GPU "streamed_bytes" are copied to it in each pass, and "resident_bytes" and
    "memory_bytes" are in its memory. "host_bytes" is the size of weights in main memory; those that stay
    there are not read again, so that each pass reads "storage_bytes". "seconds" are those of the host: work
    that the GPU has yet to finish does not count.

    `model` may be wrapped by torch.compile. Raises TypeError for any other model. Thread-safe.
    """
    model = getattr(model, "_orig_mod", model)
    streaming = streaming_of.get(model) if hasattr(model, "parameters") else None
    if streaming is None:
        raise TypeError(
            "model: must be a model returned by trunkline.transformers.from_pretrained, not "
            f"{type(model).__name__}"
        )
    counts: dict[str, Any] = {} if streaming.stream is None else streaming.stream.stats()
    placement = {"memory_bytes": 0, "slots": 0} if streaming.stream is None else streaming.stream.placement
    passes = 0 if streaming.hooks is None else streaming.hooks.passes
    seconds = 0.0 if streaming.hooks is None else streaming.hooks.seconds
    wait, verify = counts.get("wait_seconds", 0.0), counts.get("verify_seconds", 0.0)
    slots = placement["slots"] * placement.get("slot_bytes", 0)
    compute = max(0.0, seconds - wait - verify)
    streamed = streaming.streamed_bytes * passes
    storage = counts.get("bytes_read", 0) / counts["read_seconds"] if counts.get("read_seconds") else 0.0
    on_gpu = streaming.gpu_slots_bytes is not None
    stays_in_main_memory = placement["memory_bytes"] - slots if on_gpu else 0
    from_storage = max(0, streaming.streamed_bytes - stays_in_main_memory)
    limit = max(from_storage * passes / storage if storage else 0.0, compute)
    host_bytes = placement["memory_bytes"] + (0 if on_gpu else streaming.resident_bytes)
    found = {
        "passes": passes,
        "seconds": seconds,
        "wait_seconds": wait,
        "verify_seconds": verify,
        "compute_seconds": compute,
        "limit_seconds": limit,
        "of_limit": min(1.0, limit / seconds) if seconds else None,
        "gb_s": streamed / seconds / 1e9 if seconds else 0.0,
        "bytes_read": counts.get("bytes_read", 0),
        "storage_gb_s": storage / 1e9,
        "streamed_bytes": streaming.streamed_bytes,
        "resident_bytes": streaming.resident_bytes if on_gpu else host_bytes - slots,
        "memory_bytes": streaming.resident_bytes + (streaming.gpu_slots_bytes or 0) if on_gpu else host_bytes,
        "source": streaming.pack,
    }
    if on_gpu:
        found |= {
            "host_bytes": host_bytes,
            "storage_bytes": from_storage,
            "bytes_copied": counts.get("bytes_copied", 0),
        }
    return found
