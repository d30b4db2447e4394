"""Predicts how fast a model generates with its weights streamed: trunkline.stream.plan."""

import math
import os
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch

from trunkline._core import parse_size
from trunkline._errors import OutOfBudget, Unsupported
from trunkline._modes import independent_of_modes
from trunkline._paths import path_name
from trunkline._streaming import roofline as rooflines
from trunkline._streaming import routing_trace as traces
from trunkline._streaming.cache_sizes import CacheSizes
from trunkline._streaming.memory import budget_argument, default_budget
from trunkline._streaming.roofline import Compute, GpuMemory, Rate, Sizes
from trunkline._types import Path
from trunkline.stream import _machine

if TYPE_CHECKING:
    from trunkline.transformers.hub import ModelFolder

BATCH_SIZES = (1, 4, 16, 64, 256)
_DISKS = (1, 2, 4, 8)


@independent_of_modes
def plan(
    model_dir: Path,
    *,
    device: "str | torch.device" = "cpu",
    batch_size: int = 1,
    memory_budget: int | str | None = None,
    host_memory: int | str | None = None,
    bandwidth: float | str | None = None,
    bus_bandwidth: float | str | None = None,
    volumes: "Sequence[Path] | None" = None,
    dtype: torch.dtype | str | None = None,
    flops: float | None = None,
    skew: float = 0.0,
    routing_trace: "Path | None" = None,
    revision: str | None = None,
    cache_dir: "Path | None" = None,
    subfolder: str = "",
    text_only: bool = False,
    keep: str = "dequantised",
) -> dict[str, Any]:
    """Predict how fast a model of trunkline.transformers.from_pretrained generates; needs no weights.

    `model_dir`: a folder with the config.json of a model, or the name of a model in the Hugging Face cache
    (`revision`, `cache_dir`, `subfolder`, `text_only`, `keep`: as for from_pretrained; "quantised" needs the
    files of the weights, and does not count the time to dequantise). `batch_size`: rows that are generated at
    once. `memory_budget`, `host_memory`, `dtype`: as for from_pretrained. `bandwidth`: of the
    storage, in bytes per second (a number, or a str such as "6.8GB"); None measures it by reading the largest
    files of `volumes`, or else of `model_dir`. `flops`: operations per second that the machine computes; None
    measures how long multiplications take.

    With `device` "cuda" the weights are in three places: as many as `memory_budget` allows in the GPU's
    memory, of the rest as many as `host_memory` allows in main memory, and the others in storage.
    `bus_bandwidth`: bytes per second from main memory to the GPU; None measures it. No GPU is needed if
    `memory_budget`, `bus_bandwidth` and `flops` are given.

    Of a mixture of experts on a CPU, each step reads the experts that its tokens use and that are not in
    memory. How many of those are depends on the router; `skew` is the exponent of the Zipf distribution by
    which it is assumed to choose (0: uniformly). `routing_trace`: a file that from_pretrained recorded; the
    routing is then what the trace has, of its steps with `batch_size` tokens, and `skew` is not used.

    Returns a dict: "model", "weight_bytes", "least_budget", "memory_budget", "resident_bytes" that stay in
    memory with it ("least_resident_bytes" with any budget), "streamed_bytes" in each step, "bandwidth",
    "batch_size", "tokens_per_second" of all rows together, "seconds_per_step", "storage_seconds",
    "compute_seconds", "bound" ("storage" or "compute"); and the speed with other choices: "batch_sizes",
    "memory" and "disks", lists of dicts with "tokens_per_second". "pack" is a dict: whether from_pretrained
    makes a pack by default ("needed"; None where the weights are not there to tell), whether it "exists",
    its "directory" and "bytes", and the "free_bytes" there. On a GPU also "host_memory",
    "copied_bytes" to it in each step, "bus_bandwidth", "bus_seconds", and a list "host"; "bound" may be
    "bus". Where experts are read as tokens are routed to them, "experts" is a dict: their "total_bytes", how
    many bytes are cached ("cached_bytes"), used and read in a step ("used_bytes", "read_bytes"; these are not
    in "streamed_bytes"), and the "hit_rate". With a trace, that is of all of its steps, beginning with an
    empty cache, and the bytes are averages; "trace" is a dict: its "file", "model" and "steps", those of them
    with `batch_size` tokens ("steps_of_batch"), the share of uses that are the first of an expert
    ("first_uses": no cache that is empty at first avoids reading these), and "sizes", a list of dicts over
    sizes of the cache: "cached_bytes", the share of all experts ("cached"), the "memory_budget" with which
    the cache has that size, "hit_rate", what it would be with other policies ("lru", "lfu", and "static": the
    experts that the first half of the trace uses most), "read_bytes", and the speed.

    Raises OutOfBudget, which names the least budget; Unsupported as from_pretrained does; FileNotFoundError
    if there is no file to measure; ValueError for arguments out of range, and for a trace of another model or
    without such steps; Corrupt and Format, which name the line, for a trace that cannot be read.
    """
    target = _device_argument(device)
    _check_device(target, host_memory, bus_bandwidth, (memory_budget, bus_bandwidth, flops))
    _check_numbers(batch_size, skew)
    if routing_trace is not None and target.type != "cpu":
        raise ValueError("routing_trace: only for a model on the CPU; on a GPU whole layers are streamed")
    # Imported here: modules of transformers take seconds.
    from trunkline.transformers.hub import find_model
    from trunkline.transformers.planned_pack import planned_pack

    config = f"{subfolder}/config.json" if subfolder else "config.json"
    found = find_model(model_dir, revision=revision, cache_dir=cache_dir, subfolder=subfolder, needed=config)
    folder = found.path
    sizes, routed, model_dtype, name = _sizes_of_model(found, dtype, text_only, keep, target)
    trace = None if routing_trace is None else _cache_sizes(routing_trace, routed, name, batch_size)
    budget = budget_argument(memory_budget, target)
    bytes_per_second = _storage_bandwidth(bandwidth, volumes, folder)
    compute = _compute_argument(flops, model_dtype, target)
    predictor: _CpuPredictor | _GpuPredictor
    if target.type == "cpu":
        predictor = _CpuPredictor(sizes, routed, compute, float(skew), trace)
        sizes = predictor.sizes(budget)
    else:
        host = default_budget() if host_memory is None else parse_size(host_memory, "host_memory")
        predictor = _GpuPredictor(sizes, compute, host, _bus_bandwidth(bus_bandwidth, target))
    least = predictor.least_budget
    return {
        "device": str(target),
        "model": name,
        "weight_bytes": sizes.weight_bytes,
        "pack": planned_pack(found, dtype, sizes.weight_bytes, text_only, keep),
        "least_budget": least,
        "memory_budget": budget,
        "least_resident_bytes": sizes.resident_bytes,
        **predictor.streamed_fields(budget),
        "bandwidth": bytes_per_second,
        **predictor.rate(budget, bytes_per_second, batch_size),
        **predictor.extra_fields(budget, bytes_per_second, batch_size),
        "batch_sizes": [
            predictor.rate(budget, bytes_per_second, rows) for rows in predictor.batch_sizes(batch_size)
        ],
        "memory": [
            {"memory_budget": memory, **rate}
            for memory in _budgets(least, budget, sizes.weight_bytes + sizes.scratch_bytes)
            if (rate := predictor.possible_rate(memory, bytes_per_second, batch_size)) is not None
        ],
        "disks": [
            {"disks": disks, **predictor.rate(budget, bytes_per_second * disks, batch_size)}
            for disks in _DISKS
        ],
    }


