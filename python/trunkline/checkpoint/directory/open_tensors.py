"""Opening a file or a step to read single tensors of it: trunkline.open_tensors."""

import errno
import os

from trunkline import _core
from trunkline._arguments import check_engine
from trunkline._core import Engine
from trunkline._errors import exception_of
from trunkline._formats import safetensors
from trunkline._formats.checkpoint_names import DESCRIPTOR, is_manifest, step_of
from trunkline._formats.file_version import version_of
from trunkline._formats.safetensors.folder import open_folder
from trunkline._formats.safetensors.source import SafetensorsSource
from trunkline._formats.tensor_reader import Source, TensorReader
from trunkline._paths import absolute_path, names_in, path_name
from trunkline._tensor_io.memory import Device, device_argument
from trunkline._torch_or_numpy import require_torch, torch
from trunkline._types import Path
from trunkline.checkpoint.directory.running_saves import await_saves_at
from trunkline.checkpoint.directory.step_source import StepSource
from trunkline.checkpoint.load import Verify, awaited_path, kind_of_file
from trunkline.checkpoint.save_order import await_saves_of


def open_tensors(
    path: Path,
    *,
    device: Device = "cpu",
    verify: Verify = "auto",
    engine: Engine | None = None,
) -> TensorReader:
    """Open a file to read single tensors of it, and slices of them, as safetensors.safe_open does.

        with open_tensors("model.safetensors") as tensors:
            tensors.keys()
            weight = tensors["layer.weight"]
            rows = tensors.get_slice("layer.weight")[0:10]

    `path`: a file that load() reads, or a folder of .safetensors files; the folder of a step of a
    Checkpointer (`DIR/step-00000100`), or `DIR` itself, whose latest step it is. Tensors in nested dicts and
    lists, of .pt files and steps, have names of their keys and indices, such as "model.0.weight". Opening
    reads headers; everything else is read when it is asked for. Tensors own their memory and share none, are
    on `device`, and need no gradients. They are those of the file that was opened, even if it is replaced
    meanwhile.

    `verify`: "auto" verifies tensors by the checksums that the file has, but not slices; True requires
    checksums and reads the whole tensor for a slice; False verifies none. Checksums cover pieces of 1 MiB
    (.safetensors, steps) or whole storages (.pt), which are read whole then.

    Raises the errors of load(), Unsupported for a .pt file with objects besides dicts, lists, numbers,
    strings and tensors. Waits for saves of this process to the file or directory, as load() does.
    """
    if hasattr(path, "read"):
        raise TypeError(f"path: must be the path of a file, not an open file ({type(path).__name__})")
    name = path_name(path)
    if verify not in ("auto", True, False):
        raise ValueError(f'verify: must be "auto", True or False, not {verify!r}')
    check_engine(engine)
    target = device_argument(device, name)
    await_saves_of(awaited_path(name))
    await_saves_at(name)
    return TensorReader(_source(name, target, engine, verify), target, verifies_slices=verify is True)


def _source(name: str, device: torch.device, engine: Engine | None, verify: Verify) -> Source:
    kind = kind_of_file(name, engine)
    if kind == "folder":
        step = _step_in(name)
        if step is not None:
            directory, number = step
            store = _core.CheckpointStore(directory, create=False)
            return StepSource(
                name, store.open_manifest(number), device=device, engine=engine, verify=verify is not False
            )
        headers, files, stack = open_folder(name, engine=engine)
        return SafetensorsSource(
            name, headers, files, stack.close, device=device, engine=engine, verify=verify
        )
    version = version_of(name)
    file = _core.open(name, engine=engine, direct="unless_cached")
    try:
        if kind == "pt":
            require_torch(f"{name}: reading a .pt file", "save a .safetensors file", name)
            from trunkline._formats.pt.source import PtSource

            return PtSource(
                name, file, file.close, device=device, engine=engine, verify=verify, version=version
            )
        header = safetensors.header_of(file, name, version)
        return SafetensorsSource(
            name, [header], [file], file.close, device=device, engine=engine, verify=verify
        )
    except BaseException:
        file.close()
        raise


def _step_in(name: str) -> tuple[str, int] | None:
    """Return the directory and number of the step at a path; None if it is another folder."""
    if not os.path.isdir(name):  # noqa: PTH112 - an index
        return None
    directory, folder = os.path.split(absolute_path(name).rstrip("/"))
    names = names_in(name)
    step = step_of(folder)
    if step is not None and any(is_manifest(each) for each in names):
        return directory, step
    if DESCRIPTOR not in names:
        return None
    latest = _core.CheckpointStore(name, create=False).latest()
    if latest is None:
        raise exception_of("system", errno.ENOENT, f"{name} has no checkpoint yet", name)
    return name, latest
