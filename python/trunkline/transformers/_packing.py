"""Finds or makes the packs of Hugging Face folders."""

import errno
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch

from trunkline._core import File
from trunkline._errors import Unsupported, exception_of
from trunkline._formats.checkpoint_names import DESCRIPTOR
from trunkline._logging import Log
from trunkline._modes import independent_of_modes
from trunkline._paths import about_missing_disks, absolute_path, path_name
from trunkline._progress import announce
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming import pack as packs
from trunkline._streaming.layout import Layout, lay_out
from trunkline._streaming.location import PackLocation
from trunkline._streaming.manifest import Manifest, Recipe
from trunkline._streaming.pack_cache import BESIDE, cached_location, is_cached
from trunkline._streaming.room import Room, check_room
from trunkline._streaming.source import Source
from trunkline._streaming.stored import FileTensor
from trunkline._tensor_io.memory import return_freed_memory
from trunkline._trace import span
from trunkline._types import Path
from trunkline._warnings import caller
from trunkline.transformers._expert_records import experts_at_a_time
from trunkline.transformers._expert_slices import ExpertSlices
from trunkline.transformers._options import model_options
from trunkline.transformers.hub import find_model
from trunkline.transformers.stored_model import StoredModel, names_first, read_stored_model

_log = Log("transformers")

_ROUNDED_BYTES = 4  # elements of this size and more: see _wanted()


def location_argument(
    folder: FilePath, pack_dir: "Path | None", volumes: "Sequence[Path] | None"
) -> PackLocation | None:
    """Return where the arguments of from_pretrained put the pack of a folder; None: default_location()."""
    if volumes is not None:
        if isinstance(volumes, str | bytes | os.PathLike):
            raise TypeError(
                f"volumes: must be a list of directories, not {type(volumes).__name__}; put it into a list"
            )
        if not isinstance(volumes, Sequence):
            raise TypeError(f"volumes: must be a list, since its order matters, not {type(volumes).__name__}")
        if pack_dir is not None:
            raise ValueError(
                "pack_dir: cannot be combined with volumes, which hold the pack; omit one of them"
            )
        if not volumes:
            raise ValueError("volumes: must not be empty")
        directories = tuple(_directory_argument(folder, "volumes", volume) for volume in volumes)
        if (about_disks := about_missing_disks(map(str, directories))) is not None:
            caller().warn(about_disks)
        return PackLocation(directories)
    if pack_dir is not None:
        return PackLocation((_directory_argument(folder, "pack_dir", pack_dir),))
    return None


@dataclass(frozen=True)
class WantedPack:
    """Whether a pack is to be used (None: as is best), and where it is (None: default_location())."""

    pack: bool | None
    location: PackLocation | None

    @classmethod
    def of(cls, pack: bool | None, location: PackLocation | None) -> "WantedPack":
        """Check the argument `pack` of from_pretrained."""
        if pack is not None and type(pack) is not bool:
            raise TypeError(f"pack: must be True, False or None, not {type(pack).__name__}")
        if pack is False and location is not None:
            raise ValueError("pack: False cannot be combined with pack_dir or volumes; omit one of them")
        return cls(pack, location)

    @property
    def is_explicit(self) -> bool:
        """Whether the caller requires a pack."""
        return self.pack is True or self.location is not None

    def why(self, stored_model: StoredModel) -> str | None:
        """Return why a pack is used; None if the files are read in place.

        Raises Unsupported where that is required and impossible.
        """
        if self.pack is False:
            why = stored_model.why_not_in_place()
            if why is None:
                return None
            raise Unsupported(
                None,
                f"pack: False, but the files of {stored_model.name} cannot be read in place: {why}; omit "
                "pack, so that the weights are converted once",
                str(stored_model.folder),
            )
        if self.location is not None:
            return "pack_dir or volumes is given"
        return "pack=True" if self.pack else stored_model.why_pack()


