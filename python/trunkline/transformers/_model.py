"""Models larger than memory: trunkline.transformers.from_pretrained."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trunkline import _core
from trunkline._core import File, WeightStream, parse_size
from trunkline._errors import OutOfBudget
from trunkline._types import Path
from trunkline.checkpoint._memory import Device, device_argument, empty_bytes
from trunkline.checkpoint._transfer import path_name
from trunkline.stream import _manifest, _pack, _tensors
from trunkline.stream._memory import default_budget
from trunkline.stream._roofline import PAGE_BYTES, least_slots_bytes, slots_bytes
from trunkline.stream._streaming import Streaming, streaming_of
from trunkline.stream._tensors import Stored, StreamUnit
from trunkline.transformers import _gpu, _skeleton
from trunkline.transformers._absent import AbsentWeight, Refusal
from trunkline.transformers._binding import Binding, FoldAsStock, advised
from trunkline.transformers._checkpoint import Checkpoint, look_into
from trunkline.transformers._layers import Unit
from trunkline.transformers._packing import opened, place_argument, planned


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
    disk each time.

    Raises OutOfBudget, which names the least that would do; Unsupported for quantised weights, other devices,
    and models without decoder layers; Format for a folder that is no such checkpoint. What generate() meets
    it raises: an Error of the storage (the model works again when its cause is gone), Corrupt for weights
    that were changed. One thread at a time may use the model, and nobody train it.
    """
    folder = FilePath(path_name(model_dir))
    memory = _memory_arguments(device, memory_budget, host_memory, folder)
    place = place_argument(folder, pack_dir, volumes)
    unit = None if unit_bytes is None else parse_size(unit_bytes, "unit_bytes")
    if unit == 0:
        raise ValueError("unit_bytes: must be at least 1")
    checkpoint = look_into(folder, dtype, unit)

    if pack_dir is None and volumes is None and checkpoint.readable_in_place:
        places = {name: checkpoint.weights.stored[name] for name in checkpoint.order}
        _check_budget(memory, checkpoint, places)
        paths = [header.path for header in checkpoint.headers]
        in_place = checkpoint.headers
        before = _pack.look(in_place)
        streamed = [_core.open(path) for path in paths]
        again = [_core.open(path) for path in paths]
        shown = str(folder)
        remedy = "fetch the file again, and load the model again"
    else:
        in_place, before = [], []
        manifest, files, _ = opened(
            place, checkpoint, 2, lambda: _check_budget(memory, checkpoint, _by_name(planned(checkpoint)))
        )
        streamed, again = files[:1], files[1:]
        places = _by_name(manifest.tensors)
        _check_budget(memory, checkpoint, places)
        paths = [shown] = [str(place.directories[0] / manifest.weights)]
        remedy = f"remove {place.directories[0] / _manifest.NAME} to have the pack made anew"

    passing, staying, slots_bytes = _share_out(memory, checkpoint, places)
    names = [*checkpoint.resident, *staying]
    with advised(remedy):
        kept = _tensors.read([places[name] for name in names], again, paths, memory.device)
    for name, tensor in zip(names, kept, strict=True):
        _put(checkpoint.model, checkpoint.aliases[name], tensor)
    FoldAsStock(checkpoint.model, [each for each in checkpoint.model.parameters() if not each.is_meta])
    _skeleton.finish(checkpoint.model, folder, memory.device)
    streaming = Streaming(None, None, sum(tensor.nbytes for tensor in kept), 0, shown, slots_bytes)
    if passing:
        _stream(streaming, checkpoint.layers, passing, streamed, memory, remedy)
    _pack.check_unchanged(in_place, before)  # from here on the stream watches them
    _refuse_what_needs_all_weights(checkpoint.model)
    streaming_of[checkpoint.model] = streaming
    return checkpoint.model