class _CpuPredictor:
    """A model whose weights are in main memory and in storage.

    `routed`: its sizes with experts that are read as tokens are routed to them; None if it has none. `trace`:
    of its routing.
    """

    def __init__(
        self, whole: Sizes, routed: Sizes | None, compute: Compute, skew: float, trace: CacheSizes | None
    ) -> None:
        self._whole = whole
        self._routed = routed
        self._compute = compute
        self._skew = skew
        self._trace = trace
        self.least_budget = min(each.least_budget for each in (whole, routed) if each is not None)

    def sizes(self, budget: int) -> Sizes:
        """Return the sizes with which from_pretrained loads the model."""
        whole, routed = self._whole, self._routed
        if routed is None:
            return whole
        fits = rooflines.paged_bytes(whole.unit_bytes) <= budget - whole.resident_bytes
        if budget >= whole.least_budget and (fits or budget < routed.least_budget):
            return whole
        return routed

    def streamed_fields(self, budget: int) -> dict[str, int]:
        """Return the bytes that stay in memory, and those that each step streams."""
        sizes = self.sizes(budget)
        streamed = rooflines.streamed_bytes(sizes, budget)
        resident = sizes.dense_bytes + sizes.scratch_bytes - streamed
        return {"resident_bytes": resident, "streamed_bytes": streamed}

    def rate(self, budget: int, bandwidth: float, rows: int) -> dict[str, Any]:
        """Return the predicted speed."""
        sizes = self.sizes(budget)
        read, _ = self._expert_bytes(sizes, budget, rows)
        return _rate_fields(rooflines.rate(sizes, budget, bandwidth, rows, self._compute, read))

    possible_rate = rate

    def batch_sizes(self, rows: int) -> Sequence[int]:
        """Return those to compare; of a trace only `rows` are known."""
        return BATCH_SIZES if self._trace is None else (rows,)

    def _expert_bytes(self, sizes: Sizes, budget: int, rows: int) -> tuple[float, float]:
        """Return the bytes of experts that a step reads, and those that it uses."""
        cached = rooflines.cache_bytes(sizes, budget)
        if self._trace is None or not sizes.experts:
            return rooflines.expert_bytes_read(sizes, cached, rows, self._skew)
        replayed = self._trace.at(cached)
        return replayed.read_bytes, replayed.used_bytes

    def extra_fields(self, budget: int, bandwidth: float, rows: int) -> dict[str, Any]:
        """Return further fields of the result: those of experts, and of a trace."""
        sizes = self.sizes(budget)
        if not sizes.experts:
            return self._trace_fields(bandwidth, rows)
        cached = rooflines.cache_bytes(sizes, budget)
        return {**self._expert_fields(budget, rows), **self._trace_fields(bandwidth, rows, cached)}

    def _expert_fields(self, budget: int, rows: int) -> dict[str, Any]:
        sizes = self.sizes(budget)
        cached, trace = rooflines.cache_bytes(sizes, budget), self._trace
        read, used = self._expert_bytes(sizes, budget, rows)
        experts = {
            "total_bytes": sizes.weight_bytes - sizes.dense_bytes,
            "cached_bytes": cached,
            "used_bytes": round(used),
            "read_bytes": round(read),
            "hit_rate": 1 - read / used if trace is None else trace.at(cached).hit_rate,
        }
        return {"experts": experts}

    def _trace_fields(self, bandwidth: float, rows: int, *cached: int) -> dict[str, Any]:
        """Return what a trace says about sizes of the cache, these among them."""
        trace, sizes = self._trace, self._routed
        if trace is None or sizes is None:
            return {}
        dense = sizes.resident_bytes + rooflines.paged_bytes(sizes.unit_bytes)
        total = sizes.weight_bytes - sizes.dense_bytes
        compute = self._compute(sizes.active_bytes, rows)
        found = []
        # Experts get the memory for a step before other units do: rooflines.split_memory.
        for each in trace.over_sizes(sizes.cache_bytes_of_a_step, *cached):
            rate = Rate(rows, each.read_bytes / bandwidth, compute)
            found.append(
                {
                    "cached_bytes": each.cached_bytes,
                    "cached": each.cached_bytes / total,
                    "memory_budget": dense + each.cached_bytes,
                    **{
                        name: getattr(each, name)
                        for name in ("hit_rate", "lru", "lfu", "static", "read_bytes")
                    },
                    **_rate_fields(rate),
                }
            )
        return {"trace": {**trace.document, "sizes": found}}


