"""The state and the statistics of a model whose weights are streamed."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trunkline._arguments import bool_argument
from trunkline._core import UnitCache, WeightStream
from trunkline._streaming.idle_team import IdleTeam


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
    experts: UnitCache | None = None  # None: no experts are read as tokens are routed to them
    expert_bytes: int = 0  # of all of those
    expert_matrices: int = 1  # of each
    expert_modules: Sequence[str] = ()  # their names, by group of the cache
    idle_team: IdleTeam | None = None  # while any weights are read during passes


streaming_of: "weakref.WeakKeyDictionary[Any, Streaming]" = weakref.WeakKeyDictionary()


def stats(model: Any, *, per_layer: bool = False) -> dict[str, Any]:
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

    For a model whose experts are read as tokens are routed to them, "experts" is a dict: "hits", "misses" and
    "hit_rate" of the matrices that steps needed, "bytes_read", "bytes_per_pass", "evictions", "steps" (of a
    layer each), "used_per_step" (experts), "cached_bytes" that the cache has room for, and "total_bytes" of
    all experts. "streamed_bytes" are then those of all other weights; all other bytes and seconds include the
    experts. With `per_layer`, "experts" also has "layers", a list of dicts: the "name" of the module, and its
    own "steps", "used_per_step" (on average, how many different experts the tokens of a step use), "hits",
    "misses", "hit_rate", "bytes_read" and "evictions" (of its matrices).

    `model` may be wrapped by torch.compile. Raises TypeError for any other model. Thread-safe.
    """
    bool_argument(per_layer, "per_layer")
    model = getattr(model, "_orig_mod", model)
    streaming = streaming_of.get(model) if hasattr(model, "parameters") else None
    if streaming is None:
        raise TypeError(
            "model: must be a model returned by trunkline.transformers.from_pretrained, not "
            f"{type(model).__name__}"
        )
    counts: dict[str, Any] = {} if streaming.stream is None else streaming.stream.stats()
    cached: dict[str, Any] = {} if streaming.experts is None else streaming.experts.stats()
    placement = {"memory_bytes": 0, "slots": 0} if streaming.stream is None else streaming.stream.placement
    passes = 0 if streaming.hooks is None else streaming.hooks.passes
    seconds = 0.0 if streaming.hooks is None else streaming.hooks.seconds
    wait, verify = (_sum(counts, cached, name) for name in ("wait_seconds", "verify_seconds"))
    slots = placement["slots"] * placement.get("slot_bytes", 0)
    compute = max(0.0, seconds - wait - verify)
    read = _sum(counts, cached, "bytes_read")
    read_seconds = max(counts.get("read_seconds", 0.0), cached.get("read_seconds", 0.0))
    storage = read / read_seconds if read_seconds else 0.0
    on_gpu = streaming.gpu_slots_bytes is not None
    stays_in_main_memory = placement["memory_bytes"] - slots if on_gpu else 0
    from_storage = max(0, streaming.streamed_bytes - stays_in_main_memory)
    from_cache = cached.get("bytes_read", 0)
    limit = max((from_storage * passes + from_cache) / storage if storage else 0.0, compute)
    cache_bytes = 0 if streaming.experts is None else streaming.experts.placement["memory_bytes"]
    host_bytes = placement["memory_bytes"] + (0 if on_gpu else streaming.resident_bytes)
    found = {
        "passes": passes,
        "seconds": seconds,
        "wait_seconds": wait,
        "verify_seconds": verify,
        "compute_seconds": compute,
        "limit_seconds": limit,
        "of_limit": min(1.0, limit / seconds) if seconds else None,
        "gb_s": (streaming.streamed_bytes * passes + from_cache) / seconds / 1e9 if seconds else 0.0,
        "bytes_read": read,
        "storage_gb_s": storage / 1e9,
        "streamed_bytes": streaming.streamed_bytes,
        "resident_bytes": streaming.resident_bytes if on_gpu else host_bytes - slots,
        "memory_bytes": (
            streaming.resident_bytes + (streaming.gpu_slots_bytes or 0)
            if on_gpu
            else host_bytes + cache_bytes
        ),
        "source": streaming.pack,
    }
    if streaming.experts is not None:
        found["experts"] = _of_experts(cached, cache_bytes, streaming, passes)
        if per_layer:
            found["experts"]["layers"] = [
                {"name": name} | _counts(group, streaming)
                for name, group in zip(streaming.expert_modules, streaming.experts.group_stats(), strict=True)
            ]
    if on_gpu:
        found |= {
            "host_bytes": host_bytes,
            "storage_bytes": from_storage,
            "bytes_copied": counts.get("bytes_copied", 0),
        }
    return found


def _sum(counts: dict[str, Any], cached: dict[str, Any], name: str) -> Any:
    return counts.get(name, 0) + cached.get(name, 0)


def _of_experts(
    cached: dict[str, Any], cache_bytes: int, streaming: Streaming, passes: int
) -> dict[str, Any]:
    return {
        **_counts(cached, streaming),
        "bytes_per_pass": cached["bytes_read"] / passes if passes else None,
        "cached_bytes": cache_bytes,
        "total_bytes": streaming.expert_bytes,
    }


def _counts(counted: dict[str, Any], streaming: Streaming) -> dict[str, Any]:
    """Return what a cache, or a group of it, has counted."""
    needed = counted["hits"] + counted["misses"]
    steps = counted["requests"]
    return {
        "hits": counted["hits"],
        "misses": counted["misses"],
        "hit_rate": counted["hits"] / needed if needed else None,
        "bytes_read": counted["bytes_read"],
        "evictions": counted["evictions"],
        "steps": steps,
        "used_per_step": needed / streaming.expert_matrices / steps if steps else None,
    }
