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
from trunkline._modes import independent_of_modes
from trunkline._paths import absolute_path, path_name
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming import pack
from trunkline._streaming import stored as stored_tensors
from trunkline._streaming.stored import Stored
from trunkline._streaming.streaming import Streaming, streaming_of
from trunkline._tensor_io.memory import Device, empty_bytes
from trunkline._types import Path
from trunkline.transformers import skeleton
from trunkline.transformers._bound_unit import UnitMemory, advised
from trunkline.transformers._offloaded import OffloadedWeight, StateGuard
from trunkline.transformers._packing import location_argument, opened, planned
from trunkline.transformers._tiers import Memory, StoredUnit, memory_arguments, plan_placement
from trunkline.transformers._weight_hooks import MatchStockMatmul, WeightHooks
from trunkline.transformers.stored_model import look_into


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
    """Load a causal language model whose weights need not fit into memory; all else of it is stock.

    `model_dir`: a Hugging Face folder of safetensors files. Embeddings, norms and head stay in memory, and of
    the decoder layers as much as `memory_budget` (bytes or a str such as "8GB"; None: half of the memory that
    is available) has room for; the rest is read as it is used, in each pass anew, ahead of its use. The
    budget bounds weights in memory and what is read ahead; activations and the cache of keys and values come
    on top.

    Where the files allow it they are read as they are. Else, and when `pack_dir` or `volumes` is given, their
    weights are first written into a pack, one file in the order of use (or striped over the directories
    `volumes`, each on a disk of its own), which later starts find again: in `pack_dir`, or the folder
    trunkline-pack of `model_dir`. `dtype`: None is that of the model's config. `unit_bytes`: how much is read
    and released as a whole (None: 16 MiB, or the largest weight).

    `device`: "cpu", or a CUDA GPU. There `memory_budget` bounds the weights in the GPU's memory (None: half
    of what is free), and `host_memory` those in main memory, from where what has no room on the GPU is copied
    to it in each pass, ahead of its use (None: half of what is available); only the rest is read from the
    disk each time. The default device of torch is ignored, and weights are ordinary tensors even when the
    model is loaded under torch.inference_mode().

    Raises OutOfBudget, which names the least that would do; Unsupported for quantised weights, other devices,
    and models without decoder layers; Format for a folder that is no such checkpoint. What generate() meets
    it raises: an Error of the storage (the model works again when its cause is gone), Corrupt for weights
    that were changed. One thread at a time may use the model, and nobody train it.
    """
    folder = FilePath(path_name(model_dir, "model_dir"))
    if folder.is_dir():  # else it may be the name of a model on the hub
        folder = FilePath(absolute_path(folder, "model_dir"))  # read again while the model is used
    memory = memory_arguments(device, memory_budget, host_memory, folder)
    location = location_argument(folder, pack_dir, volumes)
    unit = None if unit_bytes is None else parse_size(unit_bytes, "unit_bytes")
    if unit == 0:
        raise ValueError("unit_bytes: must be at least 1")
    checkpoint = look_into(folder, dtype, unit)

    if pack_dir is None and volumes is None and checkpoint.readable_in_place:
        places = {name: checkpoint.weights.stored[name] for name in checkpoint.order}
        shares = plan_placement(memory, checkpoint, places)
        paths = [header.path for header in checkpoint.headers]
        in_place = checkpoint.headers
        before = pack.look(in_place)
        streamed = [_core.open(path) for path in paths]
        again = [_core.open(path) for path in paths]
        shown = str(folder)
        remedy = "fetch the file again, and load the model again"
    else:
        in_place, before = [], []
        manifest, files, _ = opened(
            location, checkpoint, 2, lambda: plan_placement(memory, checkpoint, _by_name(planned(checkpoint)))
        )
        streamed, again = files[:1], files[1:]
        places = _by_name(manifest.tensors)
        shares = plan_placement(memory, checkpoint, places)
        paths = [shown] = [str(location.directories[0] / manifest.weights)]
        remedy = f"remove {location.directories[0] / pack_manifest.NAME} to have the pack made anew"

    names = [*checkpoint.resident, *shares.staying]
    with advised(remedy):
        kept = stored_tensors.read([places[name] for name in names], again, paths, memory.device)
    for name, tensor in zip(names, kept, strict=True):
        _put(checkpoint.model, checkpoint.aliases[name], tensor)
    MatchStockMatmul(checkpoint.model, [each for each in checkpoint.model.parameters() if not each.is_meta])
    skeleton.finish(checkpoint.model, folder, memory.device)
    streaming = Streaming(None, None, sum(tensor.nbytes for tensor in kept), 0, shown, shares.gpu_slots_bytes)
    if shares.passing:
        _stream(streaming, checkpoint.layers, shares.passing, streamed, memory, remedy)
    pack.check_unchanged(in_place, before)  # from here on the stream watches them
    _refuse_what_needs_all_weights(checkpoint.model)
    streaming_of[checkpoint.model] = streaming
    return checkpoint.model


def _refuse_what_needs_all_weights(model: Any) -> None:
    """Refuse it as a whole, before it has changed anything (save_pretrained() removes older files first)."""
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


def _by_name(tensors: Sequence[Stored]) -> dict[str, Stored]:
    return {stored.name: stored for stored in tensors}


def _put(model: Any, names: Sequence[str], tensor: torch.Tensor) -> None:
    """Make the tensor what a weight or stored buffer of the model is, under all of its names."""
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
    passing: Sequence[StoredUnit],
    files: Sequence[File],
    memory: Memory,
    remedy: str,
) -> None:
    """Let the units come and go."""
    slots = None
    host_bytes = memory.host_bytes - streaming.resident_bytes
    if streaming.gpu_slots_bytes is not None:
        slots = empty_bytes(streaming.gpu_slots_bytes, memory.device)
        host_bytes = memory.host_bytes
    stream = WeightStream(
        list(files), [each.described for each in passing], memory_bytes=host_bytes, device_memory=slots
    )
    views = [each.views(memory) for each in passing]
    streaming.stream = stream
    unit_memory = UnitMemory(stream, remedy, slots)
    streaming.hooks = WeightHooks(layers, [each.unit for each in passing], views, unit_memory)
    # On a GPU none of them stays, whatever main memory keeps.
    stays = [False] * len(passing) if memory.on_gpu else stream.placement["resident"]
    streaming.streamed_bytes = sum(
        each.unit.nbytes for each, stay in zip(passing, stays, strict=True) if not stay
    )
