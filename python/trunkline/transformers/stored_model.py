"""Reads a Hugging Face folder: its model without weights, and where the weights are stored."""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trunkline._errors import Unsupported, exception_of
from trunkline._formats.safetensors.folder import folder_headers
from trunkline._formats.safetensors.loader import Header, dtype_and_shape
from trunkline._streaming import layers as model_layers
from trunkline._streaming import stored as stored_tensors
from trunkline._streaming.layers import Unit
from trunkline._streaming.roofline import ExpertSizes, Sizes
from trunkline._streaming.source import Source
from trunkline._streaming.stored import TENSOR_ALIGNMENT, FileTensor
from trunkline.checkpoint.save_order import await_saves_of
from trunkline.transformers import _weights, meta_model
from trunkline.transformers._expert_records import ExpertRecords
from trunkline.transformers._folder import check_model_folder, check_weights
from trunkline.transformers._kept_quantised import keep, keep_experts
from trunkline.transformers._options import ModelOptions
from trunkline.transformers._prompt_parts import prompt_weights
from trunkline.transformers._weights import Weights
from trunkline.transformers.experts import (
    Experts,
    experts_per_token,
    find_experts,
    routed_parameters,
    scratch_bytes_of,
)
from trunkline.transformers.hub import ModelFolder, add_download

_DEFAULTS = ModelOptions()
_MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass
class Division:
    """How a model's weights are brought into memory: in units, by routing, or once, to stay there.

    A tied weight is listed under one of its names.
    """

    units: list[Unit]
    experts: list[Experts]
    resident: list[str]
    resident_bytes: int
    prompt_bytes: int = 0  # of those: used only by the prompt, such as a vision tower
    scratch_bytes: int = 0  # of those: memory for dequantised weights, those of experts included
    unrouted_bytes: int = 0  # of the units: experts that a token does not use

    def sizes(self, config: Any) -> Sizes:
        """Return its sizes; `config`: of the model."""
        return Sizes(
            self.resident_bytes,
            tuple(unit.nbytes for unit in self.units),
            tuple(len(unit.tensors) for unit in self.units),
            tuple(
                ExpertSizes(
                    each.count,
                    experts_per_token(config, each.count),
                    tuple(each.matrix_bytes),
                    each.expanded_bytes,
                )
                for each in self.experts
            ),
            self.prompt_bytes,
            self.scratch_bytes,
            sum(
                weight.quantised.dequantised_bytes - weight.nbytes
                for unit in self.units
                for weight in unit.weights
                if weight.quantised is not None
            ),
            self.unrouted_bytes,
        )


@dataclass
class StoredModel:
    """A folder, its model (on the meta device), and the model's weights by their names in the model.

    `whole`: with units of all streamed weights; `routed`: with routed experts apart from them, None if the
    model has none. `order`: the order of use; streamed weights come first. A weight that is kept quantised is
    here as the tensors that are stored of it, `quantised`; `records`: routed experts, by the weight's name.
    """

    folder: Path
    headers: list[Header]
    tensors: dict[str, FileTensor]  # by their names in the files
    model: Any
    weights: Weights
    layers: nn.ModuleList
    whole: Division
    routed: Division | None
    order: list[str]
    dtypes: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, list[str]]  # all names of a weight
    name: str = ""  # as the user calls it
    identity: str = ""  # ModelFolder.identity
    changes: str = ""  # of the folder's config, ModelOptions.key
    quantised: frozenset[str] = frozenset()
    records: Mapping[str, ExpertRecords] = field(default_factory=dict)

    @property
    def must_route(self) -> bool:
        """Whether experts must be read one by one: all of a layer, dequantised, would need much memory."""
        return bool(self.records)

    @property
    def is_dequantised(self) -> bool:
        """Whether weights of its layers are dequantised when the pack is made."""
        computed = self.weights.computed
        return any(computed[name].dequantises for name in _streamed(self.whole) if name in computed)

    def why_not_in_place(self) -> str | None:
        """Return why the files cannot be read in place; None if they can.

        Then every weight is stored in the dtype in which it is used.
        """
        for name in self.order:
            stored = self.weights.stored.get(name)
            if name in self.records:
                return f"{name} is stored in parts that are not beside each other"
            if stored is None:
                return f"{name} is not stored as such, but converted"
            if stored.dtype != self.dtypes[name]:
                return f"{name} is stored as {stored.dtype}, and used as {self.dtypes[name]}"
        return None

    def why_pack(self) -> str | None:
        """Return why a pack is made by default; None if the files are as good as one.

        Then every weight is also stored with the alignment that torch gives tensors.
        """
        for name in self.order:
            stored = self.weights.stored.get(name)
            is_aligned = stored is None or stored.offset % TENSOR_ALIGNMENT == 0
            if stored is not None and not is_aligned and name not in self.quantised:
                return f"{name} is at byte {stored.offset}, not at a multiple of {TENSOR_ALIGNMENT}"
        return self.why_not_in_place()


