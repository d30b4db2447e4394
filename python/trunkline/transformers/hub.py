"""Finds a model as transformers does: in a local folder or, by its name, in the Hugging Face cache."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from trunkline._errors import Error, exception_of, reword
from trunkline._paths import absolute_path, path_name
from trunkline._types import Path


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model: `name` is how the user calls it, such as "org/name" or a path.

    `identity`: the same wherever and whenever this model is found again. `download`: the call that downloads
    it; "" for a local folder.
    """

    path: FilePath
    name: str
    identity: str
    download: str = ""


def find_model(
    model_dir: Path,
    *,
    revision: str | None = None,
    cache_dir: "Path | None" = None,
    subfolder: str = "",
    needed: str = "",
) -> ModelFolder:
    """Return the folder of a model: a local one, or a snapshot in the Hugging Face cache.

    `revision`: a branch, tag or commit (None: "main"). `cache_dir`: None is that of the environment (HF_HOME,
    HF_HUB_CACHE). `subfolder`: of the model's folder. Nothing is downloaded: FileNotFoundError for a name
    that is not in the cache, with the call that downloads it, or only the file `needed` of it.
    """
    name = path_name(model_dir, "model_dir")
    for argument, value in (("revision", revision), ("subfolder", subfolder)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{argument}: must be a str, not {type(value).__name__}")
    if os.path.lexists(name) or not _is_name_of_hub(name):
        folder = FilePath(name)
        if folder.is_dir():  # absolute: it is read again while the model is used
            folder = FilePath(absolute_path(name, "model_dir"))
        folder = folder / (subfolder or "")
        return ModelFolder(folder, str(folder), os.path.realpath(folder))
    call = _download_call(name, revision, cache_dir, needed)
    snapshot = _snapshot(name, revision, cache_dir, call)
    # The last parts of a snapshot's path are the commit's; the cache itself may move.
    identity = f"{name}@{snapshot.name}"
    return ModelFolder(snapshot / (subfolder or ""), name, f"{identity}/{subfolder or ''}", call)


def add_download(error: Exception, model: ModelFolder) -> None:
    """Let the error about a missing file of a model in the cache say how to download it."""
    if model.download and isinstance(error, Error):
        reword(error, f"{error}: {model.download}")


def _is_name_of_hub(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _snapshot(name: str, revision: str | None, cache_dir: Any, call: str) -> FilePath:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    cache = constants.HF_HUB_CACHE if cache_dir is None else path_name(cache_dir, "cache_dir")
    try:
        return FilePath(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except IncompleteSnapshotError as error:
        # Files that streaming does not need may be missing; those that it needs are looked for later.
        return FilePath(error.snapshot_path)
    except LocalEntryNotFoundError as error:
        at = "" if revision is None else f" at revision {revision}"
        raise exception_of(
            "system",
            errno.ENOENT,
            f"cannot load a model from {name}: no such folder, and the Hugging Face cache ({cache}) does not "
            f"have a model of that name{at}; {_advice(name, call)}",
            name,
        ) from error


def _advice(name: str, call: str) -> str:
    if "/" in name:
        return f"Trunkline downloads nothing, so download it first: {call}"
    return f"check the path; a model of the Hub has to be downloaded first: {call}"


def _download_call(name: str, revision: str | None, cache_dir: Any, needed: str) -> str:
    arguments = [f'"{name}"']
    if needed:
        arguments.append(f'allow_patterns="{needed}"')
    if revision is not None:
        arguments.append(f'revision="{revision}"')
    if cache_dir is not None:
        arguments.append(f'cache_dir="{path_name(cache_dir, "cache_dir")}"')
    return f"huggingface_hub.snapshot_download({', '.join(arguments)})"
