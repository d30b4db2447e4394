"""Loads a model with SGLang's own code, and streams the weights of its layers from a pack."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trunkline._core import File, WeightStream
from trunkline._errors import Format, OutOfBudget, Unsupported
from trunkline._formats.safetensors import Header, folder_headers
from trunkline._logging import Log
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming import pack as packs
from trunkline._streaming.layers import Unit, Weight, cut_layers
from trunkline._streaming.layout import lay_out
from trunkline._streaming.location import PackLocation
from trunkline._streaming.manifest import Manifest, Recipe
from trunkline._streaming.memory import budget_argument
from trunkline._streaming.pack_cache import BESIDE, cached_location
from trunkline._streaming.roofline import Sizes
from trunkline._streaming.source import Source
from trunkline._streaming.stored import FileTensor
from trunkline._streaming.stored_unit import StoredUnit
from trunkline._streaming.streaming import Streaming, streaming_of
from trunkline._streaming.weight_hooks import WeightHooks
from trunkline.sglang._checks import check_layers, check_options
from trunkline.sglang._loading_memory import LoadingMemory
from trunkline.sglang._report import log_regularly
from trunkline.sglang._retries import RetryingMemory
from trunkline.sglang._settings import VARIABLE, Settings

_log = Log("stream")

_LAYERS = "layers"  # the name of the list of layers in packs


@dataclass(frozen=True)
class _Place:
    """The pack of this rank's weights, and what it is made from."""

    location: PackLocation
    headers: list[Header]
    recipe: Recipe
    model: str  # the folder


def load_streamed(original: Any, runner: Any, settings: Settings) -> Any:
    """Load the model of a ModelRunner of SGLang: `original` is its load_model().

    The first time the weights of this rank are written into a pack; later they are not loaded at all. Raises
    as from_pretrained does, which ends the server.
    """
    from sglang.srt.utils.offloader import set_offloader

    check_options(runner)
    place = _place_of(runner, settings)
    known = packs.find(place.location, place.headers, place.recipe)
    with nullcontext() if known is not None else LoadingMemory(place.location.directories[0]) as memory:
        layers = _layers_class()(memory, settings.unit_bytes)
        set_offloader(layers)
        result = original(runner)
        if not layers.all:
            raise Unsupported(
                None,
                f"{type(runner.model).__name__}: its layers are not made by SGLang's make_layers(), so they "
                f"cannot be streamed; unset {VARIABLE} to serve the model from memory",
            )
        check_layers(layers.all)
        manifest = _make(place, layers) if known is None else known
    _stream(runner, place, layers, manifest, settings)
    return result


def _place_of(runner: Any, settings: Settings) -> _Place:
    import sglang
    from sglang.srt.runtime_context import get_parallel

    parallel, config = get_parallel(), runner.model_config
    folder = Path(config.model_path).resolve()
    if not (folder / "config.json").is_file():
        raise Format(
            None,
            f"--model-path: {folder} is not a folder with config.json and .safetensors files; download the "
            'model with huggingface_hub.snapshot_download("ORG/NAME"), and pass the folder that it returns',
            str(folder),
        )
    name = f"sglang-rank{parallel.tp_rank}of{parallel.tp_size}"
    dtype = str(config.dtype).removeprefix("torch.")
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    unit = f" in units of {settings.unit_bytes}" if settings.unit_bytes else ""
    converter = f"sglang {sglang.__version__}, torch {torch.__version__}, {name}{unit}"
    location = _location_of(folder, settings, name, dtype)
    return _Place(location, folder_headers(str(folder)), Recipe(digest, dtype, converter), str(folder))


def _location_of(folder: Path, settings: Settings, name: str, dtype: str) -> PackLocation:
    """Return where the pack of a rank is, or is to be made; `name`: of the rank."""
    roots = settings.volumes or ((settings.pack_dir,) if settings.pack_dir else ())
    beside = folder / BESIDE / name
    if not roots and pack_manifest.read(beside) is not None:  # where packs were made by default before
        return PackLocation((beside,))
    if roots:
        return PackLocation(tuple(Path(root).absolute() / name for root in roots))
    return cached_location(str(folder), str(folder), name, dtype)


def _layers_class() -> Any:
    """Return the class below, which inherits from one of SGLang's."""
    from sglang.srt.utils.offloader import BaseOffloader

    class Layers(BaseOffloader):  # type: ignore[misc, unused-ignore]
        """The layers that SGLang makes, whose weights are loaded into a file, or not at all."""

        def __init__(self, memory: LoadingMemory | None, unit_bytes: int | None) -> None:
            """`memory`: where weights are loaded to; None: they are not needed."""
            self.all: list[nn.Module] = []
            self.units: list[Unit] = []
            self._memory = memory
            self._unit_bytes = unit_bytes

        def wrap_modules(
            self, all_modules_generator: Iterable[nn.Module], *_: Any, **__: Any
        ) -> list[nn.Module]:
            """Make the layers one by one, and move the weights of each out of memory."""
            if self.all:
                raise Unsupported(None, f"the model has several lists of layers; unset {VARIABLE}")
            for layer in all_modules_generator:
                self.all.append(layer)
                for _weight, parameter in _weights_of(
                    cut_layers(_LAYERS, [layer], _own(layer), self._unit_bytes)
                ):
                    if self._memory is None:
                        _skip_loading(parameter)
                    else:
                        parameter.data = self._memory.empty_like(parameter.data)
            streamable = {key for layer in self.all for key in _own(layer)}
            self.units = cut_layers(_LAYERS, self.all, streamable, self._unit_bytes)
            return self.all

    return Layers


