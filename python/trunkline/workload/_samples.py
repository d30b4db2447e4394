"""Which samples of the data set on disk are read, and in which units."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from trunkline.data import Index, index
from trunkline.workload._data_files import PartName, check_size, exact_file_bytes, part_folders, part_of
from trunkline.workload._descriptor import NAME, generated_files
from trunkline.workload._spec import Dataset, Workload
from trunkline.workload._totals import with_files
from trunkline.workload._writers import NPY_HEADER_BYTES


@dataclass(frozen=True)
class Units:
    """How a part is read: in units of one sample, or of the samples of a row group."""

    count: int  # in all files
    per_file: int
    samples: int  # of a unit
    samples_of_last: int  # of the last unit of a file


def units_of(dataset: Dataset, files: int) -> Units:
    """Return the units of so many files, as they are generated."""
    if dataset.format != "parquet":
        return Units(files * dataset.samples_per_file, dataset.samples_per_file, 1, 1)
    per_file = -(-dataset.samples_per_file // dataset.rows_per_group)
    last = dataset.samples_per_file - (per_file - 1) * dataset.rows_per_group
    return Units(files * per_file, per_file, dataset.rows_per_group, last)


def found_workload(workload: Workload, directories: Sequence[Path]) -> Workload:
    """Return the workload with the number of files that were generated in the directories, if they were.

    Raises ValueError if they have another data set.
    """
    generated = generated_files(directories, workload.dataset)
    return workload if generated is None else with_files(workload, *generated)


def open_part(workload: Workload, name: PartName, directories: Sequence[Path]) -> Index:
    """Return the index of a part of the data set. Raises ValueError if it has not all of its samples."""
    dataset = workload.dataset
    folders = [folder for folder in part_folders(name, directories) if folder.is_dir()]
    missing = [str(directory) for directory in directories if not directory.is_dir()]
    if missing:
        raise ValueError(f"directories: there is no directory {', '.join(missing)}; check the path")
    if not folders:
        raise ValueError(
            f"directories: no folder {name} in {', '.join(map(str, directories))}; "
            "make the data set with `trunkline workload generate`"
        )
    found = index(_paths(dataset, folders), **_options(dataset))
    wanted = units_of(dataset, part_of(dataset, name).files).count
    if len(found) != wanted:
        what = "row groups" if dataset.format == "parquet" else "samples"
        raise ValueError(
            f"directories: {', '.join(map(str, folders))}: {len(found)} {what}, but {workload.name} has "
            f"{wanted}; make the missing ones with `trunkline workload generate`"
        )
    if (directories[0] / NAME).exists():  # those of others have other sizes
        _check_sizes(dataset, found)
    return found


def _check_sizes(dataset: Dataset, found: Index) -> None:
    """Raise CutOff if a file has a different size than it was generated with, where that is known."""
    wanted = exact_file_bytes(dataset)
    if wanted is None:
        return
    for number in numpy.flatnonzero(found._sizes != wanted)[:1].tolist():
        check_size(dataset, Path(found.paths[number]), int(found._sizes[number]))


def _paths(dataset: Dataset, folders: Sequence[Path]) -> list[Path]:
    if dataset.format != "indexed_binary":
        return list(folders)
    return [path for folder in folders for path in sorted(folder.rglob(f"*.{dataset.format}"))]


def _options(dataset: Dataset) -> dict[str, Any]:
    """Arguments of tl.data.index()."""
    size = max(1, round(dataset.record_bytes.mean))
    if dataset.format == "indexed_binary":
        return {"format": "records", "record_bytes": size}
    if dataset.format == "parquet":
        read = [column.name for column in dataset.columns if column.is_read]
        return {"format": "parquet", "columns": read or None}
    if dataset.format == "tfrecord":
        return {"format": "tfrecord"}
    if dataset.samples_per_file == 1:
        return {"format": "files"}
    if dataset.format == "npy":
        return {"format": "records", "record_bytes": size, "header_bytes": NPY_HEADER_BYTES}
    return {"format": "npz"}
