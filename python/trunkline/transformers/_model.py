"""Models larger than memory: trunkline.transformers.from_pretrained."""

import errno
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from trunkline import _core
from trunkline._core import File, UnitCache, WeightStream, parse_size
from trunkline._errors import Error, reword
from trunkline._formats.safetensors.loader import Header
from trunkline._logging import Log
from trunkline._modes import independent_of_modes
from trunkline._streaming import expert_use
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming import pack as pack_files
from trunkline._streaming import stored as stored_tensors
from trunkline._streaming.bound_unit import UnitMemory, advised
from trunkline._streaming.idle_team import idle_team
from trunkline._streaming.layers import find_layers
from trunkline._streaming.location import PackLocation
from trunkline._streaming.manifest import SourceFile
from trunkline._streaming.memory import machine_memory
from trunkline._streaming.offloaded import OffloadedWeight, StateGuard, cannot_save
from trunkline._streaming.scratch import Scratch
from trunkline._streaming.stored import FileTensor
from trunkline._streaming.streaming import Streaming, streaming_of
from trunkline._streaming.weight_hooks import MatchStockMatmul, WeightHooks
from trunkline._tensor_io.memory import Device, empty_bytes
from trunkline._trace import span
from trunkline._types import Path
from trunkline.transformers import meta_model
from trunkline.transformers._expert_hooks import route, use_of, use_plan
from trunkline.transformers._expert_plan import ExpertPlan
from trunkline.transformers._options import ModelOptions, device_option, dtype_option, model_options
from trunkline.transformers._packing import (
    WantedPack,
    default_location,
    location_argument,
    opened,
    planned,
)
from trunkline.transformers._placement import (
    Memory,
    MemoryPlan,
    memory_arguments,
    plan_placement,
)
from trunkline.transformers._prompt_parts import prompt_modules
from trunkline.transformers._routing_record import recording
from trunkline.transformers.hub import find_model
from trunkline.transformers.stored_model import StoredModel, read_stored_model

_log = Log("transformers")


