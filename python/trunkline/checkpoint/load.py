"""Loading one file, or a folder of shards: trunkline.load."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from trunkline._core import Engine
from trunkline._formats.suffixes import PT_SUFFIXES
from trunkline._modes import makes_ordinary_tensors
from trunkline._paths import path_name
from trunkline._trace import span
from trunkline._types import Path

if TYPE_CHECKING:
    import torch
    import torch.distributed

    from trunkline._formats.selection import Selection
    from trunkline._tensor_io.arrays import Array, Framework
    from trunkline._tensor_io.map_location import DeviceOf, MapLocation

Verify = Literal["auto"] | bool


class _Options(NamedTuple):
    """The arguments of load(), checked."""

    locate: "DeviceOf"
    engine: Engine | None
    verify: Verify
    mmap: bool
    selection: "Selection | None"
    framework: "Framework | None"
    group: "torch.distributed.ProcessGroup | None"


@overload
def load(
    path: Path,
    *,
    device: "str | int | torch.device" = "cpu",
    verify: Verify = "auto",
    mmap: bool = False,
    engine: Engine | None = None,
    map_location: "MapLocation | None" = None,
    weights_only: Literal[True] | None = True,
    keys: "str | Iterable[str] | Callable[[str], bool] | None" = None,
    dtype: "torch.dtype | str | None" = None,
    framework: Literal["numpy", "np"],
    group: "torch.distributed.ProcessGroup | None" = None,
) -> "dict[str, Array]": ...


@overload
def load(
    path: Path,
    *,
    device: "str | int | torch.device" = "cpu",
    verify: Verify = "auto",
    mmap: bool = False,
    engine: Engine | None = None,
    map_location: "MapLocation | None" = None,
    weights_only: Literal[True] | None = True,
    keys: "str | Iterable[str] | Callable[[str], bool] | None" = None,
    dtype: "torch.dtype | str | None" = None,
    framework: Literal["torch", "pt"] | None = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> Any: ...


@makes_ordinary_tensors
def load(
    path: Path,
    *,
    device: "str | int | torch.device" = "cpu",
    verify: Verify = "auto",
    mmap: bool = False,
    engine: Engine | None = None,
    map_location: "MapLocation | None" = None,
    weights_only: Literal[True] | None = True,
    keys: "str | Iterable[str] | Callable[[str], bool] | None" = None,
    dtype: "torch.dtype | str | None" = None,
    framework: "Framework | None" = None,
    group: "torch.distributed.ProcessGroup | None" = None,
) -> Any:
    """Read what torch.save, safetensors or save() wrote: the object of a .pt file, or a dict of tensors.

    `path`: a .safetensors file; a Hugging Face folder of such files (or its *.safetensors.index.json), whose
    shards are merged; otherwise a zip file of torch >= 1.6, or a safetensors file, whatever its suffix.
    Pickles run no code: only types that torch.load(weights_only=True) allows are loaded
    (torch.serialization.add_safe_globals adds to them).

    Tensors own their memory, page-aligned if they are large, and are ordinary tensors even when they are
    loaded under torch.inference_mode(). `verify`: "auto" verifies the checksums that the file has, True
    rejects a file without checksums, False verifies none. `mmap`: tensors are views of the mapped file, read
    when they are first touched and not verified. Truncating that file in place, or losing its device, kills
    the process (SIGBUS) when such a tensor is touched; save() replaces files and is safe. `device`: "cpu", or
    a CUDA GPU ("cuda", "cuda:1"), whose tensors are read into their final memory, ordered after its current
    stream. A file that is in the page cache is read from there; any other is read past it.

    `keys`: load, and read, only these. A name selects what is called that and everything below it: "model"
    selects "model.0.weight", the tensor at ["model"]["0.weight"] of a .pt file; or a list of names; or a
    function, which is called with the name of each tensor (of a .pt file also of each other value). The
    result is nested as the file is, without what is not selected; lists and tuples keep their length, with
    None in place of the rest. ValueError for a name that is not in the file. Checksums cover pieces of 1 MiB
    in .safetensors files, which are read whole, and whole storages in .pt files; with verify=False only the
    tensors' own bytes are read, and gaps between them of up to 64 KiB. A .pt file whose pickle does more than
    build tensors is read whole. open_tensors() reads tensors one by one, and slices of them.

    `framework`: what .safetensors files are loaded as: "torch" ("pt"), "numpy" ("np"), or None: as tensors of
    torch, or where that is not installed as arrays of numpy. Arrays are in main memory; dtypes that numpy
    lacks, such as BF16, are those of the package ml_dtypes, if it is installed. .pt files need torch.

    `dtype`: floating-point tensors are converted to it once all are read ("bfloat16", torch.float16); those
    of 8 bits and fewer stay as they are.

    Waits for a save_async() of this process to `path` that is still running, so that this returns what it
    saved; if that save failed, the next save raises its error.

    `map_location`: where tensors go, in place of `device`, as torch.load takes it: a device; a dict of
    devices by the device that a tensor was saved from; or a function of a storage and that device, which
    returns the storage, moved, or None to leave the device. The function gets an empty storage: only the
    device of its result counts. Without it all tensors go to `device`; that they were saved from a GPU does
    not matter. `weights_only`: can only be True (ValueError), since loading runs no code of the file.

    `group`: all ranks of this process group load the same files, and each reads only an equal share of the
    bytes; the others get it through memory that ranks of one machine share, and over the group from other
    machines. If one rank fails, the others raise RankError. Every rank reads the pickle of a .pt file, and
    all of a file whose pickle does more than build tensors.

    Raises Corrupt, which names file, tensor and chunk, if bytes contradict their checksum or the file is
    truncated; Format for a file in none of these formats; Unsupported for types that weights_only forbids,
    dtypes that the framework lacks, and .pt files without torch; TypeError for an open file: only files with
    a name are read. Thread-safe.
    """
    if weights_only not in (None, True):
        raise ValueError(
            f"weights_only: must be True, not {weights_only!r}: trunkline.load runs no code of the file. "
            "For a file that you trust use torch.load(path, weights_only=False); to allow single types, "
            "torch.serialization.add_safe_globals"
        )
    if hasattr(path, "read"):
        raise TypeError(
            f"path: must be the path of a file, not an open file ({type(path).__name__}): pass its "
            "name, or use torch.load for files that have none"
        )
    name = path_name(path)
    if verify not in ("auto", True, False):
        raise ValueError(f'verify: must be "auto", True or False, not {verify!r}')
    from trunkline._arguments import bool_argument, check_engine
    from trunkline._formats.selection import Selection
    from trunkline._tensor_io.arrays import arrays_of, wants_arrays
    from trunkline._tensor_io.conversion import converted, dtype_argument
    from trunkline._torch_or_numpy import require_torch

    mmap = bool_argument(mmap, "mmap")
    check_engine(engine)
    as_arrays = wants_arrays(framework)
    if dtype is not None:
        require_torch("dtype=", "convert the arrays (array.astype)")
    wanted = dtype_argument(dtype)
    selection = None if keys is None else Selection(keys)
    locate = _devices_of(device, map_location, name)
    if framework is not None and as_arrays and locate("cpu").type != "cpu":
        raise ValueError(f"framework: arrays of numpy are in main memory, not on {locate('cpu')}")
    options = _Options(locate, engine, verify, mmap, selection, framework, group)
    with span("checkpoint", "load", name):
        loaded = _load(name, options)
        if wanted is not None:
            loaded = converted(loaded, wanted)
        return arrays_of(loaded, name) if as_arrays else loaded


def _devices_of(
    device: "str | int | torch.device", map_location: "MapLocation | None", name: str
) -> "DeviceOf":
    """Return the devices by the one of both that is given."""
    from trunkline._tensor_io.map_location import device_of, devices_argument
    from trunkline._tensor_io.memory import device_argument

    if map_location is None:
        return device_of(device_argument(device, name))
    is_device = not callable(map_location) and not isinstance(map_location, Mapping)
    if device != "cpu" and not (is_device and device == map_location):
        shown = map_location if is_device else type(map_location).__name__
        raise ValueError(f"device, map_location: differ ({device} and {shown}); pass only one")
    return devices_argument(map_location, name)


def _load(name: str, options: _Options) -> Any:
    from trunkline.checkpoint.save_order import await_saves_of

    if options.group is not None:
        return _load_together(name, options)
    await_saves_of(awaited_path(name))
    locate, engine, verify, mmap, selection, _framework, _group = options
    kind = kind_of_file(name, engine)
    if kind == "pt":
        _check_framework_of_pt(name, options)
        from trunkline._formats import pt

        return pt.load(name, locate=locate, engine=engine, verify=verify, mmap=mmap, selection=selection)
    from trunkline._formats import safetensors

    load_it = safetensors.load if kind == "safetensors" else safetensors.load_folder
    # The format does not say where tensors were saved; as safetensors loads them, that is the CPU.
    return load_it(name, device=locate("cpu"), engine=engine, verify=verify, mmap=mmap, selection=selection)


def _load_together(name: str, options: _Options) -> Any:
    from trunkline._formats.safetensors.read_ahead import ReadOptions
    from trunkline.checkpoint.iter_tensors import read_together
    from trunkline.checkpoint.reading_ranks import ReadingRanks
    from trunkline.checkpoint.save_order import await_saves_of

    if options.mmap:
        raise ValueError("mmap: a mapped file is read by each process that touches it; pass mmap or group")
    ranks = ReadingRanks(options.group)
    try:
        await_saves_of(awaited_path(name))
        kind = kind_of_file(name, options.engine)
        if kind == "pt":
            _check_framework_of_pt(name, options)
    except Exception as error:
        ranks.fail(error, name)
    if kind == "pt":
        from trunkline.checkpoint.group_pt import load_pt

        return load_pt(
            ranks,
            name,
            locate=options.locate,
            engine=options.engine,
            verify=options.verify,
            selection=options.selection,
        )
    reading = ReadOptions(options.locate("cpu"), options.engine, options.verify)
    return dict(read_together(ranks, [name], options.selection, reading))


def _check_framework_of_pt(name: str, options: _Options) -> None:
    from trunkline._torch_or_numpy import require_torch

    require_torch(f"{name}: loading a .pt file", "convert it to .safetensors where torch is", name)
    if options.framework in ("numpy", "np"):
        raise ValueError(
            f"framework: {name} is a .pt file, whose tensors are of torch; load it without framework, "
            "and call tensor.numpy()"
        )


def awaited_path(name: str) -> str:
    """Return the path whose saves are awaited before `name` is read: of an index, its folder."""
    is_index = name.lower().endswith(".index.json")  # as save() reads suffixes
    return os.path.dirname(name) or "." if is_index else name  # noqa: PTH120


def kind_of_file(name: str, engine: Engine | None) -> Literal["folder", "safetensors", "pt"]:
    """Return what is at a path: by its suffix, or where that says nothing, by its first bytes."""
    lower = name.lower()
    if os.path.isdir(name) or lower.endswith(".safetensors.index.json"):  # noqa: PTH112
        return "folder"
    if lower.endswith(".safetensors"):
        return "safetensors"
    if os.path.splitext(lower)[1] in PT_SUFFIXES:  # noqa: PTH122
        return "pt"
    from trunkline._core import open as open_file

    with open_file(name, engine=engine, direct="never") as file:
        head = bytearray(min(_SNIFFED_BYTES, file.size))
        file.pread(head)
    # A safetensors file begins with the size of its JSON, which no file of other formats does by chance.
    is_safetensors = len(head) == _SNIFFED_BYTES and head[8:9] == b"{" and head[6:8] == b"\0\0"
    return "safetensors" if is_safetensors else "pt"


_SNIFFED_BYTES = 9
