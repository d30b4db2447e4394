"""Exporting a checkpoint to files that other programs read: trunkline.export_checkpoint."""

import os

from trunkline._arguments import bool_argument, check_engine, step_argument
from trunkline._checkpoint_tools.source import find_source, open_state
from trunkline._core import Engine
from trunkline._export.exported import SAFETENSORS_SUFFIX, Exported, export_state
from trunkline._export.output import check_target
from trunkline._formats.suffixes import PT_SUFFIXES
from trunkline._paths import absolute_path, path_name
from trunkline._trace import span


def export_checkpoint(
    directory: "str | os.PathLike[str]",
    out: "str | os.PathLike[str]",
    *,
    step: int | None = None,
    key: str | None = None,
    force: bool = False,
    engine: Engine | None = None,
    show_progress: bool = False,
) -> Exported:
    """Write the state of a checkpoint, or the part of it below `key`, to a file that other programs read.

    `directory`: one of a Checkpointer, the folder of one of its steps, or a directory of trunkline.dcp.
    `step`: None is the one that was committed last. `key`: a key of the state, such as "model", or several
    with dots between them.

    `out` ends with .safetensors: a file of tensors by name, nested ones with dots. Of tied tensors the first
    name is kept, as transformers does. With .pt, .pth, .bin or .ckpt: the state as torch.save writes it, for
    torch.load, with everything that it holds.

    The tensors are not loaded: their bytes are copied through two windows of 64 MiB, so that memory is
    bounded however large the checkpoint is; only arrays of numpy, objects, and tensors in unusual layouts are
    held. Every byte is compared with its checksum, and the file has checksums of its own. It appears
    complete, durable, and at the end. An existing `out` raises FileExistsError unless `force` is True.

    Raises FileNotFoundError if there is no such checkpoint; Corrupt, naming file, chunk and tensor, for
    damage; Unsupported, naming the keys, for what .safetensors files cannot hold; ValueError for a key or
    step that does not exist, and for other suffixes. After an error nothing is left of `out`.
    """
    path = absolute_path(path_name(out, "out"), "out")
    wanted = None if step is None else step_argument(step)
    force = bool_argument(force, "force")
    check_engine(engine)
    suffix = os.path.splitext(path)[1].lower()  # noqa: PTH122
    if suffix not in (*PT_SUFFIXES, SAFETENSORS_SUFFIX):
        known = ", ".join((SAFETENSORS_SUFFIX, *PT_SUFFIXES))
        raise ValueError(f"out: {path} must end with one of {known}")
    check_target(path, force)
    with span("checkpoint", "export", path):
        source = find_source(path_name(directory, "directory"))
        state = open_state(source, step=wanted, key=key, engine=engine)
        return export_state(state, path, force=force, engine=engine, show_progress=show_progress)