def default_location(stored_model: StoredModel) -> PackLocation:
    """Return where the pack of a model is, or is made, by default: in the cache.

    Earlier versions made it in the model's folder: one that is there is used if it still fits.
    """
    beside = PackLocation((stored_model.folder / BESIDE,))
    if pack_manifest.file_version(beside.directories[0]) is not None and existing_pack(beside, stored_model):
        return beside
    contents = hashlib.sha256(repr(list(map(_described, _wanted(stored_model)))).encode()).hexdigest()
    changes = stored_model.changes if stored_model.weights.computed else ""
    return cached_location(stored_model.name, stored_model.identity, contents, changes)


def _directory_argument(folder: FilePath, argument: str, path: Path) -> FilePath:
    name = path_name(path, argument)
    if not name:
        raise ValueError(f'{argument}: must not be empty; "." is the current directory')
    directory = FilePath(absolute_path(name, argument))
    if directory.exists() and not directory.is_dir():
        raise exception_of(
            "system",
            errno.ENOTDIR,
            f"{argument}: {name} is a file, and a pack is a directory; name a new or an existing directory",
            name,
        )
    if directory.exists() and folder.exists() and directory.samefile(folder):
        raise ValueError(
            f"{argument}: {name} is the model's own folder, where a pack would be mistaken for a file of the "
            f"model; use another directory, such as {folder / BESIDE}"
        )
    if (directory / DESCRIPTOR).exists():
        raise ValueError(
            f"{argument}: {name} is a directory of checkpoints, where a pack would lie among the steps; use "
            f"another directory, such as {folder / BESIDE}"
        )
    return directory


def existing_pack(location: PackLocation, stored_model: StoredModel) -> Manifest | None:
    """Return the manifest of the model's pack; None if it has none there."""
    with span("stream", "look for a pack", location.display_name):
        found = packs.find(location, stored_model.headers, _recipe(stored_model))
    if found is None:
        return None
    if list(map(_described, found.tensors)) != list(map(_described, _wanted(stored_model))):
        _log.info(
            "%s: the pack there is not used: it has another layout, or no checksums of experts",
            location.display_name,
        )
        return None
    return found


def opened(
    location: PackLocation,
    stored_model: StoredModel,
    count: int,
    before_making: Callable[[], object] = lambda: None,
) -> tuple[Manifest, list[File], bool]:
    """Return the pack's manifest, its weights opened `count` times, and whether this call made the pack.

    It is made unless it exists. The weights are those of the manifest, even if another process replaces the
    pack at the same time.
    """
    version = pack_manifest.file_version(location.directories[0])
    found = existing_pack(location, stored_model)
    if found and (files := packs.open_weights(location, found, count)) is not None:
        _log_reuse(location, found)
        return found, files, False
    before_making()
    nbytes = layout_of(stored_model).nbytes
    rooms = check_room(location, nbytes, stored_model.name, _instead_of_packing(stored_model))
    _announce(location, stored_model, nbytes, rooms)
    try:
        with location.lock():
            # Another process may have made it meanwhile. If not, comparing the files again is not needed.
            if pack_manifest.file_version(location.directories[0]) != version and (
                found := existing_pack(location, stored_model)
            ):
                _log_reuse(location, found)
                return found, [location.open() for _ in range(count)], False
            made = _make(location, stored_model)
            return_freed_memory()  # of converted weights: the budget is for those that are used from now on
            return made, [location.open() for _ in range(count)], True
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise type(error)(
            error.errno, f"{error.strerror}; pass another directory for the pack as pack_dir", error.filename
        ) from error


def _announce(location: PackLocation, stored_model: StoredModel, nbytes: int, rooms: list[Room]) -> None:
    free = ", ".join(f"{room.free / 1e9:.3g} GB" for room in rooms)
    text = (
        f"writing a pack of {stored_model.name}, once: {nbytes} bytes ({nbytes / 1e9:.3g} GB) to "
        f"{location.display_name} ({free} free)"
    )
    if stored_model.is_dequantised:
        text += f"; on a CPU, {_about_keeping(stored_model)}, and reads less in each pass"
    announce(text, _log)


def _about_keeping(stored_model: StoredModel) -> str:
    stored = sum(each.nbytes for each in stored_model.tensors.values())
    return f'keep="quantised" takes about {stored / 1e9:.3g} GB'


