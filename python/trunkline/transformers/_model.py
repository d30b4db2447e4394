"""Models larger than memory: trunkline.transformers.from_pretrained."""

import weakref
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from trunkline import _core
from trunkline._core import File, WeightStream, parse_size
from trunkline._logging import Log
from trunkline._modes import independent_of_modes
from trunkline._paths import absolute_path, path_name
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming import pack
from trunkline._streaming import stored as stored_tensors
from trunkline._streaming.location import PackLocation
from trunkline._streaming.memory import machine_memory
from trunkline._streaming.stored import FileTensor
from trunkline._streaming.streaming import Streaming, streaming_of
from trunkline._tensor_io.memory import Device, empty_bytes
from trunkline._trace import span
from trunkline._types import Path
from trunkline.transformers import skeleton
from trunkline.transformers._bound_unit import UnitMemory, advised
from trunkline.transformers._expert_hooks import route
from trunkline.transformers._offloaded import OffloadedWeight, StateGuard
from trunkline.transformers._packing import location_argument, opened, planned
from trunkline.transformers._tiers import (
    Memory,
    MemoryPlan,
    memory_arguments,
    plan_placement,
)
from trunkline.transformers._weight_hooks import MatchStockMatmul, WeightHooks
from trunkline.transformers.stored_model import Checkpoint, read_checkpoint

_log = Log("transformers")


@independent_of_modes
def from_pretrained(
    model_dir: Path,
    *,
    device: Device = "cpu",
    memory_budget: int | str | None = None,
    host_memory: int | str | None = None,
    pack_dir: "Path | None" = None,
    volumes: "Sequence[Path] | None" = None,
    dtype: torch.dtype | str | None = None,
    unit_bytes: int | str | None = None,
) -> Any:
    """Load a causal language model whose weights need not fit into memory; the model is otherwise stock.

    `model_dir`: a Hugging Face folder of safetensors files. Embeddings, norms and head stay in memory, and as
    many of the decoder layers as `memory_budget` (bytes, or a str such as "8GB"; None: half of the available
    memory) has room for; the others are read in each pass, ahead of their use. The budget bounds weights in
    memory and what is read ahead; activations and the key-value cache come on top.

    The files are read in place if their layout allows it. If not, or if `pack_dir` or `volumes` is given, the
    weights are first written into a pack: one file in the order of use (or striped over the directories
    `volumes`, each on its own disk) in `pack_dir`, or in the folder trunkline-pack of `model_dir`. Later
    calls find it there. `dtype`: None is that of the model's config. `unit_bytes`: how much is read and
    released as a whole (None: 16 MiB, or the largest weight).

    `device`: "cpu", or a CUDA GPU. There `memory_budget` bounds the weights in the GPU's memory (None: half
    of the free memory), and `host_memory` those in main memory (None: half of the available memory), from
    which weights that do not fit on the GPU are copied to it in each pass, ahead of their use; only the rest
    is read from the disk in each pass. The default device of torch is ignored, and weights are ordinary
    tensors even when the model is loaded under torch.inference_mode().

    Raises OutOfBudget, which names the least budget; Unsupported for quantised weights, other devices, and
    models without decoder layers; Format for a folder that is not such a checkpoint. generate() raises errors
    of the storage (the model works again once their cause is gone), and Corrupt for weights that were changed
    on disk. One thread at a time may use the model, and it cannot be trained.
    """
    folder = FilePath(path_name(model_dir, "model_dir"))
    if folder.is_dir():  # else it may be the name of a model on the hub
        folder = FilePath(absolute_path(folder, "model_dir"))  # read again while the model is used
    memory = memory_arguments(device, memory_budget, host_memory, folder)
    location = location_argument(folder, pack_dir, volumes)
    unit = None if unit_bytes is None else parse_size(unit_bytes, "unit_bytes")
    if unit == 0:
        raise ValueError("unit_bytes: must be at least 1")
    if unit is not None and unit > machine_memory():
        raise ValueError(
            f"unit_bytes: must not exceed the memory of this machine ({machine_memory() / 1e9:.1f} GB), not "
            f"{unit_bytes!r}"
        )
    must_pack = "pack_dir or volumes is given" if pack_dir is not None or volumes is not None else None
    with span("stream", "from_pretrained", str(folder)):
        return _load(folder, memory, location, must_pack, dtype, unit)


