"""Writing a checkpoint of trunkline.dcp to one file of torch.save: trunkline.dcp.to_torch_save."""

import os

from trunkline._arguments import bool_argument, check_engine
from trunkline._core import Engine
from trunkline._export.exported import export_state
from trunkline._export.output import check_target
from trunkline._paths import absolute_path, path_name
from trunkline._trace import span
from trunkline.dcp.stored_state import open_dcp


def to_torch_save(
    directory: "str | os.PathLike[str]",
    path: "str | os.PathLike[str]",
    *,
    key: str | None = None,
    force: bool = False,
    engine: Engine | None = None,
) -> None:
    """Write a checkpoint of StorageWriter to one file, as dcp_to_torch_save of torch does for its own format.

    `directory`: that of the checkpoint, saved on any number of ranks. torch.load reads the file: whole
    tensors, and the nested state as it was saved. `key`: only what is below this key, such as "model". An
    existing file raises FileExistsError unless `force` is True.

    Runs in one process, which needs no process group, and copies the bytes of the tensors through two windows
    of 64 MiB, whatever their size. Every byte is compared with its checksum. The file appears complete,
    durable, and at the end.

    Raises FileNotFoundError if there is no checkpoint; Corrupt, naming file, chunk and tensor, for damage;
    Unsupported for objects of types that torch.load(weights_only=True) does not allow; ValueError for a key
    that does not exist. Thread-safe.
    """
    name = absolute_path(path_name(path))
    force = bool_argument(force, "force")
    check_engine(engine)
    check_target(name, force)
    with span("checkpoint", "dcp.to_torch_save", name):
        export_state(open_dcp(path_name(directory, "directory"), key), name, force=force, engine=engine)
