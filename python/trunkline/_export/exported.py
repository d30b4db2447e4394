"""Writes a state to one file, or to several."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trunkline._core import Engine
from trunkline._export.lazy_state import LazyState
from trunkline._export.output import Output, write_output
from trunkline._export.pt_output import pt_output
from trunkline._export.safetensors_output import flat_tensors, safetensors_output
from trunkline._export.window import WindowReader
from trunkline._progress import Progress

SAFETENSORS_SUFFIX = ".safetensors"
METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass
class Exported:
    """What export_checkpoint() has written.

    path: `out`, absolute. source: what was exported, in words. step: of a directory of checkpoints. files:
    their paths. tensors, bytes: how many tensors, and the bytes of all files. dropped: tied names that the
    files do not have, with the name that holds the tensor. verified: whether every byte was compared with a
    checksum.
    """

    path: str
    source: str
    step: int | None
    files: list[str] = field(default_factory=list)
    tensors: int = 0
    bytes: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    verified: bool = True

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def export_state(
    state: LazyState, path: str, *, force: bool, engine: Engine | None = None, show_progress: bool = False
) -> Exported:
    """Write one file of a state: of safetensors if `path` ends so, or else as torch.save does."""
    result = Exported(path, state.source, state.step, verified=state.is_verified)
    if path.lower().endswith(SAFETENSORS_SUFFIX):
        flat = flat_tensors(state)
        result.dropped = flat.dropped
        result.tensors = len(flat.tensors)
        output = safetensors_output(state, flat.tensors, METADATA)
    else:
        output = pt_output(state, path)
        result.tensors = len(state.names)
    write_all([(output, path)], state, force=force, engine=engine, show_progress=show_progress)
    result.files, result.bytes = [path], output.nbytes
    return result


def write_all(
    outputs: Sequence[tuple[Output, str]],
    state: LazyState,
    *,
    force: bool,
    engine: Engine | None = None,
    show_progress: bool = False,
) -> None:
    """Write the files one after the other. After an error those before it are there."""
    progress = Progress(f"exporting {state.source}", sum(output.nbytes for output, _ in outputs))
    advance = progress.add if show_progress else lambda nbytes: None
    try:
        with WindowReader(engine) as reader:
            reader.hold(state.stored)
            for output, path in outputs:
                write_output(output, path, reader, force=force, engine=engine, on_progress=advance)
    finally:
        progress.close()
