"""Importing files of other programs as a step of a directory of checkpoints: trunkline checkpoint import."""

import os
from dataclasses import asdict, dataclass
from typing import Any

from trunkline._arguments import bool_argument, check_engine, step_argument
from trunkline._checkpoint_tools.source import find_source
from trunkline._core import Engine
from trunkline._errors import Error, Unsupported, reword
from trunkline._formats.dcp_names import is_dcp_directory
from trunkline._paths import path_name
from trunkline._trace import span
from trunkline.checkpoint.directory.checkpointer import Checkpointer
from trunkline.checkpoint.load import load


@dataclass
class Imported:
    """What import_checkpoint() has saved: `source`, and the step of `directory` that holds it."""

    directory: str
    step: int
    source: str
    bytes: int

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def import_checkpoint(
    source: "str | os.PathLike[str]",
    directory: "str | os.PathLike[str]",
    *,
    step: int,
    key: str | None = None,
    allow_pickle: bool = False,
    engine: Engine | None = None,
) -> Imported:
    """Save what other programs wrote as the checkpoint of `step` in a directory of checkpoints.

    `source`: a .safetensors file, a Hugging Face folder of them, a file of torch.save, or a directory of
    torch.distributed.checkpoint (of trunkline.dcp, or of torch's FileSystemWriter). `directory`: one of a
    Checkpointer, or a new one; its other steps stay. `key`: put it below this key of the state, such as
    "model". `allow_pickle`: required for directories of torch's FileSystemWriter, whose reader runs the
    pickles in them: only for sources that you trust.

    Waits for saves of this process to `source`. The state is held in memory meanwhile. Checksums that the
    source has are verified. Raises FileExistsError for a step that exists, or if there are later ones;
    Unsupported for other sources; the errors of load().
    """
    number = step_argument(step)
    allow_pickle = bool_argument(allow_pickle, "allow_pickle")
    check_engine(engine)
    name, target = path_name(source, "source"), path_name(directory, "directory")
    if is_dcp_directory(target):
        raise Unsupported(
            None, f"{target} belongs to trunkline.dcp; import into a separate directory", target
        )
    with span("checkpoint", "import", name):
        checkpoints = Checkpointer(target, keep=None, process_group=False, engine=engine)
        state = _read(name, allow_pickle, engine)
        _save(checkpoints, target, number, state if key is None else {key: state})
    manifest = checkpoints._context.store.read_manifest(number)
    nbytes = sum(shard["bytes"] for shard in manifest["shards"])
    return Imported(target, number, name, nbytes)


def _save(checkpoints: Checkpointer, target: str, step: int, state: Any) -> None:
    try:
        checkpoints.save(step, state, block=True)
    except FileExistsError as error:
        steps = checkpoints.steps()
        if not isinstance(error, Error) or not steps or step > steps[-1]:
            raise
        reword(
            error,
            f"cannot import step {step} into {target}: it has steps up to {steps[-1]}; pass a higher "
            "number, or another directory",
        )
        raise


def _read(path: str, allow_pickle: bool, engine: Engine | None) -> Any:
    source = find_source(path)
    if source.kind in ("safetensors", "folder", "file"):
        return load(path, engine=engine)
    if source.kind == "dcp":
        return _read_dcp(path)
    if source.kind == "dcp-torch":
        return _read_torch_dcp(path, allow_pickle)
    hint = ""
    if source.kind in ("run", "step"):
        hint = ": it is one of a Checkpointer already; copy the step, or export it"
    elif source.kind == "dcp-run":
        hint = ": it holds the steps of a run; name one of them"
    raise Unsupported(None, f"{path} cannot be imported{hint}", path)


def _read_dcp(path: str) -> Any:
    from trunkline.dcp import StorageReader
    from trunkline.dcp.stored_state import open_dcp

    open_dcp(path)  # rejects objects that weights_only does not allow, before torch unpickles them
    return _load_all(StorageReader(path))


def _read_torch_dcp(path: str, allow_pickle: bool) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not allow_pickle:
        raise Unsupported(
            None,
            f"{path} was written by torch's FileSystemWriter: reading it runs the pickles in it. Pass "
            "allow_pickle=True if you trust where it comes from",
            path,
        )
    return _load_all(FileSystemReader(path))


def _load_all(reader: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    planner: Any = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state
