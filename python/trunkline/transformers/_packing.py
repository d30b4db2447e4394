"""Packs of Hugging Face folders: found, or made."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch

from trunkline._core import File
from trunkline._errors import exception_of
from trunkline._modes import independent_of_modes
from trunkline._paths import absolute_path, path_name
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming import pack as packs
from trunkline._streaming.layout import Layout, lay_out
from trunkline._streaming.location import PackLocation
from trunkline._streaming.manifest import Manifest, Recipe
from trunkline._streaming.source import Source
from trunkline._streaming.stored import Stored
from trunkline._types import Path
from trunkline.transformers.stored_model import Checkpoint, look_into, names_first

_DIRECTORY = "trunkline-pack"
_ROUNDED_BYTES = 4  # elements of this size and more: see _wanted()


def location_argument(
    folder: FilePath, pack_dir: "Path | None", volumes: "Sequence[Path] | None"
) -> PackLocation:
    """Return where the pack of a folder is, by the arguments of from_pretrained."""
    if volumes is not None:
        if isinstance(volumes, str | bytes | os.PathLike):
            raise TypeError("volumes: must be a sequence of paths, not one path")
        if not isinstance(volumes, Sequence):
            raise TypeError(f"volumes: must be a list, whose order counts, not {type(volumes).__name__}")
        if pack_dir is not None:
            raise ValueError("pack_dir: a pack on several volumes lies in them; leave it out")
        if not volumes:
            raise ValueError("volumes: must not be empty")
        return PackLocation(tuple(_directory_argument(folder, "volumes", volume) for volume in volumes))
    if pack_dir is not None:
        return PackLocation((_directory_argument(folder, "pack_dir", pack_dir),))
    return PackLocation((folder / _DIRECTORY,))


def _directory_argument(folder: FilePath, argument: str, path: Path) -> FilePath:
    name = path_name(path, argument)
    if not name:
        raise ValueError(f'{argument}: must not be empty; "." is the current directory')
    directory = FilePath(absolute_path(name, argument))
    if directory.exists() and folder.exists() and directory.samefile(folder):
        raise ValueError(
            f"{argument}: {name} is the model's own folder, where a pack would be taken for a file of the "
            f"model; give another directory, such as {folder / _DIRECTORY}"
        )
    return directory


def _existing(location: PackLocation, checkpoint: Checkpoint) -> Manifest | None:
    """Return the manifest of the checkpoint's pack; None where it has none there."""
    found = packs.find(location, checkpoint.headers, _recipe(checkpoint))
    if found is None or list(map(_described, found.tensors)) != list(map(_described, _wanted(checkpoint))):
        return None
    return found


def opened(
    location: PackLocation,
    checkpoint: Checkpoint,
    count: int,
    before_making: Callable[[], object] = lambda: None,
) -> tuple[Manifest, list[File], bool]:
    """Return the pack's manifest, its weights opened `count` times, and whether the pack was made now.

    It is made unless it is there. The weights are those of the manifest, also when others make another pack
    there at the same time.
    """
    looked = pack_manifest.stamp(location.directories[0])
    found = _existing(location, checkpoint)
    if found and (files := packs.open_weights(location, found, count)) is not None:
        return found, files, False
    before_making()
    try:
        with location.lock():
            # Of another process meanwhile; else there is no need to read all that is compared once more.
            if pack_manifest.stamp(location.directories[0]) != looked and (
                found := _existing(location, checkpoint)
            ):
                return found, [location.open() for _ in range(count)], False
            return _make(location, checkpoint), [location.open() for _ in range(count)], True
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise type(error)(
            error.errno, f"{error.strerror}; give another place for the pack as pack_dir", error.filename
        ) from error


def _make(location: PackLocation, checkpoint: Checkpoint) -> Manifest:
    recipe = _recipe(checkpoint)
    _check_same_model(location, checkpoint, recipe)
    before = packs.look(checkpoint.headers)
    source = _source(checkpoint)
    contents = _contents(checkpoint, source)
    return packs.make(location, checkpoint.headers, recipe, _layout(checkpoint), before, source, contents)


def planned(checkpoint: Checkpoint) -> list[Stored]:
    """Return the weights in their order, where a pack that is made now has them."""
    return _layout(checkpoint).tensors