@independent_of_modes
def from_pretrained(
    model_dir: Path,
    *,
    device: "Device | None" = None,
    memory_budget: int | str | None = None,
    host_memory: int | str | None = None,
    pack: bool | None = None,
    pack_dir: "Path | None" = None,
    volumes: "Sequence[Path] | None" = None,
    dtype: torch.dtype | str | None = None,
    unit_bytes: int | str | None = None,
    revision: str | None = None,
    subfolder: str = "",
    cache_dir: "Path | None" = None,
    config: Any = None,
    device_map: Any = None,
    text_only: bool = False,
    keep: str = "dequantised",
    routing_trace: "Path | None" = None,
    **options: Any,
) -> Any:
    """Load a language model whose weights need not fit into memory; the model is otherwise stock.

    `model_dir`: a Hugging Face folder of safetensors files, or the name of a model in the Hugging Face cache
    ("org/name", of which `revision` is a branch, tag or commit; nothing is downloaded). Embeddings, norms and
    head stay in memory, and as many of the decoder layers as `memory_budget` (bytes, or a str such as "8GB";
    None: half of the available memory) has room for; the others are read in each pass, ahead of their use.
    The budget bounds weights in memory and what is read ahead; activations and the key-value cache come on
    top.

    `pack`: whether the weights are first written into a pack, a file in the order of use. False reads the
    model's files in place; True always uses a pack; None uses one unless the files are as good as one, or
    there is no room for it. It is in the cache directory (TRUNKLINE_CACHE), in `pack_dir`, or striped over
    the directories `volumes`, each on its own disk; later calls find it there. `dtype`: None is that of the
    model's config. `unit_bytes`: how much is read and released as a whole (None: 16 MiB, or the largest
    weight).

    `device`: "cpu" (the default), or a CUDA GPU. There `memory_budget` bounds the weights in the GPU's memory
    (None: half of the free memory), and `host_memory` those in main memory (None: half of the available
    memory), from which weights that do not fit on the GPU are copied to it in each pass, ahead of their use;
    only the rest is read from the disk in each pass. The default device of torch is ignored, and weights are
    ordinary tensors even when the model is loaded under torch.inference_mode().

    The model is of the class that its config names: a causal language model, one that also reads images or
    sound (AutoModelForImageTextToText, AutoModelForMultimodalLM), or one with an encoder
    (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq). Of these, the layers that generate text are streamed;
    vision towers and encoders stay in memory. `text_only`: load only the causal language model
    (AutoModelForCausalLM), where transformers has one.

    `keep`: "dequantised" writes the weights of a checkpoint with fp8 or mxfp4 weights into a pack of the
    model's dtype, once, and reads that in each pass; "quantised" reads the stored bytes, and dequantises each
    unit as it is used, and each expert as tokens are routed to it, with the same result. That reads a half or
    a quarter, and computes more; it is for models on the CPU. The budget then bounds also the memory that
    they are dequantised into, and `unit_bytes` counts dequantised bytes. Experts are put together in a pack,
    as they are stored. Checkpoints that are not quantised are the same for both.

    `routing_trace`: a file that records which experts of a mixture of experts each step uses, for
    trunkline.stream.plan (None: the one that TRUNKLINE_ROUTING_TRACE in the environment names, if it is set).
    An earlier trace of that name is replaced, any other file is not (FileExistsError).

    `subfolder`, `cache_dir`, `config`, `device_map` (of one device, or "auto") and `options` are those of
    transformers, with the same meaning: torch_dtype, attn_implementation, generation_config, ..., and
    attributes of the config. What streaming cannot honour, such as quantization_config, is rejected with the
    reason.

    Raises OutOfBudget, which names the least budget; Unsupported for other quantised weights, other devices,
    models that do not generate text, and options that cannot be honoured; TypeError for unknown options;
    FileNotFoundError for a name that is not in the cache; Format for a folder that is not such a checkpoint;
    Error (ENOSPC) where there is no room for the pack. generate() raises errors of the storage (the model
    works again once their cause is gone), and Corrupt for weights that were changed on disk. One thread at a
    time may use the model, and it cannot be trained.
    """
    dtype = dtype_option(dtype, options)
    making = model_options(options, config, _PARAMETERS, text_only, keep)
    found = find_model(model_dir, revision=revision, cache_dir=cache_dir, subfolder=subfolder)
    memory = memory_arguments(device_option(device, device_map), memory_budget, host_memory, found.path)
    wanted = WantedPack.of(pack, location_argument(found.path, pack_dir, volumes))
    unit = None if unit_bytes is None else parse_size(unit_bytes, "unit_bytes")
    if unit == 0:
        raise ValueError("unit_bytes: must be at least 1")
    if unit is not None and unit > machine_memory():
        raise ValueError(
            f"unit_bytes: must not exceed the memory of this machine ({machine_memory() / 1e9:.1f} GB), not "
            f"{unit_bytes!r}"
        )
    with span("stream", "from_pretrained", str(found.path)):
        with span("stream", "read config and headers", str(found.path)):
            stored_model = read_stored_model(found, dtype, unit, making)
        experts = [] if stored_model.routed is None else stored_model.routed.experts
        with recording(routing_trace, stored_model.name, experts) as record:
            model = _load(stored_model, memory, wanted, making)
            record(model)
        return model


_PARAMETERS = tuple(
    name for name, each in signature(from_pretrained).parameters.items() if each.kind is each.KEYWORD_ONLY
)


@dataclass
class _OpenedWeights:
    """The files of the weights, opened to stream them and to read those that stay, and where each weight is.

    `in_place`, `before`: the headers of a model's own files, and their versions when they were opened.
    `location`: of the pack; None without one.
    """

    streamed: list[File]
    reopened: list[File]
    paths: list[str]
    places: dict[str, FileTensor]
    source: str
    remedy: str
    in_place: list[Header]
    before: list[SourceFile]
    location: PackLocation | None


