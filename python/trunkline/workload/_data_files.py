"""Which files a data set has, and where: named as DLIO names them, spread over directories."""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trunkline._errors import CutOff, exception_of
from trunkline._paths import absolute_path
from trunkline.workload._spec import Dataset, Part

if TYPE_CHECKING:
    from trunkline._types import Path as AnyPath

PartName = Literal["train", "valid"]
PARTS: tuple[PartName, ...] = ("train", "valid")


@dataclass(frozen=True)
class DataFile:
    """One file of a data set."""

    part: PartName
    number: int  # within its part
    path: Path


def part_of(dataset: Dataset, name: PartName) -> Part:
    """Return the part of that name."""
    return dataset.train if name == "train" else dataset.valid


def data_files(dataset: Dataset, directories: Sequence[Path]) -> Iterator[DataFile]:
    """Yield all files: file N of a part is in directory N modulo their number."""
    for name in PARTS:
        part = part_of(dataset, name)
        for number in range(part.files):
            directory = directories[number % len(directories)]
            yield DataFile(name, number, directory / name / _relative(dataset, part, number))


def files_in(dataset: Dataset, directories: int) -> list[int]:
    """Return how many files are in each of so many directories."""
    parts = [part_of(dataset, name).files for name in PARTS]
    return [
        sum(-(-(files - number) // directories) for files in parts if files > number)
        for number in range(directories)
    ]


def exact_file_bytes(dataset: Dataset) -> int | None:
    """Return the size of every file where it is known without reading any: of images of one size."""
    if dataset.format not in ("jpeg", "png") or dataset.record_bytes.stdev:
        return None
    return max(1, round(dataset.record_bytes.mean))


def check_size(dataset: Dataset, path: Path, nbytes: int) -> None:
    """Raise CutOff if a generated file has a different size, where sizes are known."""
    wanted = exact_file_bytes(dataset)
    if wanted is not None and nbytes != wanted:
        message = (
            f"{path} has {nbytes} bytes instead of {wanted}; remove it, and run "
            "`trunkline workload generate` again"
        )
        raise CutOff(errno.EINVAL, message, str(path))


def directories_of(paths: "Iterable[AnyPath]") -> list[Path]:
    """Return the directories of a data set. Raises TypeError, or ValueError if one is given twice."""
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
        shown = type(paths).__name__
        raise TypeError(f"directories: must be a list of paths, not {shown}; put it into a list")
    directories = [Path(absolute_path(each, "directories")) for each in paths]
    if not directories:
        raise ValueError("directories: give at least one")
    if len(set(directories)) != len(directories):
        raise ValueError("directories: one is given twice")
    return directories


def check_no_files(directories: Sequence[Path], argument: str = "directories") -> None:
    """Raise NotADirectoryError, which names the argument, for a directory that is a file."""
    for each in directories:
        if each.exists() and not each.is_dir():
            raise exception_of(
                "system", errno.ENOTDIR, f"{argument}: {each} is a file; name a directory", str(each)
            )


def part_folders(name: PartName, directories: Sequence[Path]) -> list[Path]:
    """Return the folder of a part in each directory."""
    return [directory / name for directory in directories]


def _relative(dataset: Dataset, part: Part, number: int) -> str:
    padded = str(number).zfill(len(str(part.files)))
    name = f"{dataset.prefix}_{padded}_of_{part.files}.{dataset.format}"
    if part.subfolders <= 1:
        return name
    folder = str(number % part.subfolders).zfill(len(str(part.subfolders)))
    return f"{folder}/{name}"