def read_stored_model(
    found: ModelFolder,
    dtype: torch.dtype | str | None,
    unit_bytes: int | None,
    options: ModelOptions = _DEFAULTS,
) -> StoredModel:
    """Read the config and the headers of a folder. Raises as from_pretrained does."""
    folder = found.path
    await_saves_of(str(folder))
    try:
        check_model_folder(folder)
        check_weights(folder)
        headers = _headers(folder)
    except FileNotFoundError as error:
        add_download(error, found)
        raise
    tensors = stored_tensors.of_headers(headers)
    model, quantiser = meta_model.make_with_quantiser(
        folder, dtype_argument(dtype), _first_dtype(headers), options
    )
    weights = _weights.find(model, tensors, str(folder), quantiser)
    layers, whole, routed = divide(model, unit_bytes)

    state = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, value in state.items():
        names_of.setdefault(id(value), []).append(name)
    known = weights.stored.keys() | weights.computed.keys()
    for names in names_of.values():
        _check_tied([weights.stored[name] for name in names if name in weights.stored], headers)
    aliases = {next(name for name in names if name in known): names for names in names_of.values()}
    for division in (whole, routed):
        if division is not None:
            division.resident = _resident(division, list(aliases))
    kept: list[FileTensor] = []
    records: dict[str, ExpertRecords] = {}
    if options.keeps_quantised:
        experts = [] if routed is None else routed.experts
        records = keep_experts(weights, tensors, experts, model, str(folder))
        kept = _keep_quantised(weights, tensors, (whole, routed), state, str(folder), records)
    return StoredModel(
        folder=folder,
        headers=headers,
        tensors=tensors,
        model=model,
        weights=weights,
        layers=layers,
        whole=whole,
        routed=routed,
        order=[*_streamed(whole), *whole.resident],
        dtypes={name: value.dtype for name, value in state.items()}
        | {each.name: each.dtype for each in kept}
        | dict.fromkeys(records, torch.uint8),
        shapes={name: tuple(state[name].shape) for name in aliases}
        | {each.name: each.shape for each in kept}
        | {name: (each.count, each.record_bytes) for name, each in records.items()},
        aliases=aliases,
        name=found.name,
        identity=found.identity,
        changes=options.key,
        quantised=frozenset((*(each.name for each in kept), *records)),
        records=records,
    )


def divide(model: Any, unit_bytes: int | None = None) -> tuple[nn.ModuleList, Division, Division | None]:
    """Return the decoder layers, and how weights are divided without and with routed experts.

    `resident` names all weights that stay, tied ones under all of their names.
    """
    layers, units = model_layers.cut(model, unit_bytes)
    state = model.state_dict(keep_vars=True)
    path, _ = model_layers.find_layers(model)
    prompt = prompt_weights(model, path)
    whole = _division(state, units, [], prompt)
    experts = find_experts(model, path, layers)
    if not experts:
        return layers, whole, None
    whole.unrouted_bytes = sum(
        (each.count - experts_per_token(model.config, each.count)) * sum(each.matrix_bytes)
        for each in experts
    )
    _, dense = model_layers.cut(model, unit_bytes, routed_parameters(experts))
    # Without other weights to stream there is nothing to bring in between.
    return layers, whole, _division(state, dense, experts, prompt) if dense else None


