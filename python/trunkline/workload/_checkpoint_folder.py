"""Where emulated checkpoints are: `DIR/checkpoints/checkpoint-000001` and so on, below the directories of the
workload, or `DIR/checkpoint-000001` in a directory of their own.

With several directories the shards are spread over `DIR/checkpoints/shards/checkpoint-000001` in each, and
the first directory has links to them. `trunkline-workload.json` beside the checkpoints says what they are of,
so that a later run can restore them. Nothing but a run's own checkpoints is ever removed.
"""

import errno
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline._errors import Error, exception_of
from trunkline._formats.dcp_names import manifest_name
from trunkline._paths import absolute_path
from trunkline.workload._data_files import PARTS, check_no_files, part_folders
from trunkline.workload._descriptor import NAME, read_descriptor, write_descriptor
from trunkline.workload._model_shape import ModelShape
from trunkline.workload._room import require_room

if TYPE_CHECKING:
    from trunkline._types import Path as AnyPath

_FOLDER = "checkpoints"
_SHARDS = "shards"
_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})")


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints below the directories of a workload."""

    places: tuple[Path, ...]  # a folder on each disk; the first one has the manifests

    @classmethod
    def below(cls, directories: Sequence[Path]) -> "CheckpointFolder":
        """The folder in these directories, which need not exist."""
        return cls(tuple(directory / _FOLDER for directory in directories))

    @classmethod
    def at(cls, path: "AnyPath", data: Sequence[Path]) -> "CheckpointFolder":
        """This directory, which need not exist. `data`: the directories of the data set.

        Raises NotADirectoryError if it or a parent is a file, ValueError if its files would become part of
        the data set.
        """
        place = Path(absolute_path(path, "checkpoint_directory"))
        check_no_files([place, *place.parents], "checkpoint_directory")
        for part in (folder for name in PARTS for folder in part_folders(name, data)):
            if place.resolve().is_relative_to(part.resolve()):
                raise ValueError(
                    f"checkpoint_directory: {place} is in {part}, which has the samples of the data set; "
                    "choose another directory"
                )
        return cls((place,))

    def path(self, number: int) -> Path:
        """The directory of a checkpoint."""
        return self.places[0] / f"checkpoint-{number:06d}"

    def volumes(self, number: int) -> list[Path] | None:
        """The directories for its shards, None with one directory."""
        if len(self.places) == 1:
            return None
        return [place / _SHARDS / self.path(number).name for place in self.places]

    def numbers(self) -> list[int]:
        """The numbers of all checkpoints, also of those that are not complete."""
        found = {
            int(match[1])
            for place in self.places
            for parent in (place, place / _SHARDS)
            if parent.is_dir()
            for each in parent.iterdir()
            if (match := _CHECKPOINT.fullmatch(each.name))
        }
        return sorted(found)

    def is_complete(self, number: int) -> bool:
        """Whether the checkpoint can be restored."""
        return (self.path(number) / manifest_name(None)).exists()

    def remove(self, number: int) -> None:
        """Remove a checkpoint, or what there is of it. The caller has made it."""
        manifest = self.path(number) / manifest_name(None)
        manifest.unlink(missing_ok=True)  # first, so that none is left that lacks shards
        for each in (self.path(number), *(self.volumes(number) or [])):
            if each.exists():
                shutil.rmtree(each)

    def make(self) -> list[Path]:
        """Make the folders, and return those that did not exist."""
        made = [place for place in self.places if not place.exists()]
        for place in made:
            place.mkdir(parents=True)
        return made

    def remove_if_empty(self, made: Sequence[Path]) -> None:
        """Remove folders that make() made, unless there is a checkpoint in them, or anything else."""
        if self.numbers():
            return
        for place in made:
            others = {each.name for each in place.iterdir()}
            if not others - {NAME, _SHARDS} and not any((place / _SHARDS).glob("*")):
                shutil.rmtree(place)


def model_of(name: str, shape: ModelShape, seed: int) -> dict[str, Any]:
    """Return what decides the contents of a checkpoint, as JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(shape)))
    return {"workload": name, "seed": seed, **plain}


def check_owner(folder: CheckpointFolder) -> None:
    """Raise FileExistsError if the folder has files that were not saved by a workload."""
    if read_descriptor(folder.places[0]) is not None:
        return
    for place in folder.places:
        others = {each.name for each in place.iterdir()} - ({_SHARDS} if place != folder.places[0] else set())
        if others:
            raise exception_of(
                "system",
                errno.EEXIST,
                f"{place} has files that were not saved by a workload ({min(others)}); choose another "
                "directory",
                str(place),
            )


def reserve(folder: CheckpointFolder, model: dict[str, Any], ranks: int, numbers: Sequence[int]) -> None:
    """Record, before anything is saved, what these checkpoints will be of."""
    if not numbers:
        return
    existing = set(folder.numbers()) - set(numbers)
    kept = []
    for each in _saved(folder):
        each["checkpoints"] = [number for number in each["checkpoints"] if number in existing]
        if each["checkpoints"]:
            kept.append(each)
    kept.append({"checkpoints": list(numbers), "ranks": ranks, "model": model})
    write_descriptor(folder.places[0], {"version": 1, "saved": kept})


def restorable(folder: CheckpointFolder, model: dict[str, Any], ranks: int) -> list[int]:
    """Return the complete checkpoints of this model that so many ranks can restore.

    Raises FileNotFoundError if there are none; the message says what else there is.
    """
    place, others, found = folder.places[0], set(), []
    for each in _saved(folder):
        complete = [number for number in each["checkpoints"] if folder.is_complete(number)]
        differing = [key for key in model if each["model"].get(key) != model[key]]
        if complete and differing:
            others.add(f"of another {', '.join(differing)}")
        elif complete and each["ranks"] < ranks:
            others.add(f"of {each['ranks']} ranks")
        else:
            found += complete
    if found:
        return sorted(found)
    why = f" of this model and {ranks} ranks; it has some {' and '.join(sorted(others))}" if others else ""
    raise exception_of(
        "system",
        errno.ENOENT,
        f"{place} has no complete checkpoint to restore{why}; save some first with "
        "checkpoint.num_checkpoints_write, and the same model, ranks and scale_bytes",
        str(place),
    )


def _saved(folder: CheckpointFolder) -> list[dict[str, Any]]:
    present = read_descriptor(folder.places[0]) or {"saved": []}
    if not isinstance(present.get("saved"), list):
        place = folder.places[0]
        raise Error(
            errno.EINVAL, f"{place / NAME} is not of checkpoints; choose another directory", str(place)
        )
    return list(present["saved"])


@contextmanager
def only_complete(folder: CheckpointFolder, numbers: Sequence[int], remove: bool) -> Iterator[None]:
    """Remove, at the end, those of these new checkpoints that are not complete; with `remove`, all."""
    try:
        yield
    finally:
        for number in numbers:
            if remove or not folder.is_complete(number):
                folder.remove(number)


def check_room(folder: CheckpointFolder, needed: int) -> None:
    """Raise OSError if a file system has less room than so many bytes need, spread over the directories."""
    shares: dict[int, int] = {}
    paths: dict[int, Path] = {}
    for place in folder.places:
        device = place.stat().st_dev
        paths.setdefault(device, place)
        shares[device] = shares.get(device, 0) + -(-needed // len(folder.places))
    for device, share in shares.items():
        require_room(
            paths[device],
            share,
            "the checkpoints need",
            "choose another directory, a smaller scale_bytes, fewer ranks, or a smaller "
            "checkpoint.num_checkpoints_write (overrides=)",
        )