class _GpuPredictor:
    """A model whose weights are in a GPU's memory, in `host` bytes of main memory, and in storage.

    `bus`: bytes per second from main memory to the GPU.
    """

    def __init__(self, sizes: Sizes, compute: Compute, host: int, bus: float) -> None:
        self._sizes = sizes
        self._compute = compute
        self._host = host
        self._bus = bus
        self.least_budget = sizes.least_budget

    def batch_sizes(self, rows: int) -> Sequence[int]:
        """Return those to compare."""
        return BATCH_SIZES

    def streamed_fields(self, budget: int) -> dict[str, int]:
        """Return the bytes that stay in the GPU's memory, and those that each step streams from storage."""
        copied, streamed = rooflines.gpu_streams(self._sizes, GpuMemory(budget, self._host))
        return {"resident_bytes": self._sizes.weight_bytes - copied, "streamed_bytes": streamed}

    def rate(self, budget: int, bandwidth: float, rows: int, host: int | None = None) -> dict[str, Any]:
        """Return the predicted speed; `host`: another size of main memory."""
        memory = GpuMemory(budget, self._host if host is None else host)
        rate = rooflines.rate_on_gpu(self._sizes, memory, bandwidth, self._bus, rows, self._compute)
        return _rate_fields(rate) | {"bus_seconds": rate.bus_seconds}

    def possible_rate(self, budget: int, bandwidth: float, rows: int) -> dict[str, Any] | None:
        """Return the predicted speed; None if the units to be streamed do not fit into main memory."""
        try:
            return self.rate(budget, bandwidth, rows)
        except OutOfBudget:
            return None

    def extra_fields(self, budget: int, bandwidth: float, rows: int) -> dict[str, Any]:
        """Return the bytes copied to the GPU, and the speed with other sizes of main memory."""
        copied, _ = rooflines.gpu_streams(self._sizes, GpuMemory(budget, self._host))
        passing = rooflines.passing_units(self._sizes, budget, rooflines.GPU_SLOTS)
        hosts = {rooflines.slots_bytes(passing), self._host, rooflines.paged_bytes(passing)}
        return {
            "host_memory": self._host,
            "copied_bytes": copied,
            "bus_bandwidth": self._bus,
            "host": [
                {"host_memory": host, **self.rate(budget, bandwidth, rows, host)} for host in sorted(hosts)
            ],
        }