def _refuse_what_needs_all_weights(model: Any) -> None:
    """Refuse it as a whole, before it has changed anything (save_pretrained() removes older files first)."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_load_state_dict_pre_hook(
                Refusal(
                    "a model whose weights are streamed takes no others by load_state_dict; save them into a "
                    "folder, and load that with from_pretrained"
                )
            )
            module.register_state_dict_pre_hook(
                Refusal(
                    "a model whose weights are streamed has no state_dict, and cannot be saved: its weights "
                    "are in its folder; load that with transformers to get them"
                )
            )
    absent = next((each for each in model.parameters() if isinstance(each, AbsentWeight)), None)
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


@dataclass(frozen=True)
class _Memory:
    """Where weights are computed with, and how many bytes they may take there and in main memory."""

    device: torch.device
    budget: int
    host_bytes: int

    @property
    def on_gpu(self) -> bool:
        """Whether that is not main memory."""
        return self.device.type != "cpu"


def _memory_arguments(
    device: Device, memory_budget: int | str | None, host_memory: int | str | None, folder: FilePath
) -> _Memory:
    target = device_argument(device, str(folder))
    on_gpu = target.type != "cpu"
    if host_memory is not None and not on_gpu:
        raise ValueError("host_memory: is for a model on a GPU; on the CPU there is memory_budget alone")
    if memory_budget is not None:
        budget = parse_size(memory_budget, "memory_budget")
    else:
        budget = _gpu.default_budget(target) if on_gpu else default_budget()
    if not on_gpu:
        return _Memory(target, budget, budget)
    host = default_budget() if host_memory is None else parse_size(host_memory, "host_memory")
    return _Memory(target, budget, host)


def _check_budget(memory: _Memory, checkpoint: Checkpoint, places: dict[str, Stored]) -> None:
    """Raise OutOfBudget before anything is written or read."""
    if memory.on_gpu:
        _share_out(memory, checkpoint, places)
        return
    budget, resident = memory.budget, checkpoint.resident_bytes
    unit_bytes = [_laid_out(unit, places)[0] for unit in checkpoint.units]
    # What plan() says of the config alone is enough unless weights lie far from each other.
    expected = least_slots_bytes([unit.nbytes for unit in checkpoint.units])
    least = resident + max(expected, slots_bytes(unit_bytes))
    if budget < least:
        largest = max(unit_bytes, default=0)
        raise OutOfBudget(
            None,
            f"memory_budget: {budget} bytes cannot hold what stays in memory of {checkpoint.folder} "
            f"({resident} bytes of embeddings, norms and head) and two units of up to {largest}; the least "
            f"is {least} bytes ({least / 1e9:.3f} GB), or less with a smaller unit_bytes where units hold "
            "several weights",
            str(checkpoint.folder),
        )


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


@dataclass(frozen=True)
class _Described:
    """A unit, as WeightStream takes it, and where in its memory each of its weights begins, in order."""

    of: Unit
    unit: StreamUnit
    placed: list[tuple[int, Stored]]

    def places(self, *, on_gpu: bool) -> list[tuple[int, torch.dtype, tuple[int, ...]]]:
        """Where each weight begins in the memory that it is used in, its dtype and shape."""
        begins = _core.device_layout(self.unit) if on_gpu else [at for at, _ in self.placed]
        return [
            (begin, stored.dtype, stored.shape)
            for begin, (_, stored) in zip(begins, self.placed, strict=True)
        ]


def _describe(unit: Unit, places: dict[str, Stored]) -> _Described:
    nbytes, placed = _laid_out(unit, places)
    parts = [(each.file, each.offset, each.nbytes, at, each.checksum) for at, each in placed]
    name = unit.weights[0].path
    if len(unit.weights) > 1:
        name += f" .. {unit.weights[-1].path}"
    return _Described(unit, (name, nbytes, parts), placed)


def _share_out(
    memory: _Memory, checkpoint: Checkpoint, places: dict[str, Stored]
) -> tuple[list[_Described], list[str], int | None]:
    """Return the units that pass through memory, the weights that stay on a GPU, the size of its slots."""
    described = [_describe(unit, places) for unit in checkpoint.units]
    if not memory.on_gpu:
        return described, [], None  # the stream itself keeps what has room
    folder = str(checkpoint.folder)
    share = _gpu.share_out(
        [each.unit for each in described], checkpoint.resident_bytes, memory.budget, folder
    )
    passing = [each for each, stays in zip(described, share.stays, strict=True) if not stays]
    least = slots_bytes([each.unit[1] for each in passing])
    if passing and memory.host_bytes < least:
        raise OutOfBudget(
            None,
            f"host_memory: {memory.host_bytes} bytes cannot hold two units of what passes through main "
            f"memory to the GPU; the least is {least} bytes",
            folder,
        )
    staying = [
        weight.path
        for each, stays in zip(described, share.stays, strict=True)
        if stays
        for weight in each.of.weights
    ]
    return passing, staying, share.slots_bytes


def _stream(
    streaming: Streaming,
    layers: nn.ModuleList,
    passing: Sequence[_Described],
    files: Sequence[File],
    memory: _Memory,
    remedy: str,
) -> None:
    """Let the units come and go."""
    slots = None
    host_bytes = memory.host_bytes - streaming.resident_bytes
    if streaming.gpu_slots_bytes is not None:
        slots = empty_bytes(streaming.gpu_slots_bytes, memory.device)
        host_bytes = memory.host_bytes
    stream = WeightStream(
        list(files), [each.unit for each in passing], memory_bytes=host_bytes, device_memory=slots
    )
    places = [each.places(on_gpu=memory.on_gpu) for each in passing]
    streaming.stream = stream
    streaming.binding = Binding(layers, [each.of for each in passing], places, stream, remedy, slots)
    # On a GPU none of them stays, whatever main memory keeps.
    stays = [False] * len(passing) if memory.on_gpu else stream.placement["resident"]
    streaming.streamed_bytes = sum(
        each.of.nbytes for each, stay in zip(passing, stays, strict=True) if not stay
    )


def _laid_out(unit: Unit, places: dict[str, Stored]) -> tuple[int, list[tuple[int, Stored]]]:
    """Return how much memory a unit needs, and where in it each of its weights belongs."""
    placed, at = [], 0
    for weight in unit.weights:
        stored = places[weight.path]
        at += (stored.offset - at) % PAGE_BYTES  # as in the file, so that nothing is copied
        placed.append((at, stored))
        at += stored.nbytes
    return at, placed