def _division(
    state: dict[str, torch.Tensor], units: list[Unit], experts: list[Experts], prompt: set[int]
) -> Division:
    division = Division(units, experts, [], 0)
    division.resident = _resident(division, list(state))
    stays = {id(state[name]): state[name].nbytes for name in division.resident}
    division.resident_bytes = sum(stays.values())
    division.prompt_bytes = sum(nbytes for key, nbytes in stays.items() if key in prompt)
    return division


def _keep_quantised(
    weights: Weights,
    tensors: dict[str, FileTensor],
    divisions: Sequence[Division | None],
    state: dict[str, torch.Tensor],
    source: str,
    records: Mapping[str, ExpertRecords],
) -> list[FileTensor]:
    """Let streamed weights stay quantised, as those of `records` do; return what is stored of the others.

    Raises Unsupported.
    """
    found = [division for division in divisions if division is not None]
    units = [unit for each in found for unit in each.units]
    for unit in units:
        for weight in unit.weights:
            if weight.path in records:
                weight.nbytes = records[weight.path].count * records[weight.path].record_bytes
    kept = keep(weights, tensors, units, state, source, records)
    for division in found:
        division.scratch_bytes = max((unit.scratch_bytes for unit in division.units), default=0)
        division.scratch_bytes += scratch_bytes_of(division.experts)
        division.resident_bytes += division.scratch_bytes
    return kept


def _streamed(division: Division) -> list[str]:
    return [
        *(name for unit in division.units for name in unit.tensors),
        *(weight.path for experts in division.experts for weight in experts.weights),
    ]


def _resident(division: Division, names: list[str]) -> list[str]:
    streamed = set(_streamed(division))
    return [name for name in names if name not in streamed]


def _headers(folder: Path) -> list[Header]:
    try:
        return folder_headers(folder)
    except FileNotFoundError as error:
        message = (
            f"cannot load a model from {folder}: {error.filename} is missing; the download or copy is "
            "incomplete, fetch that file too"
        )
        raise exception_of("system", errno.ENOENT, message, str(error.filename)) from error


def _first_dtype(headers: list[Header]) -> torch.dtype | None:
    """Return the dtype that transformers gives a model whose config has none."""
    first = min(headers, key=lambda header: Path(header.path).name)
    for stored in sorted(first.tensors, key=lambda each: each.name):
        dtype, _ = dtype_and_shape(stored, first.path)
        if dtype in _MODEL_DTYPES:
            return dtype
    return None


def _check_tied(stored: list[FileTensor], headers: list[Header]) -> None:
    """Raise Unsupported for a tied weight that is stored several times with different values.

    Transformers would load them as separate weights, although the config says that they are tied.
    """
    if len(stored) < 2:
        return
    with Source(headers) as source:
        first, *others = (source.fetch(each).reshape(-1).view(torch.uint8) for each in stored)
        if all(torch.equal(first, other) for other in others):
            return
    names = " and ".join(each.name for each in stored)
    path = headers[stored[0].file].path
    raise Unsupported(
        None,
        f"{path}: {names} are tied by the config (tie_word_embeddings), but differ in the file; if they "
        "should differ, set tie_word_embeddings to false in config.json",
        path,
    )


def dtype_argument(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype, or None for that of the config. Raises ValueError for anything else."""
    if dtype is None or dtype == "auto":
        return None
    names = ", ".join(str(each).removeprefix("torch.") for each in _MODEL_DTYPES)
    given = dtype
    if isinstance(dtype, str):
        named = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(named, torch.dtype):
            raise ValueError(f"dtype: must be one of {names}, not {given!r}; weights are not quantized")
        dtype = named
    if dtype not in _MODEL_DTYPES:
        raise ValueError(f"dtype: must be one of {names}, not {given!r}; weights are not quantized")
    return dtype


def names_first(units: Sequence[Unit]) -> set[str]:
    """Return the name of the first tensor of each unit."""
    return {unit.tensors[0] for unit in units}