def _cache_sizes(path: Path, routed: Sizes | None, name: str, rows: int) -> CacheSizes:
    """Read a trace, and return it with the sizes of the model's experts."""
    if routed is None:
        raise ValueError(f"routing_trace: {name} has no experts that can be read one by one")
    trace = traces.read(FilePath(path_name(path, "routing_trace")))
    try:
        return CacheSizes(trace, routed.experts, rows)
    except ValueError as error:
        raise ValueError(f"routing_trace: {error}") from None


def _device_argument(device: "str | torch.device") -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device: must be "cpu" or "cuda", not {device!r}') from None
    if target.type not in ("cpu", "cuda"):
        raise Unsupported(None, f'device: "{device}" is not supported; use cpu or cuda')
    return target


def _check_numbers(batch_size: int, skew: float) -> None:
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size: must be a whole number from 1, not {batch_size!r}")
    if not (isinstance(skew, int | float) and 0 <= skew < math.inf):
        raise ValueError(f"skew: must be a number from 0, not {skew!r}")


def _check_device(
    target: torch.device,
    host_memory: int | str | None,
    bus_bandwidth: float | str | None,
    measured_on_gpu: "tuple[object, ...]",
) -> None:
    if target.type == "cpu" and (host_memory is not None or bus_bandwidth is not None):
        raise ValueError(
            "host_memory, bus_bandwidth: only for a model on a GPU; set the device to cuda, or omit them"
        )
    if target.type == "cuda" and None in measured_on_gpu and not torch.cuda.is_available():
        raise Unsupported(
            None,
            f"device: cannot measure {target}: torch sees no CUDA GPU; pass memory_budget=, "
            "bus_bandwidth= and flops=",
        )


