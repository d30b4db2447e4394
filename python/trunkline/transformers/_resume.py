"""What Trainer.train(resume_from_checkpoint=...) continues from, decided before any training.

A training that starts over beside the checkpoints of an earlier one would remove them, as far as
save_total_limit says, hours after it began. So what it would not continue from is found first.
"""

import errno
import json
import operator
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline._errors import exception_of

if TYPE_CHECKING:
    from trunkline.checkpoint._checkpointer import Checkpointer

_STOCK_FOLDER = re.compile(r"checkpoint-(\d+)")
_STOCK_STATE = "trainer_state.json"
_STEP_DIRECTORY = re.compile(r"step-(\d{8,})")
_DESCRIPTOR = "trunkline-checkpoints.json"


def plan_resume(checkpoint: Any, checkpointer: "Checkpointer", output_dir: str) -> Any:
    """Return the step to load (True: the newest), a path for the stock Trainer, or None to start over.

    Raises FileExistsError where the training would not continue from the newest checkpoint, and it is not
    clear that it should not; ValueError for a directory of checkpoints that is not the Trainer's.
    """
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = _of_path(os.fspath(checkpoint), checkpointer)
    if checkpoint is None or checkpoint is False:
        _refuse_to_leave_behind(checkpointer, "", start=0)
        return None
    if checkpoint is True:
        _refuse_if_stock_is_newer(checkpointer, output_dir)
        return True
    if isinstance(checkpoint, str):
        if Path(checkpoint).is_dir():  # otherwise the Trainer says so
            _refuse_to_leave_behind(checkpointer, f" from {checkpoint}", start=_stock_step(Path(checkpoint)))
        return checkpoint
    return operator.index(checkpoint)


def _of_path(path: str, checkpointer: "Checkpointer") -> "str | int | bool":
    """Resolve a path that leads to checkpoints of ours; any other is returned as it is."""
    given, ours = Path(path).resolve(), checkpointer.directory.resolve()
    if given == ours:
        return True
    step = _STEP_DIRECTORY.fullmatch(given.name)
    if step and given.parent == ours:
        return int(step[1])
    for directory in (given, given.parent):
        if (directory / _DESCRIPTOR).exists():
            raise ValueError(
                f"resume_from_checkpoint: {path} is in a directory of Trunkline checkpoints that is not this "
                f"Trainer's, {checkpointer.directory}; pass "
                f"checkpointer=trunkline.Checkpointer({str(directory)!r}) and resume_from_checkpoint=True, "
                "or the number of a step"
            )
    return path


def _refuse_if_stock_is_newer(checkpointer: "Checkpointer", output_dir: str) -> None:
    latest = checkpointer.latest()
    stock = max(_stock_folders(output_dir), default=None)
    if stock is None:
        return
    if latest is None:
        raise _exists(
            f"resume_from_checkpoint=True: {output_dir} holds only checkpoints of a stock Trainer; to "
            f"continue from one, pass its path: resume_from_checkpoint={str(stock[1])!r}",
            str(stock[1]),
        )
    if stock[0] > latest:
        raise _exists(
            f"resume_from_checkpoint=True is ambiguous: {stock[1]} of a stock Trainer is newer than what "
            f"{checkpointer.directory} holds, step {latest}; pass resume_from_checkpoint={latest} for the "
            f"latter, or resume_from_checkpoint={str(stock[1])!r} for the former",
            str(stock[1]),
        )


def _refuse_to_leave_behind(checkpointer: "Checkpointer", how: str, start: int) -> None:
    """A training that starts at step `start` must not end checkpoints of later steps."""
    later = [step for step in checkpointer.steps() if step > start or start == 0]
    if not later or checkpointer._fresh:
        return
    shown = ", ".join(map(str, later if len(later) <= 6 else [*later[:3], "...", *later[-3:]]))
    raise _exists(
        f"cannot start training{how} at step {start}: {checkpointer.directory} already holds the checkpoints "
        f"of step{'s' if len(later) > 1 else ''} {shown}, which this training would not continue from; to do "
        "so pass resume_from_checkpoint=True, to start over use another output_dir, or "
        "checkpointer=trunkline.Checkpointer(..., fresh=True), which moves them to a folder of their own and "
        "deletes nothing",
        str(checkpointer.directory),
    )


def _stock_folders(output_dir: str) -> list[tuple[int, Path]]:
    """Return the stock checkpoints; one without a state was cut off, and nothing can continue from it."""
    try:
        entries = list(Path(output_dir).iterdir())
    except FileNotFoundError:
        return []
    found = [(_STOCK_FOLDER.fullmatch(entry.name), entry) for entry in entries]
    return [(int(match[1]), entry) for match, entry in found if match and (entry / _STOCK_STATE).is_file()]


def _stock_step(folder: Path) -> int:
    """Return the step at which a stock checkpoint lets the Trainer go on; 0 if it does not say."""
    try:
        return int(json.loads((folder / _STOCK_STATE).read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        match = _STOCK_FOLDER.fullmatch(folder.name)
        return int(match[1]) if match else 0


def _exists(message: str, path: str) -> Exception:
    return exception_of("system", errno.EEXIST, message, path)
