"""Writes a state as a folder that transformers loads: shards, their index, and a configuration."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline._core import Engine
from trunkline._errors import exception_of, system_error
from trunkline._export.exported import METADATA, Exported, write_all
from trunkline._export.folder import new_folder
from trunkline._export.lazy_state import LazyState
from trunkline._export.safetensors_output import flat_tensors, safetensors_output

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
# Configurations and tokenizers; weights have other suffixes, but their indices do not.
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_NOT_COPIED = ("trainer_state.json",)


def export_folder(
    state: LazyState,
    path: str,
    *,
    max_shard_bytes: int,
    from_folder: str | None = None,
    engine: Engine | None = None,
    show_progress: bool = False,
) -> Exported:
    """Write a folder of shards, with the names that transformers gives them; it appears at the end.

    `from_folder`: a Hugging Face folder, whose configuration and tokenizer are copied, and no weights.
    """
    copied = [] if from_folder is None else files_to_copy(from_folder)
    flat = flat_tensors(state)
    shards = _shards_of(flat.tensors, max_shard_bytes)
    result = Exported(path, state.source, state.step, verified=state.is_verified, dropped=flat.dropped)
    result.tensors = len(flat.tensors)
    with new_folder(path) as folder:
        outputs = [
            (safetensors_output(state, tensors, METADATA), str(folder / name))
            for name, tensors in shards.items()
        ]
        write_all(outputs, state, force=False, engine=engine, show_progress=show_progress)
        names = list(shards)
        if len(shards) > 1:
            _write(folder / _INDEX, _index_of(shards))
            names.append(_INDEX)
        for source in copied:
            _copy(source, folder / source.name)
            names.append(source.name)
    result.files = [f"{path}/{name}" for name in names]
    result.bytes = sum(os.stat(file).st_size for file in result.files)  # noqa: PTH116
    return result


def files_to_copy(folder: str) -> list[Path]:
    """Return the configuration and tokenizer files of a Hugging Face folder.

    Raises FileNotFoundError for one without a config.json, NotADirectoryError for a file.
    """
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208
    except OSError as error:
        raise system_error(error, f"read the folder {folder}", folder) from None
    if "config.json" not in names:
        raise exception_of(
            "system",
            errno.ENOENT,
            f"{folder} has no config.json; name the Hugging Face folder that the training began with",
            folder,
        )
    return [
        Path(folder) / name
        for name in names
        if name.lower().endswith(_COPIED_SUFFIXES)
        and not name.endswith(".index.json")
        and name not in _NOT_COPIED
        and (Path(folder) / name).is_file()
    ]


def _shards_of(
    tensors: Mapping[str, "torch.Tensor"], max_shard_bytes: int
) -> dict[str, dict[str, "torch.Tensor"]]:
    """Divide tensors into shards, in their order; only a shard of one tensor may be larger than allowed."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    nbytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and nbytes + tensor.nbytes > max_shard_bytes:
            shards.append({})
            nbytes = 0
        shards[-1][name] = tensor
        nbytes += tensor.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def _index_of(shards: Mapping[str, Mapping[str, "torch.Tensor"]]) -> bytes:
    index = {
        "metadata": {
            "total_parameters": sum(each.numel() for shard in shards.values() for each in shard.values()),
            "total_size": sum(each.nbytes for shard in shards.values() for each in shard.values()),
        },
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def _copy(source: Path, target: Path) -> None:
    try:
        data = source.read_bytes()
    except OSError as error:
        raise system_error(error, f"read {source}", str(source)) from None
    _write(target, data)


def _write(path: Path, data: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise system_error(error, f"write {path}", str(path)) from None
