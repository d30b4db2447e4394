"""Models larger than memory: trunkline.transformers.from_pretrained."""

import weakref
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trunkline import _core
from trunkline._core import File, WeightStream, parse_size
from trunkline._errors import OutOfBudget, Unsupported
from trunkline._types import Path
from trunkline.checkpoint._transfer import path_name
from trunkline.stream import _manifest, _pack, _tensors
from trunkline.stream._memory import default_budget
from trunkline.stream._roofline import PAGE_BYTES, least_slots_bytes, slots_bytes
from trunkline.stream._streaming import Streaming, streaming_of
from trunkline.stream._tensors import Stored
from trunkline.transformers import _skeleton
from trunkline.transformers._absent import AbsentWeight, Refusal
from trunkline.transformers._binding import Binding, advised
from trunkline.transformers._checkpoint import Checkpoint, look_into
from trunkline.transformers._layers import Unit
from trunkline.transformers._packing import opened, place_argument, planned


def from_pretrained(
    model_dir: Path,
    *,
    device: str = "cpu",
    memory_budget: int | str | None = None,
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

    Raises OutOfBudget, which names the least that would do; Unsupported for quantised weights, other devices,
    and models without decoder layers; Format for a folder that is no such checkpoint. What generate() meets
    it raises: an Error of the storage (the model works again when its cause is gone), Corrupt for weights
    that were changed. One thread at a time may use the model, and nobody train it.
    """
    folder = FilePath(path_name(model_dir))
    if str(device) != "cpu":
        raise Unsupported(None, f'device: {device} is not supported by this build; use "cpu"', str(folder))
    budget = default_budget() if memory_budget is None else parse_size(memory_budget, "memory_budget")
    place = place_argument(folder, pack_dir, volumes)
    unit = None if unit_bytes is None else parse_size(unit_bytes, "unit_bytes")
    if unit == 0:
        raise ValueError("unit_bytes: must be at least 1")
    checkpoint = look_into(folder, dtype, unit)

    if pack_dir is None and volumes is None and checkpoint.readable_in_place:
        places = {name: checkpoint.weights.stored[name] for name in checkpoint.order}
        _check_budget(budget, checkpoint, places)
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
            place, checkpoint, 2, lambda: _check_budget(budget, checkpoint, _by_name(planned(checkpoint)))
        )
        streamed, again = files[:1], files[1:]
        places = _by_name(manifest.tensors)
        _check_budget(budget, checkpoint, places)
        paths = [shown] = [str(place.directories[0] / manifest.weights)]
        remedy = f"remove {place.directories[0] / _manifest.NAME} to have the pack made anew"

    with advised(remedy):
        resident = _tensors.read([places[name] for name in checkpoint.resident], again, paths)
    for name, tensor in zip(checkpoint.resident, resident, strict=True):
        _put(checkpoint.model, checkpoint.aliases[name], tensor)
    _skeleton.finish(checkpoint.model, folder)
    streaming = _stream(checkpoint, places, streamed, budget - checkpoint.resident_bytes, shown, remedy)
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


def _check_budget(budget: int, checkpoint: Checkpoint, places: dict[str, Stored]) -> None:
    resident = checkpoint.resident_bytes
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


def _stream(
    checkpoint: Checkpoint,
    places: dict[str, Stored],
    files: Sequence[File],
    memory_bytes: int,
    shown: str,
    remedy: str,
) -> Streaming:
    units: Sequence[Unit] = checkpoint.units
    if not units:
        return Streaming(None, None, checkpoint.resident_bytes, 0, shown)
    described = []
    bindings = []
    for unit in units:
        nbytes, placed = _laid_out(unit, places)
        parts = [(each.file, each.offset, each.nbytes, at, each.checksum) for at, each in placed]
        name = unit.weights[0].path
        if len(unit.weights) > 1:
            name += f" .. {unit.weights[-1].path}"
        described.append((name, nbytes, parts))
        bindings.append([(at, each.dtype, each.shape) for at, each in placed])
    stream = WeightStream(list(files), described, memory_bytes=memory_bytes)
    placement = stream.placement
    streamed = sum(unit.nbytes for unit, stays in zip(units, placement["resident"], strict=True) if not stays)
    binding = Binding(checkpoint.layers, units, bindings, stream, remedy)
    return Streaming(stream, binding, checkpoint.resident_bytes, streamed, shown)


def _laid_out(unit: Unit, places: dict[str, Stored]) -> tuple[int, list[tuple[int, Stored]]]:
    """Return how much memory a unit needs, and where in it each of its weights belongs."""
    placed, at = [], 0
    for weight in unit.weights:
        stored = places[weight.path]
        at += (stored.offset - at) % PAGE_BYTES  # as in the file, so that nothing is copied
        placed.append((at, stored))
        at += stored.nbytes
    return at, placed