def _open_in_place(stored_model: StoredModel) -> _OpenedWeights:
    _log.info("%s: the files are read in place", stored_model.folder)
    paths = [header.path for header in stored_model.headers]
    before = pack_files.file_versions(stored_model.headers)
    return _OpenedWeights(
        streamed=[_core.open(path) for path in paths],
        reopened=[_core.open(path) for path in paths],
        paths=paths,
        places={name: stored_model.weights.stored[name] for name in stored_model.order},
        source=str(stored_model.folder),
        remedy="restore or download the file, then load the model again",
        in_place=stored_model.headers,
        before=before,
        location=None,
    )


def _open_pack(
    stored_model: StoredModel, memory: Memory, location: PackLocation | None, why: str
) -> _OpenedWeights:
    """Open the pack, which is made unless it exists. Raises Error with ENOSPC."""
    _log.info("%s: the weights are read from a pack: %s", stored_model.folder, why)
    if location is None:
        location = default_location(stored_model)
    manifest, files, _ = opened(
        location,
        stored_model,
        2,
        lambda: plan_placement(memory, stored_model, _by_name(planned(stored_model))),
    )
    path = str(location.directories[0] / manifest.weights)
    return _OpenedWeights(
        streamed=files[:1],
        reopened=files[1:],
        paths=[path],
        places=_by_name(manifest.tensors),
        source=path,
        remedy=f"remove {location.directories[0] / pack_manifest.NAME} to rebuild the pack",
        in_place=[],
        before=[],
        location=location,
    )


def _open_weights(stored_model: StoredModel, memory: Memory, wanted: WantedPack) -> _OpenedWeights:
    """Open the model's files, or its pack, as is wanted and possible."""
    why = wanted.why(stored_model)
    if why is not None:
        try:
            return _open_pack(stored_model, memory, wanted.location, why)
        except Error as error:
            if error.errno != errno.ENOSPC or wanted.is_explicit:
                raise
            reason = stored_model.why_not_in_place()
            if reason is not None:
                reword(error, f"{error}; this model cannot be read in place: {reason}")
                raise
            _log.warn("%s; the files are read in place instead", error)
    return _open_in_place(stored_model)


def _load(stored_model: StoredModel, memory: Memory, wanted: WantedPack, making: ModelOptions) -> Any:
    """Load the model."""
    folder = stored_model.folder
    weights = _open_weights(stored_model, memory, wanted)
    places, source, remedy = weights.places, weights.source, weights.remedy
    plan = plan_placement(memory, stored_model, places)
    names = plan.resident
    with advised(remedy), span("stream", "read the weights that stay", source):
        kept = stored_tensors.read(
            [places[name] for name in names], weights.reopened, weights.paths, memory.device
        )
    for name, tensor in zip(names, kept, strict=True):
        _put(stored_model.model, stored_model.aliases[name], tensor)
    _match_stock_matmul(stored_model.model)
    meta_model.finish(stored_model.model, folder, memory.device, stored_model.name, making.generation_config)
    streaming = Streaming(None, None, sum(tensor.nbytes for tensor in kept), 0, source, plan.gpu_slots_bytes)
    streaming.resident_bytes += plan.scratch_bytes
    if plan.streamed:
        _stream(streaming, stored_model.layers, plan, weights.streamed, memory, remedy)
    if plan.experts is not None:
        _route(streaming, stored_model.model, plan.experts, weights)
        streaming.expert_bytes = sum(each.nbytes for each in plan.experts.experts)
        streaming.expert_modules = [each.name for each in plan.experts.experts]
        streaming.expert_matrices = len(plan.experts.experts[0].weights)
    if not memory.on_gpu and (streaming.streamed_bytes or streaming.experts is not None):
        streaming.idle_team = idle_team()
    _log_placement(stored_model, plan, memory, streaming)
    pack_files.check_unchanged(weights.in_place, weights.before)  # from here on the stream checks them
    _reject_saving_and_conversion(stored_model.model)
    streaming_of[stored_model.model] = streaming
    return stored_model.model


