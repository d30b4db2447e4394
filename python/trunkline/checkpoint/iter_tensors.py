"""Reading the tensors of safetensors files one after the other: trunkline.iter_tensors."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from trunkline import _core
from trunkline._arguments import check_engine
from trunkline._core import Engine, parse_size
from trunkline._errors import Unsupported
from trunkline._formats.file_version import version_of
from trunkline._formats.safetensors import Header, header_of
from trunkline._formats.safetensors.folder import open_folder
from trunkline._formats.safetensors.loader import selected_headers
from trunkline._formats.safetensors.read_ahead import OpenFiles, ReadOptions, tensors_in_order
from trunkline._formats.selection import Selection
from trunkline._paths import path_name
from trunkline._tensor_io.memory import Device, device_argument
from trunkline._torch_or_numpy import require_torch
from trunkline._types import Path
from trunkline.checkpoint.load import Verify, awaited_path, kind_of_file
from trunkline.checkpoint.save_order import await_saves_of

if TYPE_CHECKING:
    import torch.distributed

    from trunkline.checkpoint.reading_ranks import ReadingRanks

_MEMORY_BYTES = 1 << 30


def iter_tensors(
    path: "Path | Iterable[Path]",
    *,
    keys: str | Iterable[str] | Callable[[str], bool] | None = None,
    device: Device = "cpu",
    verify: Verify = "auto",
    memory_bytes: "int | str" = _MEMORY_BYTES,
    engine: Engine | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Iterate over (name, tensor) of .safetensors files, which are read at the device's speed meanwhile.

        for name, tensor in iter_tensors("model_folder"):
            parameters[name].copy_(tensor)

    For models that are filled tensor by tensor, such as those of inference servers: unlike load() it never
    holds all tensors at once. `path`: a .safetensors file; a folder of them, or its index, as for load(); or
    a list of files. The order is that of the files, and of the tensors' bytes in them.

    At most `memory_bytes` are read ahead of their use, but always one tensor; tensors that the caller keeps
    are no longer counted. `keys`, `device`, `verify`, `engine`: as for load(). Each tensor has memory of its
    own.

    `group`: all ranks of this process group call iter_tensors() for the same files, and each reads only an
    equal share of the bytes; the others get it through memory that ranks of one machine share, and over the
    group from other machines. A rank that ends its loop early makes the others raise RankError.

    Raises the errors of load(): those of headers and arguments at once, others where the tensor would come.
    Ending the loop early, or dropping the iterator, cancels what is being read. One thread at a time may use
    an iterator.
    """
    require_torch("iter_tensors", "use trunkline.open_tensors")
    paths = [path] if isinstance(path, str | bytes | os.PathLike) else list(path)
    names = [path_name(each) for each in paths]
    if not names:
        raise ValueError("path: the list is empty; pass at least one file")
    if verify not in ("auto", True, False):
        raise ValueError(f'verify: must be "auto", True or False, not {verify!r}')
    check_engine(engine)
    options = ReadOptions(device_argument(device, names[0]), engine, verify)
    memory = parse_size(memory_bytes, "memory_bytes")
    selection = None if keys is None else Selection(keys)
    if group is not None:
        from trunkline.checkpoint.reading_ranks import ReadingRanks

        return read_together(ReadingRanks(group), names, selection, options, memory)
    opened = _opened(names, engine, selection)
    return tensors_in_order(opened, memory, options)


def _opened(names: list[str], engine: Engine | None, selection: Selection | None) -> OpenFiles:
    """Open the files, and read their headers."""
    with ExitStack() as stack:
        headers, files = _open_all(names, engine, stack)
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        return OpenFiles(selected_headers(headers, selection, shown), files, stack.pop_all())
    raise AssertionError  # for type checkers: no error is suppressed


def read_together(
    ranks: "ReadingRanks",
    names: list[str],
    selection: Selection | None,
    options: ReadOptions,
    memory_bytes: int = _MEMORY_BYTES,
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Open the files on all ranks, and return the iterator. If one fails, all raise an error."""
    from trunkline.checkpoint.group_reading import tensors_of_group

    opened, error = None, None
    try:
        opened = _opened(names, options.engine, selection)
    except Exception as failed:
        error = failed
    try:
        what = None if opened is None else (opened.digest(), memory_bytes, options.verify)
        versions = [] if opened is None else opened.unchecked_versions()
        ranks.agree(what, versions, error, names[0])
        assert opened is not None
    except BaseException:
        ranks.close()
        if opened is not None:
            opened.until_read.close()
        raise
    return tensors_of_group(ranks, opened, memory_bytes, options)


def _open_all(
    names: list[str], engine: Engine | None, stack: ExitStack
) -> tuple[list[Header], list[_core.File]]:
    headers: list[Header] = []
    files: list[_core.File] = []
    for name in names:
        await_saves_of(awaited_path(name))
        kind = kind_of_file(name, engine)
        if kind == "folder":
            of_folder, opened, until_closed = open_folder(name, engine=engine)
            stack.push(until_closed)
            headers += of_folder
            files += opened
        elif kind == "safetensors":
            version = version_of(name)
            file = stack.enter_context(_core.open(name, engine=engine, direct="unless_cached"))
            headers.append(header_of(file, name, version))
            files.append(file)
        else:
            raise Unsupported(
                None,
                f"{name}: iter_tensors reads .safetensors files; use trunkline.load for a .pt file",
                name,
            )
    return headers, files