def _instead_of_packing(stored_model: StoredModel) -> str:
    """Return what else to do where a pack has no room, for check_room()."""
    if stored_model.why_not_in_place() is None:
        return ", or pass pack=False to read the model's files in place"
    if stored_model.is_dequantised:
        return f"; on a CPU, {_about_keeping(stored_model)}"
    return ""


def _log_reuse(location: PackLocation, found: Manifest) -> None:
    _log.info(
        "%s: the pack there is used (%d weights, %d bytes)",
        location.display_name,
        len(found.tensors),
        found.nbytes,
    )


def _make(location: PackLocation, stored_model: StoredModel) -> Manifest:
    recipe = _recipe(stored_model)
    _check_same_model(location, stored_model, recipe)
    before = packs.file_versions(stored_model.headers)
    source = _source(stored_model)
    contents = _contents(stored_model, source)
    layout = layout_of(stored_model)
    return packs.make(
        location, stored_model.headers, recipe, layout, before, source, contents, stored_model.name
    )


def planned(stored_model: StoredModel) -> list[FileTensor]:
    """Return the weights in their order, with their offsets in a pack that is made now."""
    return layout_of(stored_model).tensors


def layout_of(stored_model: StoredModel) -> Layout:
    return lay_out(
        _wanted(stored_model), names_first(stored_model.whole.units) | set(stored_model.whole.resident[:1])
    )


def _recipe(stored_model: StoredModel) -> Recipe:
    config = (stored_model.folder / "config.json").read_bytes()
    if stored_model.weights.computed:  # by the config that is used
        config += stored_model.changes.encode()
    dtype = str(stored_model.model.dtype).removeprefix("torch.")
    return Recipe(hashlib.sha256(config).hexdigest(), dtype, stored_model.weights.converter)


def _wanted(stored_model: StoredModel) -> list[FileTensor]:
    """Return the weights in their order, each with the best alignment in memory as its offset.

    How kernels for fp32 round depends on it: there it is the alignment that transformers has, which maps
    weights that are stored in the model's dtype, and allocates all others. Kernels for smaller elements do
    not depend on it, and with 0 reading takes the fewest requests.
    """
    routed = [] if stored_model.routed is None else stored_model.routed.experts
    slices = {weight.path: each.count for each in routed for weight in each.weights}
    wanted = []
    for name in stored_model.order:
        stored, dtype = stored_model.weights.stored.get(name), stored_model.dtypes[name]
        is_mapped = stored is not None and stored.dtype == dtype and dtype.itemsize >= _ROUNDED_BYTES
        offset = stored.misalignment if stored is not None and is_mapped else 0
        shape = stored_model.shapes[name]
        wanted.append(FileTensor(name, 0, offset, dtype, shape, slices=slices.get(name, 0)))
    return wanted


def _check_same_model(location: PackLocation, stored_model: StoredModel, recipe: Recipe) -> None:
    """Raise an error rather than replace the pack of another model, unless the directory is this model's."""
    own = stored_model.folder / BESIDE
    if is_cached(location) or (own.exists() and location.directories[0].samefile(own)):
        return
    there = pack_manifest.read(location.directories[0])
    if there is not None and there.recipe.config_sha256 != recipe.config_sha256:
        raise exception_of(
            "system",
            errno.EEXIST,
            f"{location.display_name} holds the pack of a model with another config.json; use a separate "
            "directory for each model (on each volume), or remove "
            f"{location.directories[0] / pack_manifest.NAME} to replace the pack",
            str(location.directories[0]),
        )


@independent_of_modes
def pack(
    model_dir: Path,
    directories: "Sequence[Path] | None" = None,
    *,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    cache_dir: "Path | None" = None,
    subfolder: str = "",
    text_only: bool = False,
    keep: str = "dequantised",
) -> dict[str, Any]:
    """Make the pack of a Hugging Face folder in one directory, or striped over several, unless it exists.

    `directories`: None is where from_pretrained looks for it by default. Otherwise that finds it if called
    with the same directory as `pack_dir`, or directories as `volumes`. `dtype`, `revision`, `cache_dir`,
    `subfolder`, `text_only` and `keep` are those of from_pretrained. Returns what `trunkline pack --json`
    prints. Raises as from_pretrained does.
    """
    found = find_model(model_dir, revision=revision, cache_dir=cache_dir, subfolder=subfolder)
    location = None if directories is None else location_argument(found.path, None, directories)
    stored_model = read_stored_model(
        found, dtype, None, model_options({}, None, text_only=text_only, keep=keep)
    )
    if location is None:
        location = default_location(stored_model)
    manifest, _, is_new = opened(location, stored_model, 0)
    return {
        "model": found.name,
        "directories": [str(directory) for directory in location.directories],
        "made": is_new,
        "bytes": manifest.nbytes,
        "tensors": len(manifest.tensors),
        "dtype": manifest.recipe.dtype,
    }


