"""Loads models from folders of safetensors files, with an index of which tensor is in which file."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from trunkline import _core
from trunkline._core import Engine
from trunkline._errors import Format, exception_of
from trunkline._formats.checkpoint_names import DESCRIPTOR, is_manifest, is_shard
from trunkline._formats.dcp_names import is_dcp_name, is_torch_name, last_dcp_step
from trunkline._formats.file_version import Version, version_of
from trunkline._formats.loading_hints import step_reader
from trunkline._formats.safetensors.loader import (
    MAX_ATTEMPTS,
    Header,
    ReadLayouts,
    Replaced,
    Verify,
    header_of,
    load_files,
    replaced_error,
    selected_headers,
)
from trunkline._formats.selection import Selection
from trunkline._paths import names_in
from trunkline._tensor_io import transfer
from trunkline._tensor_io.memory import CPU
from trunkline._torch_or_numpy import torch
from trunkline._types import Path

_INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 100_000_000  # like the header of one file


def load_folder(
    path: Path,
    *,
    device: torch.device = CPU,
    engine: Engine | None = None,
    verify: Verify = "auto",
    mmap: bool = False,
    selection: Selection | None = None,
    read_layouts: ReadLayouts = transfer.read_layouts,
) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of a folder, read at once; with a `selection` those that it selects.

    `path` is an index (*.safetensors.index.json), or a folder with one index, or with one .safetensors file;
    if there are several, the one named "model" is loaded, and the file rather than the index. The index may
    only name files below its folder; these may be links (as in the cache of the Hugging Face Hub). Tensors
    that are in the files but not in the index are loaded too.

    The other arguments and errors are those of load(). Also raises Format for an invalid index and for a
    tensor that is in two files or not where the index says, FileNotFoundError if there is nothing to load.
    """
    merged: dict[str, torch.Tensor] = {}

    def load_all(headers: list[Header], files: "list[_core.File]", stack: ExitStack) -> None:
        headers = selected_headers(headers, selection, os.fsdecode(path))
        for tensors in load_files(
            headers, files, device=device, engine=engine, verify=verify, mmap=mmap, read_layouts=read_layouts
        ):
            merged.update(tensors)

    _with_all_open(os.fsdecode(path), engine, load_all)
    return merged


def open_folder(
    path: Path, *, engine: Engine | None = None
) -> "tuple[list[Header], list[_core.File], ExitStack]":
    """Return the headers and open files of what load_folder() would load, and what closes these."""
    opened: list[tuple[list[Header], list[_core.File], ExitStack]] = []

    def keep(headers: list[Header], files: "list[_core.File]", stack: ExitStack) -> None:
        opened.append((headers, files, stack.pop_all()))

    _with_all_open(os.fsdecode(path), engine, keep)
    return opened[0]


def folder_headers(path: Path, *, engine: Engine | None = None) -> list[Header]:
    """Return the headers of the files that load_folder() would load; raises the same errors."""
    found: list[Header] = []
    _with_all_open(os.fsdecode(path), engine, lambda headers, files, stack: found.extend(headers))
    return found