def _load(
    folder: FilePath,
    memory: Memory,
    location: PackLocation,
    must_pack: str | None,
    dtype: torch.dtype | str | None,
    unit_bytes: int | None,
) -> Any:
    """Load the model; `must_pack`: why a pack is used even if the files can be read in place."""
    with span("stream", "read config and headers", str(folder)):
        checkpoint = read_checkpoint(folder, dtype, unit_bytes)
    why_pack = must_pack or checkpoint.why_not_in_place()
    if why_pack is None:
        _log.info("%s: the files are read in place", folder)
        places = {name: checkpoint.weights.stored[name] for name in checkpoint.order}
        plan = plan_placement(memory, checkpoint, places)
        paths = [header.path for header in checkpoint.headers]
        in_place = checkpoint.headers
        before = pack.file_versions(in_place)
        streamed = [_core.open(path) for path in paths]
        reopened = [_core.open(path) for path in paths]
        source = str(folder)
        remedy = "restore or download the file, then load the model again"
    else:
        _log.info("%s: the weights are read from a pack: %s", folder, why_pack)
        in_place, before = [], []
        manifest, files, _ = opened(
            location, checkpoint, 2, lambda: plan_placement(memory, checkpoint, _by_name(planned(checkpoint)))
        )
        streamed, reopened = files[:1], files[1:]
        places = _by_name(manifest.tensors)
        plan = plan_placement(memory, checkpoint, places)
        paths = [source] = [str(location.directories[0] / manifest.weights)]
        remedy = f"remove {location.directories[0] / pack_manifest.NAME} to rebuild the pack"

    names = plan.resident
    with advised(remedy), span("stream", "read the weights that stay", source):
        kept = stored_tensors.read([places[name] for name in names], reopened, paths, memory.device)
    for name, tensor in zip(names, kept, strict=True):
        _put(checkpoint.model, checkpoint.aliases[name], tensor)
    MatchStockMatmul(checkpoint.model, [each for each in checkpoint.model.parameters() if not each.is_meta])
    skeleton.finish(checkpoint.model, folder, memory.device)
    streaming = Streaming(None, None, sum(tensor.nbytes for tensor in kept), 0, source, plan.gpu_slots_bytes)
    if plan.streamed:
        _stream(streaming, checkpoint.layers, plan, streamed, memory, remedy)
    if plan.experts is not None:
        streaming.experts = route(plan.experts, streamed, remedy)
        streaming.expert_bytes = sum(each.nbytes for each in plan.experts.experts)
        streaming.expert_matrices = len(plan.experts.experts[0].weights)
    _log_placement(checkpoint, plan, memory, streaming)
    pack.check_unchanged(in_place, before)  # from here on the stream checks them
    _reject_saving_and_conversion(checkpoint.model)
    streaming_of[checkpoint.model] = streaming
    return checkpoint.model


def _log_placement(checkpoint: Checkpoint, plan: MemoryPlan, memory: Memory, streaming: Streaming) -> None:
    """Log which weights are where, and the budgets that decided it."""
    on_device = len(checkpoint.whole.units) - len(plan.streamed)
    in_memory = 0 if streaming.stream is None else sum(streaming.stream.placement["resident"])
    from_disk = len(plan.streamed) - in_memory
    if plan.experts is not None:
        _log.info(
            "%s: experts are read as tokens are routed to them; %d bytes hold those that are used most",
            checkpoint.folder,
            plan.experts.memory_bytes,
        )
    _log.info(
        "%s: on %s stay %d bytes: embeddings, norms, head%s; of %d other units, %d stay in main memory%s, "
        "and %d are read from %s in each pass (memory_budget: %d bytes%s)",
        checkpoint.folder,
        memory.device,
        streaming.resident_bytes,
        f" and {on_device} units" if memory.on_gpu else "",
        len(plan.streamed),
        in_memory,
        " and are copied to the GPU in each pass" if memory.on_gpu else "",
        from_disk,
        streaming.pack,
        memory.budget,
        f", host_memory: {memory.host_bytes} bytes" if memory.on_gpu else "",
    )


def _reject_saving_and_conversion(model: Any) -> None:
    """Make these fail before they change anything (save_pretrained() removes older files first)."""
    own = WeakIdKeyDictionary(dict.fromkeys(model.parameters()))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            StateGuard(module, own)
    absent = next((each for each in model.parameters() if isinstance(each, OffloadedWeight)), None)
    if absent is None:
        return
    # half(), to() and the like convert one module after another.
    convert, this = type(model)._apply, weakref.ref(model)

    def checked(conversion: Any, *options: Any, **others: Any) -> Any:
        conversion(absent)
        return convert(this(), conversion, *options, **others)

    model._apply = checked


def _by_name(tensors: Sequence[FileTensor]) -> dict[str, FileTensor]:
    return {stored.name: stored for stored in tensors}


def _put(model: Any, names: Sequence[str], tensor: torch.Tensor) -> None:
    """Set a weight or stored buffer of the model to the tensor, under all of its names."""
    made: nn.Parameter | None = None
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
            continue
        made = made if made is not None else nn.Parameter(tensor, requires_grad=False)
        module._parameters[leaf] = made


def _stream(
    streaming: Streaming,
    layers: nn.ModuleList,
    plan: MemoryPlan,
    files: Sequence[File],
    memory: Memory,
    remedy: str,
) -> None:
    """Stream the units."""
    passing, slots = plan.streamed, None
    if streaming.gpu_slots_bytes is not None:
        slots = empty_bytes(streaming.gpu_slots_bytes, memory.device)
    stream = WeightStream(
        list(files), [each.described for each in passing], memory_bytes=plan.host_bytes, device_memory=slots
    )
    views = [each.views(memory) for each in passing]
    streaming.stream = stream
    unit_memory = UnitMemory(stream, remedy, slots)
    streaming.hooks = WeightHooks(layers, [each.unit for each in passing], views, unit_memory)
    # On a GPU all of them are copied in each pass, also those that stay in main memory.
    stays = [False] * len(passing) if memory.on_gpu else stream.placement["resident"]
    streaming.streamed_bytes = sum(
        each.unit.nbytes for each, stay in zip(passing, stays, strict=True) if not stay
    )