def _own(layer: nn.Module) -> set[int]:
    return {id(parameter) for parameter in layer.parameters()}


def _weights_of(units: Iterable[Unit]) -> Iterator[tuple[Weight, nn.Parameter]]:
    """Yield the streamed weights in their order, each with its present parameter."""
    for unit in units:
        for part in unit.parts:
            for weight in part.weights:
                parameter = part.module._parameters[weight.name]
                assert parameter is not None
                yield weight, parameter


def _skip_loading(weight: nn.Parameter) -> None:
    """Let SGLang not load this weight: its memory, which was never touched, stays empty."""

    def skip(*_: Any, **__: Any) -> None:
        pass

    if hasattr(weight, "_weight_loader"):
        weight._weight_loader = skip
    else:
        weight.weight_loader = skip  # type: ignore[attr-defined, unused-ignore]


def _wanted(layers: Any) -> list[FileTensor]:
    """Return the weights as they are after loading, in their order."""
    return [
        FileTensor(weight.path, 0, 0, parameter.dtype, tuple(parameter.shape))
        for weight, parameter in _weights_of(layers.units)
    ]


def _make(place: _Place, layers: Any) -> Manifest:
    """Write the weights, which have been loaded into a temporary file, into the pack."""
    layout = lay_out(_wanted(layers), {unit.weights[0].path for unit in layers.units})
    before = packs.file_versions(place.headers)

    def contents() -> Iterator[packs.Contents]:
        for weight, parameter in _weights_of(layers.units):
            yield packs.Contents(weight.path, parameter.data)

    with place.location.lock():
        source = Source(place.headers)
        return packs.make(
            place.location, place.headers, place.recipe, layout, before, source, contents(), place.model
        )


def _stream(runner: Any, place: _Place, layers: Any, manifest: Manifest, settings: Settings) -> None:
    model, budget = runner.model, budget_argument(settings.memory_budget, torch.device("cpu"))
    if [(each.name, each.dtype, each.shape) for each in manifest.tensors] != [
        (each.name, each.dtype, each.shape) for each in _wanted(layers)
    ]:
        raise Format(
            None,
            f"{place.location.display_name}: the pack there does not have the weights of this model; remove "
            f"{place.location.directories[0] / pack_manifest.NAME} to rebuild it",
            str(place.location.directories[0]),
        )
    streamed = {id(parameter) for _, parameter in _weights_of(layers.units)}
    resident = sum(each.nbytes for each in model.parameters() if id(each) not in streamed)
    sizes = Sizes(
        resident,
        tuple(unit.nbytes for unit in layers.units),
        tuple(len(unit.weights) for unit in layers.units),
    )
    if budget < sizes.least_budget:
        raise OutOfBudget(
            None,
            f"{VARIABLE}: memory_budget: {budget} bytes cannot hold what stays in memory ({resident} bytes "
            "of embeddings, norms and head) and two units of the layers' weights; the least is "
            f"{sizes.least_budget} bytes ({sizes.least_budget / 1e9:.3f} GB)",
        )
    places = {each.name: each for each in manifest.tensors}
    units = [StoredUnit.of(unit, places) for unit in layers.units]
    files: list[File] | None = packs.open_weights(place.location, manifest, 1)
    if files is None:
        raise Format(None, f"{place.location.display_name}: the pack was replaced meanwhile; start again")
    stream = WeightStream(files, [unit.described for unit in units], memory_bytes=budget - resident)
    remedy = f"remove {place.location.directories[0] / pack_manifest.NAME} to rebuild the pack"
    memory = RetryingMemory(stream, remedy, may_require_gradients=False, retry_seconds=settings.retry_seconds)
    hooks = WeightHooks(layers.all, layers.units, [unit.views(False) for unit in units], memory)
    streaming = Streaming(stream, hooks, resident, 0, str(place.location.directories[0] / manifest.weights))
    stays = stream.placement["resident"]
    streaming.streamed_bytes = sum(
        unit.unit.nbytes for unit, stay in zip(units, stays, strict=True) if not stay
    )
    streaming_of[model] = streaming
    _log.info(
        "%d of %d units of the layers' weights, %d bytes, are read from %s in each pass; "
        "%d bytes stay in memory",
        len(units) - sum(stays),
        len(units),
        streaming.streamed_bytes,
        place.location.display_name,
        sum(sizes.unit_bytes) + resident - streaming.streamed_bytes,
    )
    log_regularly(model)