def _storage_bandwidth(
    bandwidth: float | str | None, volumes: "Sequence[Path] | None", folder: FilePath
) -> float:
    if bandwidth is not None:
        return _bandwidth_argument(bandwidth, "bandwidth")
    if isinstance(volumes, str | bytes | os.PathLike):
        raise TypeError(
            f"volumes: must be a list of directories, not {type(volumes).__name__}; put it into a list"
        )
    if volumes is not None and not volumes:
        raise ValueError("volumes: must not be empty")
    return _machine.measure_reading(
        [folder] if volumes is None else [FilePath(path_name(volume)) for volume in volumes]
    )


def _bus_bandwidth(bandwidth: float | str | None, target: torch.device) -> float:
    if bandwidth is None:
        return _machine.measure_copying(target)
    return _bandwidth_argument(bandwidth, "bus_bandwidth")


def _compute_argument(flops: float | None, dtype: torch.dtype, target: torch.device) -> Compute:
    if flops is None:
        return _machine.measure_compute(dtype, target)
    if not (isinstance(flops, int | float) and 0 < flops < math.inf):
        raise ValueError(f"flops: must be a positive number of operations per second, not {flops!r}")
    return computing_at(flops, dtype.itemsize)


def _bandwidth_argument(bandwidth: float | str, name: str) -> float:
    if not isinstance(bandwidth, str | int | float):
        raise TypeError(f"{name}: must be a number or a str, not {type(bandwidth).__name__}")
    bytes_per_second = float(parse_size(bandwidth, name) if isinstance(bandwidth, str) else bandwidth)
    if not bytes_per_second > 0:
        raise ValueError(f"{name}: must be more than 0 bytes per second, not {bandwidth!r}")
    if not math.isfinite(bytes_per_second):
        raise ValueError(f"{name}: must be a finite number of bytes per second, not {bandwidth!r}")
    return bytes_per_second


def _sizes_of_model(
    found: "ModelFolder", dtype: torch.dtype | str | None, text_only: bool, keep: str, device: torch.device
) -> tuple[Sizes, Sizes | None, torch.dtype, str]:
    from trunkline.transformers.hub import add_download
    from trunkline.transformers.planned_pack import stored_sizes

    stored = stored_sizes(found, dtype, text_only, keep, device)
    if stored is not None:
        whole, routed, model = stored
        return whole, routed, model.dtype, _title(model, found.name or str(found.path))
    try:
        return sizes_of(found.path, dtype, found.name, text_only)
    except FileNotFoundError as error:
        add_download(error, found)
        raise


def sizes_of(
    folder: FilePath, dtype: torch.dtype | str | None, name: str = "", text_only: bool = False
) -> tuple[Sizes, Sizes | None, torch.dtype, str]:
    """Return the sizes of the weights of the model in a folder, its dtype, and its name, with its class.

    The second sizes are those with experts that are read as tokens are routed to them; None if it has none.
    """
    from trunkline.transformers import meta_model
    from trunkline.transformers.stored_model import divide, dtype_argument

    model = meta_model.make_for_plan(folder, dtype_argument(dtype), text_only)
    _, whole, routed = divide(model)
    sizes = [None if each is None else each.sizes(model.config) for each in (whole, routed)]
    assert sizes[0] is not None
    return sizes[0], sizes[1], model.dtype, _title(model, name or str(folder))


def _title(model: Any, name: str) -> str:
    return f"{type(model).__name__} ({FilePath(name).name})"


def computing_at(flops: float, bytes_per_weight: int) -> Compute:
    """Return the computing time at `flops` operations per second: two for each weight and row."""

    def seconds(weight_bytes: int, batch_size: int) -> float:
        return 2 * batch_size * weight_bytes / bytes_per_weight / flops

    return seconds


def _budgets(least: int, budget: int, weight_bytes: int) -> list[int]:
    """Return budgets to compare: the least, the given one, twice and four times it, and all weights."""
    found = {least, budget, max(least, weight_bytes)}
    found.update(budget * times for times in (2, 4) if budget * times < weight_bytes)
    return sorted(found)


def _rate_fields(rate: Rate) -> dict[str, Any]:
    return {
        "batch_size": rate.batch_size,
        "tokens_per_second": rate.tokens_per_second,
        "seconds_per_step": rate.seconds,
        "storage_seconds": rate.storage_seconds,
        "compute_seconds": rate.compute_seconds,
        "bound": rate.bound,
    }
