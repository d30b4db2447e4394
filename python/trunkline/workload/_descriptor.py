"""The file `trunkline-workload.json` in each directory of a generated data set: what belongs there."""

import dataclasses
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trunkline._errors import Error, exception_of, system_error
from trunkline.workload._data_files import PARTS
from trunkline.workload._spec import Dataset, Workload

NAME = "trunkline-workload.json"
_VERSION = 1


def descriptor_of(workload: Workload, directory: int, directories: int) -> dict[str, Any]:
    """Return what decides the files in one of the directories."""
    return {
        "version": _VERSION,
        "workload": workload.name,
        "seed": workload.seed,
        "directory": directory,
        "directories": directories,
        "dataset": _plain(workload.dataset),
    }


def missing_descriptors(workload: Workload, directories: Sequence[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the directories that have no descriptor yet, and what write_descriptor() is to write there.

    Raises FileExistsError if a directory has another data set or other files.
    """
    missing = []
    for number, directory in enumerate(directories):
        wanted = descriptor_of(workload, number, len(directories))
        present = read_descriptor(directory)
        if present is None:
            _check_vacant(directory)
            missing.append((directory, wanted))
        elif present != wanted:
            raise exception_of(
                "system",
                errno.EEXIST,
                f"{directory} has a different data set ({_difference(present, wanted)}); choose a different "
                "directory, or remove this one",
                str(directory),
            )
    return missing


def read_descriptor(directory: Path) -> dict[str, Any] | None:
    """Return the descriptor in a directory, None if there is none. Raises Error if it is not valid."""
    path = directory / NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise system_error(error, f"read {path}", str(path)) from None
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise Error(errno.EINVAL, f"{path} is not a descriptor of version {_VERSION}; remove the data set")
    return document


def generated_files(directories: Sequence[Path], dataset: Dataset) -> tuple[int, int] | None:
    """Return how many files to train on and to evaluate with were generated, None if they were not.

    Raises ValueError if what was generated is not this data set at another number of files.
    """
    found = [read_descriptor(directory) for directory in directories]
    if all(each is None for each in found):
        return None
    wanted = _plain(dataset)
    for number, (directory, each) in enumerate(zip(directories, found, strict=True)):
        if each is None:
            raise ValueError(f"directories: {directory} has no {NAME}, but {directories[0]} has one")
        expected = (number, len(directories))
        if (each["directory"], each["directories"]) != expected:
            raise ValueError(
                f"directories: {directory} was generated as directory {each['directory'] + 1} of "
                f"{each['directories']}; pass exactly these {each['directories']}, in their order"
            )
        differing = [key for key in wanted if key not in PARTS and wanted[key] != each["dataset"].get(key)]
        if differing:
            raise ValueError(
                f"directories: {directory} was generated with a different {', '.join(differing)}"
            )
    first = found[0]
    assert first is not None
    return first["dataset"]["train"]["files"], first["dataset"]["valid"]["files"]


def _plain(dataset: Dataset) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(dataset)))
    for column in plain["columns"]:
        del column["is_read"]  # all are stored
    return plain


def _difference(present: dict[str, Any], wanted: dict[str, Any]) -> str:
    for key, value in wanted.items():
        if key != "dataset" and present.get(key) != value:
            return f"{key} {present.get(key)!r}, not {value!r}"
    there = present["dataset"] if isinstance(present.get("dataset"), dict) else {}
    return "; ".join(
        _dataset_difference(key, there.get(key), value)
        for key, value in wanted["dataset"].items()
        if there.get(key) != value
    )


def _dataset_difference(key: str, there: Any, wanted: Any) -> str:
    if key in PARTS and isinstance(there, dict) and there.get("files") != wanted["files"]:
        what = "training" if key == "train" else "evaluation"
        return f"{there.get('files')} {what} files there, {wanted['files']} requested"
    return f"{key} is {_shown(there)} there, {_shown(wanted)} requested"


def _shown(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"mean", "stdev"}:
        return f"{value['mean']:g}" + (f" +- {value['stdev']:g}" if value["stdev"] else "")
    return str(value)[:80]


def _check_vacant(directory: Path) -> None:
    for part in PARTS:
        folder = directory / part
        if folder.exists() and not folder.is_dir():
            raise exception_of(
                "system",
                errno.ENOTDIR,
                f"{folder} is not a directory; choose a different directory for the data set",
                str(folder),
            )
        if folder.exists() and any(folder.iterdir()):
            raise exception_of(
                "system",
                errno.EEXIST,
                f"{folder} has files that were not generated here; choose a different directory",
                str(folder),
            )


def write_descriptor(directory: Path, document: dict[str, Any]) -> None:
    """Write the descriptor of a directory durably."""
    temporary = directory / f".{NAME}.partial"
    temporary.unlink(missing_ok=True)  # of a run that was ended; a link that is here must not be followed
    with temporary.open("x", encoding="utf-8") as out:
        json.dump(document, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(directory / NAME)