def _with_all_open(
    path: str, engine: Engine | None, read: "Callable[[list[Header], list[_core.File], ExitStack], None]"
) -> None:
    """Call `read` with the headers of all files of a folder, the open files, and what will close these.

    Another process may replace the folder, or files in it, meanwhile: read() gets a consistent set, in which
    all paths led to the open files at one moment. A folder that is written file by file is consistent only
    once it is complete.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        # If inode numbers are not stable, sizes and times must suffice.
        known = slice(None) if attempt < MAX_ATTEMPTS else slice(2)
        versions: dict[str, Version | None] = {}

        def is_unchanged(known: slice = known, versions: "dict[str, Version | None]" = versions) -> bool:
            return all(
                version is not None and (version_of(each) or ())[known] == version[known]
                for each, version in versions.items()
            )

        with ExitStack() as until_read:
            try:
                headers, files = _open_all(path, engine, until_read, versions)
            except (Format, FileNotFoundError, NotADirectoryError):
                if is_unchanged() or attempt == MAX_ATTEMPTS:
                    raise
                continue
            if is_unchanged():
                with suppress(Replaced):
                    return read(headers, files, until_read)
    raise replaced_error(path)


def _open_all(
    path: str, engine: Engine | None, stack: ExitStack, versions: "dict[str, Version | None]"
) -> "tuple[list[Header], list[_core.File]]":
    """Open the files of a folder, and record in `versions` the version of each just before."""

    def open_one(place: str) -> "tuple[Header, _core.File]":
        versions[place] = version_of(place)
        file = stack.enter_context(_core.open(place, engine=engine, direct="unless_cached"))
        return header_of(file, place, versions[place]), file

    found = _find(path)
    if not found.lower().endswith(".json"):
        header, file = open_one(found)
        return [header], [file]
    versions[found] = version_of(found)
    weight_map = _read_index(found, engine)
    folder = os.path.dirname(found)  # noqa: PTH120 - a Path would change how messages show it
    places = {file: os.path.join(folder, file) for file in dict.fromkeys(weight_map.values())}  # noqa: PTH118
    by_file = {file: open_one(place) for file, place in places.items()}
    _check_agreement(found, weight_map, {file: header for file, (header, _) in by_file.items()})
    return [header for header, _ in by_file.values()], [file for _, file in by_file.values()]


def _find(path: str) -> str:
    """Return the index, or else the one file, that the path leads to."""
    if not os.path.isdir(path):  # noqa: PTH112
        return path
    names = sorted(names_in(path))
    # Its other values are in the manifest: a dict of the shards' tensors would be mistaken for the state.
    if any(is_manifest(name) or is_shard(name) for name in names):
        raise Format(None, f"{path} is a step of a directory of checkpoints; use {step_reader(path)}", path)
    # Like transformers: the index may be a leftover of an older save.
    if "model.safetensors" in names and "model" + _INDEX_SUFFIX in names:
        return os.path.join(path, "model.safetensors")  # noqa: PTH118
    for kind, suffix in (("indices", _INDEX_SUFFIX), ("files", ".safetensors")):
        candidates = [name for name in names if name.lower().endswith(suffix)]
        if len(candidates) > 1 and "model" + suffix in candidates:
            candidates = ["model" + suffix]
        if len(candidates) > 1:
            shown = ", ".join(candidates[:4]) + (", ..." if len(candidates) > 4 else "")
            raise Format(
                None,
                f"{path} has several {kind} of safetensors, {shown}; pass the path of the one to load",
                path,
            )
        if candidates:
            return os.path.join(path, candidates[0])  # noqa: PTH118
    raise exception_of("system", errno.ENOENT, f"{path} is a directory {_hint(path, names)}", path)


def _hint(path: str, names: list[str]) -> str:
    """Return what kind of directory it is, by the names in it, and how to load it."""
    if DESCRIPTOR in names:
        return f"of checkpoints; load it with trunkline.Checkpointer({path!r}).load()"
    if any(is_torch_name(name) for name in names):
        return (
            "of torch.distributed.checkpoint; load it with dcp.load and "
            "torch.distributed.checkpoint.FileSystemReader"
        )
    if any(is_dcp_name(name) for name in names):
        return (
            "of torch.distributed.checkpoint; load it with dcp.load and "
            f"trunkline.dcp.StorageReader({path!r}), or write it to one file with "
            f"trunkline.dcp.to_torch_save({path!r}, FILE)"
        )
    step = last_dcp_step(path)
    if step is not None:
        return (
            f"of a run of trunkline.dcp; load a step with trunkline.dcp.Checkpointer({path!r}).load(state), "
            f"or write it to one file with trunkline.dcp.to_torch_save({step!r}, FILE)"
        )
    return "without safetensors files; pass the path of the file to load"


def _read_index(path: str, engine: Engine | None) -> dict[str, str]:
    with _core.open(path, engine=engine) as file:
        if file.size > _MAX_INDEX_BYTES:
            raise _bad_index(path, f"it has {file.size} bytes, more than {_MAX_INDEX_BYTES}")
        data = bytearray(file.size)
        file.pread(data)
    return parse_index(bytes(data), path)


def parse_index(data: bytes, path: str) -> dict[str, str]:
    """Return the file of each tensor by the contents of an index. Raises Format."""
    try:
        index = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _bad_index(path, str(error)) from None
    weight_map = index.get("weight_map") if type(index) is dict else None
    if type(weight_map) is not dict:
        raise _bad_index(path, 'it is not an object with a "weight_map" that is an object')
    for name, file_name in weight_map.items():
        why = _objection_to_name(file_name)
        if why is not None:
            raise _bad_index(path, f"the file {file_name!r} of the tensor {name!r} {why}")
    return weight_map


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is duplicated")
    return made


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _objection_to_name(name: Any) -> str | None:
    """Return why an index may not name such a file; None if it may."""
    if type(name) is not str:
        return "is not a string"
    if "\0" in name or "\\" in name:
        return "contains a character that is not allowed in an index"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "is not a path below the index"
    return None


def _check_agreement(path: str, weight_map: dict[str, str], by_file: dict[str, Header]) -> None:
    """Raise Format unless each tensor is in exactly one file, the one that the index names."""
    places: dict[str, str] = {}
    for file, header in by_file.items():
        for stored in header.tensors:
            first = places.setdefault(stored.name, file)
            if first != file:
                raise _bad_index(path, f"the tensor {stored.name!r} is in {first!r} and in {file!r}")
    for name, file in weight_map.items():
        if places.get(name) != file:
            raise _bad_index(path, f"the tensor {name!r} is not in {file!r}")


def _bad_index(path: str, why: str) -> Format:
    return Format(None, f"{path} is not a valid index of safetensors files: {why}", path)
