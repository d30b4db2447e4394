"""What a path leads to, and its state with the tensors still in the files."""

import errno
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trunkline._core import CheckpointStore, Engine
from trunkline._errors import Unsupported, exception_of
from trunkline._export.lazy_state import LazyState
from trunkline._formats.checkpoint_names import DESCRIPTOR, is_manifest, step_of
from trunkline._formats.dcp_names import MANIFEST, is_rank_manifest_name, is_torch_name
from trunkline._paths import names_in
from trunkline.checkpoint.directory.running_saves import await_saves_at, directories_of
from trunkline.checkpoint.directory.stored_step import open_step
from trunkline.checkpoint.load import awaited_path
from trunkline.checkpoint.save_order import await_saves_of

Kind = Literal["run", "step", "dcp", "dcp-run", "dcp-torch", "safetensors", "folder", "file", "unknown"]


@dataclass(frozen=True)
class Source:
    """A path and what is there: `kind` "run" is a directory of checkpoints, "step" the folder of one step."""

    path: str
    kind: Kind


def find_source(path: "str | os.PathLike[str]") -> Source:
    """Return what a path leads to, by the names of files. Raises FileNotFoundError.

    Waits for saves of this process to it, as load() does.
    """
    name = os.fsdecode(path)
    _await_saves(name)
    try:
        names = names_in(name)
    except NotADirectoryError:
        return Source(name, "safetensors" if name.lower().endswith(".safetensors") else "file")
    except FileNotFoundError:
        raise exception_of(
            "system", errno.ENOENT, f"{name} does not exist (is the path mistyped?)", name
        ) from None
    return Source(name, _kind_of(name, names))


def _await_saves(path: str) -> None:
    await_saves_of(awaited_path(path))
    await_saves_at(path)
    of_dcp = sys.modules.get("trunkline.dcp.running_saves")  # it needs torch
    if of_dcp is not None:
        for directory in directories_of(path):
            of_dcp.await_saves_into(directory)


def _kind_of(path: str, names: list[str]) -> Kind:
    if MANIFEST in names or any(map(is_rank_manifest_name, names)):
        return "dcp"
    if DESCRIPTOR in names:
        return "run"
    if step_of(os.path.basename(os.path.abspath(path))) is not None and any(map(is_manifest, names)):  # noqa: PTH119, PTH100
        return "step"
    if any(map(is_torch_name, names)):
        return "dcp-torch"
    steps = [each for each in names if step_of(each) is not None]
    if any((Path(path) / each / MANIFEST).exists() for each in steps):
        return "dcp-run"
    if steps:
        return "run"
    if any(each.lower().endswith((".safetensors", ".safetensors.index.json")) for each in names):
        return "folder"
    return "unknown"


def open_state(
    source: Source, *, step: int | None = None, key: str | None = None, engine: Engine | None = None
) -> LazyState:
    """Return the state that a directory of checkpoints, a step or a directory of DCP holds, or a part of it.

    Raises ValueError for a step of what has none, Unsupported for other files.
    """
    if source.kind in ("dcp", "dcp-run"):
        from trunkline.dcp.stored_state import open_dcp

        if source.kind == "dcp":
            _reject_step(source, step)
            return open_dcp(source.path, key)
        from trunkline.dcp.run_directory import step_directory

        state = open_dcp(step_directory(source.path, step), key)
        state.step = step_of(Path(state.source).name)
        return state
    if source.kind == "run":
        return open_step(CheckpointStore(source.path, create=False), step, key, engine=engine)
    if source.kind == "step":
        _reject_step(source, step)
        path = Path(source.path).absolute()
        return open_step(CheckpointStore(path.parent, create=False), step_of(path.name), key, engine=engine)
    hint = "; name a directory of checkpoints, one of its steps, or a directory of trunkline.dcp"
    if source.kind == "dcp-torch":
        hint = (
            ": torch's FileSystemWriter wrote it; import it first (trunkline checkpoint import), or use "
            "dcp_to_torch_save of torch.distributed.checkpoint.format_utils"
        )
    raise Unsupported(None, f"{source.path} is not a checkpoint that can be exported{hint}", source.path)


def _reject_step(source: Source, step: int | None) -> None:
    if step is not None:
        raise ValueError(f"step: {source.path} holds a single checkpoint; leave out the step")
