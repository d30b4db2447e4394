"""The packs in the cache directory: where they are, listing and removing them."""

import errno
import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline._errors import Error, exception_of
from trunkline._streaming import manifest as pack_manifest
from trunkline._streaming.location import PackLocation

BESIDE = "trunkline-pack"  # in the model's folder, where packs were made by default before
_DIGEST_CHARACTERS = 12
_NAME_CHARACTERS = 80


def cache_directory() -> Path:
    """Return TRUNKLINE_CACHE, or the folder trunkline in the user's cache directory (XDG_CACHE_HOME)."""
    given = os.environ.get("TRUNKLINE_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "trunkline"  # noqa: PTH117


def packs_directory() -> Path:
    """Return the directory of the packs, each in its own folder."""
    return cache_directory() / "packs"


def cached_location(name: str, *identity: str) -> PackLocation:
    """Return where the pack of a model is, or would be, in the cache.

    `name`: of the model, for people. `identity`: what makes this pack another than those of other models.
    """
    digest = hashlib.sha256("\0".join(identity).encode(errors="surrogateescape")).hexdigest()
    # A link to a folder means the same pack.
    shown = Path(os.path.realpath(name)).name if os.path.isabs(name) else name.replace("/", "--")  # noqa: PTH117
    shown = re.sub(r"[^A-Za-z0-9._-]", "_", shown)[:_NAME_CHARACTERS]
    return PackLocation((packs_directory() / f"{shown}-{digest[:_DIGEST_CHARACTERS]}",))


def is_cached(location: PackLocation) -> bool:
    """Whether a pack is in the cache, where its folder belongs to one model."""
    return len(location.directories) == 1 and location.directories[0].parent == packs_directory()


@dataclass(frozen=True)
class CachedPack:
    """A pack in the cache. `problem`: why it cannot be used; "" if nothing is known to be wrong."""

    directory: Path
    model: str
    dtype: str
    nbytes: int
    problem: str = ""
    form: str = ""  # as Recipe.form

    def document(self) -> dict[str, Any]:
        """Return what `trunkline pack --list --json` prints of it."""
        return {
            "name": self.directory.name,
            "directory": str(self.directory),
            "model": self.model,
            "dtype": self.dtype,
            "form": self.form,
            "bytes": self.nbytes,
            "problem": self.problem,
        }


def cached_packs() -> list[CachedPack]:
    """Return the packs in the cache, by name; also those that cannot be used."""
    try:
        folders = sorted(each for each in packs_directory().iterdir() if each.is_dir())
    except FileNotFoundError:
        return []
    return [pack for folder in folders if (pack := _cached_pack(folder)) is not None]


def _cached_pack(folder: Path) -> CachedPack | None:
    weights = PackLocation((folder,)).weights_path
    try:
        nbytes = weights.stat().st_size
    except OSError:
        nbytes = 0
    try:
        manifest = pack_manifest.read(folder)
    except Error as error:
        return CachedPack(folder, "", "", nbytes, str(error))
    if manifest is None:
        return CachedPack(folder, "", "", nbytes, "incomplete") if weights.exists() else None
    problem = "" if nbytes == manifest.nbytes else f"{weights.name} is missing or incomplete"
    if not problem and os.path.isabs(manifest.model) and not Path(manifest.model).exists():  # noqa: PTH117
        problem = "its model is gone"
    return CachedPack(folder, manifest.model, manifest.recipe.dtype, nbytes, problem, manifest.recipe.form)


def remove_pack(name_or_path: str) -> list[Path]:
    """Remove a pack, and nothing else; return its directories.

    It is named by its name in the cache, by its model, if the cache has only one pack of that, or by its
    directory, the first of several. Raises FileNotFoundError if there is no such pack, FileExistsError for
    files that are not a pack's, and BlockingIOError while another process makes it.
    """
    location = _location_of(_directory_named(name_or_path))
    for directory in location.directories:
        if not directory.is_dir():
            raise exception_of(
                "system",
                errno.ENOENT,
                f"cannot remove the pack in {location.display_name}: {directory} is missing; mount or create "
                "it, then try again",
                str(directory),
            )
    location.check_is_pack()
    with location.lock(wait=False) as locked:
        if not locked:
            raise exception_of(
                "system",
                errno.EBUSY,
                f"cannot remove the pack in {location.display_name}: another process is making it; try again "
                "later",
                str(location.directories[0]),
            )
        location.remove()
    if is_cached(location) or location.directories[0].name == BESIDE:
        with suppress(OSError):  # it holds other files
            folder = location.directories[0]
            folder.unlink() if folder.is_symlink() else folder.rmdir()
    return list(location.directories)


def _location_of(directory: Path) -> PackLocation:
    manifest = pack_manifest.read(directory)
    if manifest is None or manifest.volumes == 1:
        return PackLocation((directory,))
    first, *others = (Path(each) for each in manifest.directories)
    if not first.exists() or not first.samefile(directory):
        raise exception_of(
            "system",
            errno.ENOENT,
            f"cannot remove the pack in {directory}: it was made as {first}, striped over several "
            "directories, and has been moved; remove its files yourself",
            str(directory),
        )
    return PackLocation((directory, *others))


def _directory_named(name_or_path: str) -> Path:
    packs = cached_packs()
    path = Path(name_or_path)
    named = [each for each in packs if each.directory.name == name_or_path]
    # As from_pretrained: a folder of this name is meant rather than a model of the Hub.
    model = os.path.realpath(path) if path.exists() else name_or_path
    named = named or [each for each in packs if each.model and _model_of(each) == model]
    if len(named) > 1:
        raise ValueError(
            f"{name_or_path} has {len(named)} packs: {_names(named)}; name one of these, or its directory"
        )
    if named:
        return named[0].directory
    for directory in (path, path / BESIDE):
        if _holds_pack(directory):
            return directory.absolute()
    of_hub = [each for each in packs if each.model == name_or_path]
    if of_hub:
        raise exception_of(
            "system",
            errno.ENOENT,
            f"there is no pack of the folder {name_or_path}, which this name means; that of the Hub's model "
            f"of this name is {_names(of_hub)}",
            name_or_path,
        )
    raise exception_of(
        "system",
        errno.ENOENT,
        f"there is no pack {name_or_path}: neither in the cache ({packs_directory()}), nor is it the "
        "directory of one; `trunkline pack --list` shows those in the cache",
        name_or_path,
    )


def _model_of(pack: CachedPack) -> str:
    """Return the folder of the model of a pack, without links, or the model's name."""
    return os.path.realpath(pack.model) if os.path.isabs(pack.model) else pack.model  # noqa: PTH117


def _holds_pack(directory: Path) -> bool:
    return (directory / pack_manifest.NAME).is_file() or PackLocation((directory,)).weights_path.is_file()


def _names(packs: Sequence[CachedPack]) -> str:
    return ", ".join(each.directory.name for each in packs)
