"""Exporting a checkpoint to files that other programs read: trunkline.export_checkpoint."""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline._arguments import bool_argument, check_engine, step_argument
from trunkline._core import Engine, parse_size
from trunkline._errors import exception_of
from trunkline._formats.checkpoint_names import step_of
from trunkline._formats.suffixes import PT_SUFFIXES, SAFETENSORS_SUFFIX
from trunkline._paths import absolute_path, path_name
from trunkline._torch_or_numpy import require_torch
from trunkline._trace import span

if TYPE_CHECKING:
    from trunkline._checkpoint_tools.source import Source
    from trunkline._export.exported import Exported

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
    check_engine(engine)
    require_torch("exporting a checkpoint", "export it where torch is")
    is_folder = _is_folder(shown, path, max_shard_size is not None or folder is not None)
    with span("checkpoint", "export", path):
        if is_folder:
            return _to_folder(directory, path, wanted, key, max_shard_bytes, folder, engine, show_progress)
        from trunkline._checkpoint_tools.source import find_source, open_state
        from trunkline._export.exported import export_state
        from trunkline._export.output import check_target

        check_target(path, force)
        source = find_source(path_name(directory, "directory"))
        _check_outside(path, source)
        state = open_state(source, step=wanted, key=key, engine=engine)
        return export_state(state, path, force=force, engine=engine, show_progress=show_progress)


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


def _to_folder(
    directory: "str | os.PathLike[str]",
    path: str,
    step: int | None,
    key: str | None,
    max_shard_bytes: int,
    from_folder: str | None,
    engine: Engine | None,
    show_progress: bool,
) -> "Exported":
    from trunkline._checkpoint_tools.source import find_source, open_state
    from trunkline._export.folder import check_folder
    from trunkline._export.model_folder import export_folder, files_to_copy

    path = path.rstrip("/") or "/"
    check_folder(path)
    if from_folder is not None:
        files_to_copy(from_folder)  # before the checkpoint is read
    source = find_source(path_name(directory, "directory"))
    _check_outside(path, source)
    state = open_state(source, step=step, key=key, engine=engine)
    return export_folder(
        state,
        path,
        max_shard_bytes=max_shard_bytes,
        from_folder=from_folder,
        engine=engine,
        show_progress=show_progress,
    )