def _route(streaming: Streaming, model: Any, plan: ExpertPlan, weights: _OpenedWeights) -> None:
    """Let the model read its experts; what is known of their use is kept beside the pack for later runs."""
    location = weights.location
    if location is None:
        streaming.experts = route(plan, weights.streamed, weights.remedy, {})
        return
    modules = use_plan(plan)
    used = expert_use.read(location.directories[0], {name: count for name, _, count in modules})
    streaming.experts = route(plan, weights.streamed, weights.remedy, used)
    weakref.finalize(model, _save_use, os.getpid(), location, modules, streaming.experts)


def _save_use(
    process: int, location: PackLocation, modules: Sequence[tuple[str, int, int]], cache: UnitCache
) -> None:
    """Save how the experts were used, when the model is gone or the interpreter exits."""
    if os.getpid() != process or not cache.stats()["requests"]:  # in a forked child, locks may be held
        return
    expert_use.write(location.directories[0], location.weights_path, use_of(modules, cache))


def _match_stock_matmul(model: Any) -> None:
    """Let matrices that stay in memory round as in a stock model, also where only a part of the model runs.

    generate() runs encoders by themselves, and so may users run vision towers.
    """
    MatchStockMatmul(model, [each for each in model.parameters() if not each.is_meta])
    path, _ = find_layers(model)
    for module in prompt_modules(model, path):
        if weights := [each for each in module.parameters(recurse=False) if not each.is_meta]:
            MatchStockMatmul(module, weights)


def _log_placement(stored_model: StoredModel, plan: MemoryPlan, memory: Memory, streaming: Streaming) -> None:
    """Log which weights are where, and the budgets that decided it."""
    on_device = len(stored_model.whole.units) - len(plan.streamed)
    in_memory = 0 if streaming.stream is None else sum(streaming.stream.placement["resident"])
    from_disk = len(plan.streamed) - in_memory
    if plan.experts is not None:
        _log.info(
            "%s: experts are read as tokens are routed to them; %d bytes hold those that are used most",
            stored_model.folder,
            plan.experts.memory_bytes,
        )
    _log.info(
        "%s: on %s stay %d bytes: embeddings, norms, head%s; of %d other units, %d stay in main memory%s, "
        "and %d are read from %s in each pass (memory_budget: %d bytes%s)",
        stored_model.folder,
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
            _reject_saving(module)
    absent = next((each for each in model.parameters() if isinstance(each, OffloadedWeight)), None)
    if absent is None:
        return
    # half(), to() and the like convert one module after another.
    convert, this = type(model)._apply, weakref.ref(model)

    def checked(conversion: Any, *options: Any, **others: Any) -> Any:
        conversion(absent)
        return convert(this(), conversion, *options, **others)

    model._apply = checked


def _reject_saving(model: Any) -> None:
    """Make save_pretrained() fail at its beginning, unless it is given the state.

    It writes config.json before it asks for the state. That of a quantised model no longer says that it is
    quantised: written into the folder of the model, it would make transformers take the weights for others.
    """
    save, this = type(model).save_pretrained, weakref.ref(model)

    def checked(
        save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
    ) -> Any:
        if state_dict is None:
            raise cannot_save()
        return save(this(), save_directory, is_main_process, state_dict, **options)

    model.save_pretrained = checked


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
    views = [each.views(memory.on_gpu) for each in passing]
    streaming.stream = stream
    scratch_bytes = max((each.unit.scratch_bytes for each in passing), default=0)
    scratch = Scratch(scratch_bytes, memory.device) if scratch_bytes else None
    unit_memory = UnitMemory(stream, remedy, slots, scratch=scratch)
    streaming.hooks = WeightHooks(layers, [each.unit for each in passing], views, unit_memory)
    # On a GPU all of them are copied in each pass, also those that stay in main memory.
    stays = [False] * len(passing) if memory.on_gpu else stream.placement["resident"]
    streaming.streamed_bytes = sum(
        each.unit.nbytes for each, stay in zip(passing, stays, strict=True) if not stay
    )