def _layout(checkpoint: Checkpoint) -> Layout:
    return lay_out(_wanted(checkpoint), names_first(checkpoint.units) | set(checkpoint.resident[:1]))


def _recipe(checkpoint: Checkpoint) -> Recipe:
    config = (checkpoint.folder / "config.json").read_bytes()
    dtype = str(checkpoint.model.dtype).removeprefix("torch.")
    return Recipe(hashlib.sha256(config).hexdigest(), dtype, checkpoint.weights.converter)


def _wanted(checkpoint: Checkpoint) -> list[Stored]:
    """Return the weights in their order, each with the offset at which it is best in memory.

    Kernels for fp32 round by it: there it is as transformers has it, which maps what is stored as it is, and
    has torch make all else. Those for smaller elements do not, and at 0 reading takes the fewest requests.
    """
    wanted = []
    for name in checkpoint.order:
        stored, dtype = checkpoint.weights.stored.get(name), checkpoint.dtypes[name]
        is_mapped = stored is not None and stored.dtype == dtype and dtype.itemsize >= _ROUNDED_BYTES
        offset = stored.misalignment if stored is not None and is_mapped else 0
        wanted.append(Stored(name, 0, offset, dtype, checkpoint.shapes[name]))
    return wanted


def _check_same_model(location: PackLocation, checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Raise an error rather than replace the pack of another model, unless it is in this model's folder."""
    own = checkpoint.folder / _DIRECTORY
    if own.exists() and location.directories[0].samefile(own):
        return
    there = pack_manifest.read(location.directories[0])
    if there is not None and there.recipe.config_sha256 != recipe.config_sha256:
        raise exception_of(
            "system",
            errno.EEXIST,
            f"{location.shown} holds the pack of a model with another config.json; give each model a "
            "directory of its own (on each volume), or remove "
            f"{location.directories[0] / pack_manifest.NAME} to have it replaced",
            str(location.directories[0]),
        )


@independent_of_modes
def pack(
    model_dir: Path,
    directories: "Sequence[Path]",
    *,
    dtype: torch.dtype | str | None = None,
) -> dict[str, Any]:
    """Make the pack of a Hugging Face folder in one directory, or striped over several, unless it is there.

    from_pretrained finds it when it is given the same directory as `pack_dir`, or directories as `volumes`,
    and the same `dtype`. Returns what `trunkline pack --json` prints. Raises as from_pretrained.
    """
    folder = FilePath(path_name(model_dir, "model_dir"))
    location = location_argument(folder, None, directories)
    checkpoint = look_into(folder, dtype, None)
    manifest, _, is_new = opened(location, checkpoint, 0)
    return {
        "model": str(folder),
        "directories": [str(directory) for directory in location.directories],
        "made": is_new,
        "bytes": manifest.nbytes,
        "tensors": len(manifest.tensors),
        "dtype": manifest.recipe.dtype,
    }


def _described(stored: Stored) -> tuple[str, torch.dtype, tuple[int, ...], int]:
    return stored.name, stored.dtype, stored.shape, stored.misalignment


def _source(checkpoint: Checkpoint) -> Source:
    """Return what reads the tensors of the checkpoint in the order in which _contents() wants them."""
    wanted: dict[str, Stored] = {}
    for name in checkpoint.order:
        if name in checkpoint.weights.stored:
            wanted[checkpoint.weights.stored[name].name] = checkpoint.weights.stored[name]
        else:
            sources = checkpoint.weights.computed[name].sources
            wanted.update((source, checkpoint.tensors[source]) for source, _ in sources)
    return Source(checkpoint.headers, wanted.values())


def _contents(checkpoint: Checkpoint, source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights, reading what each is made from when it is asked for."""

    def fetch(dtype: torch.dtype, stored: Stored) -> torch.Tensor:
        return source.fetch(stored).to(dtype)

    def fetch_named(dtype: torch.dtype, name: str) -> torch.Tensor:
        return fetch(dtype, checkpoint.tensors[name])

    done: set[int] = set()
    for name in checkpoint.order:
        dtype = checkpoint.dtypes[name]
        if name in checkpoint.weights.stored:
            yield name, fetch(dtype, checkpoint.weights.stored[name])
            continue
        conversion = checkpoint.weights.computed[name]
        if id(conversion) not in done:
            done.add(id(conversion))
            yield from conversion.run(checkpoint.model, partial(fetch_named, dtype)).items()
