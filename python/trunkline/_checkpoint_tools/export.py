"""Exporting a checkpoint to files that other programs read: trunkline.export_checkpoint."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline._arguments import bool_argument, check_engine, step_argument
from trunkline._core import Engine, parse_size
from trunkline._errors import exception_of
from trunkline._formats.checkpoint_names import step_of
from trunkline._formats.node_names import is_node_directory
from trunkline._formats.suffixes import PT_SUFFIXES, SAFETENSORS_SUFFIX
from trunkline._paths import absolute_path, path_name
from trunkline._torch_or_numpy import require_torch
from trunkline._trace import span

if TYPE_CHECKING:
    from trunkline._checkpoint_tools.source import Source
    from trunkline._export.exported import Exported
    from trunkline._export.lazy_state import LazyState

_MAX_SHARD = "5GB"  # as transformers


def export_checkpoint(
    directory: "str | os.PathLike[str]",
    out: "str | os.PathLike[str]",
    *,
    step: int | None = None,
    key: str | None = None,
    force: bool = False,
    max_shard_size: "int | str | None" = None,
    from_folder: "str | os.PathLike[str] | None" = None,
    engine: Engine | None = None,
    show_progress: bool = False,
    local: bool | None = None,
) -> "Exported":
    """Write the state of a checkpoint, or the part of it below `key`, to files that other programs read.

    `directory`: one of a Checkpointer, the folder of one of its steps, or a directory of trunkline.dcp.
    `step`: None is the one that was committed last. `key`: a key of the state, such as "model", or several
    with dots between them.

    `out` ends with .safetensors: a file of tensors by name, nested ones with dots. Of tied tensors the first
    name is kept, as transformers does. With .pt, .pth, .bin or .ckpt: the state as torch.save writes it, for
    torch.load, with everything that it holds.

    Any other `out`, without a suffix, with a slash at its end, or with one of the next two arguments, is a
    folder, which must not exist or be empty: model.safetensors, or shards of at most `max_shard_size` bytes
    (None: "5GB"; a larger tensor has its own) with an index, named as transformers names them. `from_folder`:
    a Hugging Face folder whose configuration and tokenizer are copied into it, and no weights: then
    transformers.from_pretrained loads it. The names of the tensors must be those of the model.

    The tensors are not loaded: their bytes are copied through two windows of 64 MiB, so that memory is
    bounded however large the checkpoint is; only arrays of numpy, objects, and tensors in unusual layouts are
    held. Every byte is compared with its checksum, and the files have checksums of their own. The file or
    folder appears complete, durable, and at the end. An existing file raises FileExistsError unless `force`
    is True; a folder that is not empty always raises Error with ENOTEMPTY. Waits for saves of this process
    into `directory`, so that the last one counts.

    Of a Checkpointer with local=True, a step is assembled from the disks of the nodes. Then the call is
    collective, over the default process group: rank 0 writes `out`, and each rank has the state in memory
    meanwhile. What is read is neither locked nor changed. `local`: whether it is one; None: if `directory` is
    that of a node. Pass True on all ranks if some nodes have no directory.

    Raises FileNotFoundError if there is no such checkpoint; Corrupt, naming file, chunk and tensor, for
    damage; Unsupported, naming the keys, for what .safetensors files cannot hold, and without torch;
    ValueError for a key or step that does not exist, and for other suffixes. After an error nothing is left
    of `out`.
    """
    shown = path_name(out, "out")
    path = absolute_path(shown, "out")
    wanted = None if step is None else step_argument(step)
    force = bool_argument(force, "force")
    max_shard_bytes = parse_size(_MAX_SHARD if max_shard_size is None else max_shard_size, "max_shard_size")
    folder = None if from_folder is None else absolute_path(path_name(from_folder, "from_folder"))
    name = path_name(directory, "directory")
    of_nodes = is_node_directory(name) if local is None else bool_argument(local, "local")
    check_engine(engine)
    require_torch("exporting a checkpoint", "export it where torch is")
    is_folder = _is_folder(shown, path, max_shard_size is not None or folder is not None)
    target = _Target(
        path.rstrip("/") or "/" if is_folder else path,
        is_folder,
        force,
        max_shard_bytes,
        folder,
        engine,
        bool_argument(show_progress, "show_progress"),
    )
    with span("checkpoint", "export", path):
        from trunkline._checkpoint_tools.source import find_source, open_state

        if of_nodes:
            from trunkline._checkpoint_tools.node_export import export_from_nodes

            return export_from_nodes(name, wanted, key, target)
        target.check()
        source = find_source(name)
        _check_outside(path, source)
        return target.write(open_state(source, step=wanted, key=key, engine=engine))


@dataclass(frozen=True)
class _Target:
    """What is written."""

    path: str
    is_folder: bool
    force: bool
    max_shard_bytes: int
    from_folder: str | None
    engine: Engine | None
    show_progress: bool

    def check(self) -> None:
        """Raise an error if it cannot be written."""
        if not self.is_folder:
            from trunkline._export.output import check_target

            check_target(self.path, self.force)
            return
        from trunkline._export.folder import check_folder
        from trunkline._export.model_folder import files_to_copy

        check_folder(self.path)
        if self.from_folder is not None:
            files_to_copy(self.from_folder)  # before the checkpoint is read

    def write(self, state: "LazyState") -> "Exported":
        """Write a state."""
        if not self.is_folder:
            from trunkline._export.exported import export_state

            return export_state(
                state, self.path, force=self.force, engine=self.engine, show_progress=self.show_progress
            )
        from trunkline._export.model_folder import export_folder

        return export_folder(
            state,
            self.path,
            max_shard_bytes=self.max_shard_bytes,
            from_folder=self.from_folder,
            engine=self.engine,
            show_progress=self.show_progress,
        )


def _check_outside(path: str, source: "Source") -> None:
    """Raise FileExistsError for a target in the folder of a step: it could replace what is exported."""
    held = Path(source.path).resolve()
    target = Path(path).parent.resolve()
    if not target.is_relative_to(held):
        return
    names = (held.name, *target.relative_to(held).parts[:1])
    if any(step_of(name) is not None for name in names):
        raise exception_of(
            "system",
            errno.EEXIST,
            f"cannot export to {path}: it is in the folder of a checkpoint that {source.path} holds, and "
            "could replace a file of it; name a path outside of it",
            path,
        )


def _is_folder(shown: str, path: str, has_options: bool) -> bool:
    """Whether a folder is to be written. Raises ValueError for a path that says neither."""
    suffix = os.path.splitext(path)[1].lower()  # noqa: PTH122
    is_file = suffix in (*PT_SUFFIXES, SAFETENSORS_SUFFIX) and not shown.endswith("/")
    if is_file and has_options:
        raise ValueError(
            f"out: {path} is a file; max_shard_size and from_folder are for folders; name one, or omit them"
        )
    if is_file:
        return False
    if suffix and not (has_options or shown.endswith("/") or os.path.isdir(path)):  # noqa: PTH112
        known = ", ".join((SAFETENSORS_SUFFIX, *PT_SUFFIXES))
        raise ValueError(f"out: {path} must end with one of {known}, or with / for a folder")
    return True