def _described(stored: FileTensor) -> tuple[str, torch.dtype, tuple[int, ...], int, int]:
    return stored.name, stored.dtype, stored.shape, stored.misalignment, stored.slices


def _source(stored_model: StoredModel) -> Source:
    """Return a Source that reads the model's tensors in the order in which _contents() needs them."""
    wanted: dict[str, FileTensor] = {}
    for name in stored_model.order:
        if name in stored_model.weights.stored:
            wanted.update((place.name, place) for _, place in _stored_parts(stored_model, name))
        elif name in stored_model.records:
            wanted.update((place.name, place) for place in stored_model.records[name].places())
        elif (sliced := _expert_slices(stored_model, name)) is not None:
            wanted.update((place.name, place) for place in sliced.places())
        else:
            sources = stored_model.weights.computed[name].sources
            wanted.update((source, stored_model.tensors[source]) for source, _ in sources)
    return Source(stored_model.headers, wanted.values())


def _has_experts(stored_model: StoredModel, name: str) -> bool:
    """Whether a weight is that of routed experts, which its first dimension counts."""
    routed = [] if stored_model.routed is None else stored_model.routed.experts
    return any(weight.path == name for each in routed for weight in each.weights)


def _stored_parts(stored_model: StoredModel, name: str) -> list[tuple[int | None, FileTensor]]:
    """Return how a weight is read that is stored as such: a few experts at a time, each with the first."""
    stored = stored_model.weights.stored[name]
    if not _has_experts(stored_model, name):
        return [(None, stored)]
    of_expert = stored.nbytes // max(1, stored.shape[0])
    return [(few[0], stored.elements(few)) for few in experts_at_a_time(stored.shape[0], of_expert)]


def _expert_slices(stored_model: StoredModel, name: str) -> ExpertSlices | None:
    """Return how a weight is computed a few experts at a time; None if it is not."""
    if not _has_experts(stored_model, name):
        return None
    shape, dtype = stored_model.shapes[name], stored_model.dtypes[name]
    nbytes = math.prod(shape) * dtype.itemsize
    return ExpertSlices.of(stored_model.weights.computed[name], stored_model.tensors, shape, nbytes)


def _contents(stored_model: StoredModel, source: Source) -> Iterator[packs.Contents]:
    """Yield the weights, and read the tensors that each is made from just before."""

    def fetch(dtype: torch.dtype | None, stored: FileTensor) -> torch.Tensor:
        found = source.fetch(stored)
        return found if dtype is None else found.to(dtype)

    def fetch_named(dtype: torch.dtype | None, name: str) -> torch.Tensor:
        return fetch(dtype, stored_model.tensors[name])

    done: set[int] = set()
    for name in stored_model.order:
        dtype = stored_model.dtypes[name]
        if name in stored_model.weights.stored:
            for number, place in _stored_parts(stored_model, name):
                yield packs.Contents(name, fetch(dtype, place), number)
            continue
        if name in stored_model.records:
            for first, records in stored_model.records[name].records(source.fetch):
                yield packs.Contents(name, records, first)
            continue
        conversion = stored_model.weights.computed[name]
        if id(conversion) in done:
            continue
        done.add(id(conversion))
        needed = None if conversion.dequantises else dtype
        sliced = _expert_slices(stored_model, name)
        if sliced is None:
            for weight, tensor in conversion.run(stored_model.model, partial(fetch_named, needed)).items():
                yield packs.Contents(weight, tensor)
        else:
            for weight, first, tensor in sliced.slices(stored_model.model, partial(fetch, needed)):
                yield packs.Contents(weight, tensor, first)
