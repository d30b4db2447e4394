"""Models larger than memory: trunkline.transformers.from_pretrained."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn

from trunkline import _core
from trunkline._core import File, WeightStream, parse_size
from trunkline._errors import OutOfBudget, Unsupported
from trunkline._types import Path
from trunkline.checkpoint._safetensors_folder import folder_headers
from trunkline.checkpoint._safetensors_load import Header
from trunkline.checkpoint._transfer import path_name
from trunkline.stream import _pack, _tensors
from trunkline.stream._manifest import Manifest, Recipe
from trunkline.stream._memory import default_budget
from trunkline.stream._streaming import Streaming, streaming_of
from trunkline.stream._tensors import Stored
from trunkline.transformers import _layers, _skeleton, _weights
from trunkline.transformers._binding import Binding
from trunkline.transformers._layers import Unit

PACK_DIRECTORY = "trunkline-pack"
_PAGE_BYTES = 4096
_TENSOR_ALIGNMENT = 64


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
    headers = folder_headers(folder)
    checkpoint = _tensors.of_headers(headers)
    model = _skeleton.make(folder, _dtype(dtype, checkpoint))
    weights = _weights.find(model, checkpoint, str(folder))
    layers, units = _layers.cut(model, None if unit_bytes is None else parse_size(unit_bytes, "unit_bytes"))
    streamed = [weight.path for unit in units for weight in unit.weights]
    plan = _plan_of(model, weights, streamed)
    resident_bytes = sum(plan.nbytes[name] for name in plan.resident)
    _check_budget(budget, resident_bytes, units, folder)

    if pack_dir is None and volumes is None and _readable_in_place(plan, weights, headers):
        places = {name: weights.stored[name] for name in plan.order}
        paths = [header.path for header in headers]
        opened = [_core.open(path) for path in paths]
        again = [_core.open(path) for path in paths]
        shown = str(folder)
    else:
        place = _place(folder, pack_dir, volumes)
        manifest = _packed(place, folder, headers, model, weights, plan, units)
        places = {stored.name: stored for stored in manifest.tensors}
        opened, again = [place.open()], [place.open()]
        paths = [shown] = [str(place.directories[0] / manifest.weights)]

    resident = _tensors.read([places[name] for name in plan.resident], again, paths)
    for name, tensor in zip(plan.resident, resident, strict=True):
        _put(model, plan.aliases[name], tensor)
    streaming = _stream(layers, units, places, opened, budget - resident_bytes, resident_bytes, shown)
    _skeleton.finish(model, folder)
    streaming_of[model] = streaming
    return model


@dataclass
class _Plan:
    """Weights by name: those that stay, all in the order in which a pack has them, dtypes, sizes."""

    resident: list[str]
    order: list[str]
    dtypes: dict[str, torch.dtype]
    nbytes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, list[str]]  # all names of a weight that is tied


def _plan_of(model: Any, weights: _weights.Weights, streamed: Sequence[str]) -> _Plan:
    state = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, value in state.items():
        names_of.setdefault(id(value), []).append(name)
    known = weights.stored.keys() | weights.computed.keys()
    aliases = {next(name for name in names if name in known): names for names in names_of.values()}
    through = set(streamed)
    resident = [name for name in aliases if name not in through]
    dtypes = _weights.dtypes(model)
    return _Plan(
        resident=resident,
        order=[*streamed, *resident],
        dtypes=dtypes,
        nbytes={name: state[name].numel() * dtypes[name].itemsize for name in aliases},
        shapes={name: tuple(state[name].shape) for name in aliases},
        aliases=aliases,
    )


def _dtype(dtype: torch.dtype | str | None, checkpoint: dict[str, Stored]) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, str):
        named = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(named, torch.dtype):
            raise ValueError(f'dtype: must be a torch.dtype or the name of one, as "bfloat16", not {dtype!r}')
        dtype = named
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: must be a floating-point torch.dtype, not {dtype!r}")
    return dtype


def _check_budget(budget: int, resident_bytes: int, units: Sequence[Unit], folder: FilePath) -> None:
    # One page more: where files are read as they are, units begin anywhere in a page.
    sizes = [(-(-unit.nbytes // _PAGE_BYTES) + 1) * _PAGE_BYTES for unit in units]
    least = resident_bytes + min(sum(sizes), 2 * max(sizes, default=0))
    if budget < least:
        raise OutOfBudget(
            None,
            f"memory_budget: {budget} bytes cannot hold what stays in memory of {folder} ({resident_bytes} "
            f"bytes of embeddings, norms and head) and two units of up to {max(sizes, default=0)}; the least "
            f"is {least} bytes ({least / 1e9:.3f} GB)",
            str(folder),
        )


def _readable_in_place(plan: _Plan, weights: _weights.Weights, headers: Sequence[Header]) -> bool:
    """Whether every weight lies in the files as memory wants it."""
    del headers
    return all(
        name in weights.stored
        and weights.stored[name].dtype == plan.dtypes[name]
        and weights.stored[name].offset % _TENSOR_ALIGNMENT == 0
        for name in plan.order
    )


def _place(folder: FilePath, pack_dir: "Path | None", volumes: "Sequence[Path] | None") -> _pack.Place:
    if volumes is not None:
        if isinstance(volumes, (str, bytes, os.PathLike)):
            raise TypeError("volumes: must be a sequence of paths, not one path")
        if pack_dir is not None:
            raise ValueError("pack_dir: a pack on several volumes lies in them; leave it out")
        if not volumes:
            raise ValueError("volumes: must not be empty")
        return _pack.Place(tuple(FilePath(path_name(volume)) for volume in volumes))
    if pack_dir is not None:
        return _pack.Place((FilePath(path_name(pack_dir)),))
    return _pack.Place((folder / PACK_DIRECTORY,))


def _packed(
    place: _pack.Place,
    folder: FilePath,
    headers: Sequence[Header],
    model: Any,
    weights: _weights.Weights,
    plan: _Plan,
    units: Sequence[Unit],
) -> Manifest:
    """Return the pack's manifest; the pack is made unless it is there."""
    config = (folder / "config.json").read_bytes()
    recipe = Recipe(
        hashlib.sha256(config).hexdigest(), str(model.dtype).removeprefix("torch."), weights.converter
    )
    wanted = [Stored(name, 0, 0, plan.dtypes[name], plan.shapes[name]) for name in plan.order]
    found = _pack.find(place, headers, recipe)
    if found is not None and [(each.name, each.dtype, each.shape) for each in found.tensors] == [
        (each.name, each.dtype, each.shape) for each in wanted
    ]:
        return found
    starts = {unit.weights[0].path for unit in units} | set(plan.resident[:1])
    files = [_core.open(header.path) for header in headers]

    def fetch(stored: Stored) -> torch.Tensor:
        tensor = torch.empty(stored.nbytes, dtype=torch.uint8)
        if stored.nbytes:
            files[stored.file].pread(tensor, stored.offset)
        return tensor.view(stored.dtype).reshape(stored.shape)

    checkpoint = _tensors.of_headers(headers)

    def fetch_as(dtype: torch.dtype, source: str) -> torch.Tensor:
        return fetch(checkpoint[source]).to(dtype)

    def contents() -> Iterator[tuple[str, torch.Tensor]]:
        done: set[int] = set()
        for name in plan.order:
            if name in weights.stored:
                yield name, fetch(weights.stored[name]).to(plan.dtypes[name])
                continue
            conversion = weights.computed[name]
            if id(conversion) in done:
                continue
            done.add(id(conversion))
            dtype = plan.dtypes[name]
            yield from conversion.run(model, partial(fetch_as, dtype)).items()

    try:
        return _pack.make(place, headers, recipe, wanted, starts, contents)
    except PermissionError as error:
        raise type(error)(
            error.errno, f"{error.strerror}; give another place for the pack as pack_dir", error.filename
        ) from error
    finally:
        for file in files:
            file.close()


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
    layers: nn.ModuleList,
    units: Sequence[Unit],
    places: dict[str, Stored],
    files: Sequence[File],
    memory_bytes: int,
    resident_bytes: int,
    shown: str,
) -> Streaming:
    if not units:
        return Streaming(None, None, resident_bytes, 0, shown)
    described = []
    bindings = []
    for unit in units:
        parts, bound, at = [], [], 0
        for weight in unit.weights:
            stored = places[weight.path]
            at += (stored.offset - at) % _PAGE_BYTES  # as in the file, so that nothing is copied
            parts.append((stored.file, stored.offset, stored.nbytes, at, stored.checksum))
            bound.append((at, stored.dtype, stored.shape))
            at += stored.nbytes
        name = unit.weights[0].path
        if len(unit.weights) > 1:
            name += f" .. {unit.weights[-1].path}"
        described.append((name, at, parts))
        bindings.append(bound)
    stream = WeightStream(list(files), described, memory_bytes=memory_bytes)
    placement = stream.placement
    streamed = sum(unit.nbytes for unit, stays in zip(units, placement["resident"], strict=True) if not stays)
    binding = Binding(layers, units, bindings, stream)
    return Streaming(stream, binding, resident_bytes, streamed, shown)
