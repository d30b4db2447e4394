"""Decides, before any training, what Trainer.train(resume_from_checkpoint=...) continues from.

A training that starts over beside the checkpoints of an earlier one would fail at its first save, maybe
hours after it began, or mix the steps of two runs in one directory. So checkpoints from which it would not
continue are found first.
"""

import errno
import json
import operator
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline import _core
from trunkline._errors import exception_of
from trunkline._formats.checkpoint_names import DESCRIPTOR, is_manifest, step_name, step_of
from trunkline._paths import names_in

if TYPE_CHECKING:
    from trunkline.checkpoint.directory.checkpointer import Checkpointer

_STOCK_FOLDER = re.compile(r"checkpoint-([0-9]+)")
_STOCK_STATE = "trainer_state.json"
INCOMPLETE = "checkpoint-is-incomplete.txt"  # in a stock folder that enable_jit_checkpoint is writing


def plan_resume(checkpoint: Any, checkpointer: "Checkpointer", output_dir: str, saves: bool = True) -> Any:
    """Return the step to load (True: the newest), a path for the stock Trainer, or None to start over.

    output_dir: absolute, resolved when the Trainer was made. `checkpoint`: relative to the present working
    directory. saves: whether the training saves; if not, it may start anywhere.

    Raises FileExistsError if the training would not continue from the newest checkpoint and the arguments do
    not say so clearly; ValueError for a directory of checkpoints that is not the Trainer's.
    """
    if checkpoint != "" and isinstance(checkpoint, str | os.PathLike):
        checkpoint = _of_path(os.fspath(checkpoint), checkpointer, output_dir)
    if checkpoint is None or checkpoint is False or checkpoint == "":
        if saves:
            _check_no_later_steps(checkpointer, "", start=0)
        return None
    if checkpoint is True:
        _check_stock_is_not_newer(checkpointer, output_dir)
        return True
    if isinstance(checkpoint, str):
        if not (Path(checkpoint) / _STOCK_STATE).is_file():
            _suggest_step(checkpoint, checkpointer, output_dir)
        if saves and Path(checkpoint).is_dir():  # if not, the Trainer reports it
            _check_no_later_steps(checkpointer, f" from {checkpoint}", start=_stock_step(Path(checkpoint)))
        return checkpoint
    try:
        return operator.index(checkpoint)
    except TypeError:
        raise TypeError(
            "resume_from_checkpoint: must be True, the number of a step or a path, not "
            f"{type(checkpoint).__name__}"
        ) from None


def get_last_checkpoint(output_dir: "str | os.PathLike[str]") -> str | None:
    """Return the path of the last checkpoint of a Trainer in its output_dir, or None.

    In place of transformers.trainer_utils.get_last_checkpoint, which finds only folders of stock Trainers:
    this one finds the steps of tl.transformers.Trainer as well, of which it is the one committed last.

    Raises FileExistsError if there are checkpoints of both, and the one with the highest step is not the one
    that was saved last, or was saved at the same time.
    """
    ours: list[tuple[int, Path]] = []
    for directory in (Path(output_dir) / "checkpoints", Path(output_dir)):
        if (directory / DESCRIPTOR).exists():
            # Not by times: a copy of the directory may have others.
            latest = _core.CheckpointStore(directory, create=False).latest()
            ours += [] if latest is None else [(latest, directory / step_name(latest))]
    stock = _stock_folders(os.fspath(output_dir))
    if not ours:
        return str(max(stock)[1]) if stock else None  # as the function of transformers
    candidates = [(step, _committed_at(folder), folder) for step, folder in ours]
    candidates += [(step, _saved_at(folder / _STOCK_STATE), folder) for step, folder in stock]
    _, _, highest = max(candidates)
    _, _, last = max(candidates, key=operator.itemgetter(1, 0))
    if highest != last:
        raise _exists(
            f"{output_dir} holds {highest.name} with the highest step, and {last.name}, which was saved "
            "later: which is the last checkpoint is ambiguous; pass the path of one of them as "
            "resume_from_checkpoint",
            str(highest),
        )
    return str(highest)


def _of_path(path: str, checkpointer: "Checkpointer", output_dir: str) -> "str | int | bool":
    """Resolve a path into the Trainer's checkpoints, or the digits of a step; keep other paths.

    output_dir/step-N names step N, if nothing has that path.
    """
    if re.fullmatch("[0-9]+", path) and not os.path.lexists(path):
        return int(path)  # from a command line
    given, ours = Path(path).resolve(), Path(checkpointer._absolute).resolve()
    if given == ours:
        return True
    step = step_of(given.name)
    if step is not None and given.parent == ours:
        return step
    if given.parent == Path(output_dir).resolve() and not os.path.lexists(path):
        named = re.fullmatch(r"step-([0-9]+)", given.name)
        if named and int(named[1]) in checkpointer.steps():
            return int(named[1])
    if given.parent == ours:
        steps = ", ".join(map(str, checkpointer.steps())) or "there are none"
        raise exception_of(
            "system",
            errno.ENOENT,
            f"resume_from_checkpoint: {path} is not a checkpoint; steps in {checkpointer._absolute}: "
            f"{steps}. Pass resume_from_checkpoint=True for the last one, or the number of a step",
            path,
        )
    for directory in (given, given.parent):
        if (directory / DESCRIPTOR).exists():
            raise ValueError(
                f"resume_from_checkpoint: {path} is in a directory of Trunkline checkpoints that is not this "
                f"Trainer's, {checkpointer._absolute}; pass "
                f"checkpointer=trunkline.Checkpointer({str(directory)!r}) and resume_from_checkpoint=True, "
                "or the number of a step"
            )
    return path


def _suggest_step(path: str, checkpointer: "Checkpointer", output_dir: str) -> None:
    """Raise FileNotFoundError for a path without a stock checkpoint, if the Checkpointer has steps."""
    steps = checkpointer.steps()
    if not steps:
        return  # the Trainer reports what is missing
    if Path(path).resolve() == Path(output_dir).resolve():
        why = "it is the output_dir"
    elif not os.path.lexists(path):
        why = "it does not exist"
    else:
        why = f"it has no {_STOCK_STATE}"
    named = _STOCK_FOLDER.fullmatch(Path(path).name)
    step = int(named[1]) if named and int(named[1]) in steps else steps[-1]
    raise exception_of(
        "system",
        errno.ENOENT,
        f"resume_from_checkpoint: {path} is not a checkpoint of transformers.Trainer: {why}; this Trainer's "
        f"checkpoints are in {checkpointer._absolute} ({_shown(steps)}); pass True for the newest, or the "
        f"number of a step, as in resume_from_checkpoint={step}",
        path,
    )


def _shown(steps: list[int]) -> str:
    some = steps if len(steps) <= 6 else [*steps[:3], "...", *steps[-3:]]
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, some))}"


def _check_stock_is_not_newer(checkpointer: "Checkpointer", output_dir: str) -> None:
    latest = checkpointer.latest()
    stock = _stock_folders(output_dir)
    if not stock:
        return
    highest, folder = max(stock)
    if latest is None:
        raise _exists(
            f"resume_from_checkpoint=True: {output_dir} contains only checkpoints of a stock Trainer; to "
            f"continue from one, pass its path: resume_from_checkpoint={str(folder)!r}",
            str(folder),
        )
    # Also where its steps are lower: a stock Trainer may have started over.
    _, last = max(stock, key=lambda each: _saved_at(each[1] / _STOCK_STATE))
    saved_later = _saved_at(last / _STOCK_STATE) > _saved_at_step(checkpointer, latest)
    if highest <= latest and saved_later:
        folder = last
    if highest > latest or saved_later:
        how = "has a later step than" if highest > latest else "was saved after"
        raise _exists(
            f"resume_from_checkpoint=True is ambiguous: {folder} of a stock Trainer {how} step "
            f"{latest} in {checkpointer._absolute}; pass resume_from_checkpoint={latest} for the latter, or "
            f"resume_from_checkpoint={str(folder)!r} for the former",
            str(folder),
        )


def _saved_at(path: "str | Path") -> float:
    """Return when a file was written; 0 if it is gone."""
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return 0.0


def _saved_at_step(checkpointer: "Checkpointer", step: int) -> float:
    return _committed_at(Path(checkpointer._absolute) / step_name(step))


def _committed_at(folder: Path) -> float:
    """Return when the checkpoint in the folder of a step was committed; 0 if there is none."""
    try:
        manifests = [entry for entry in folder.iterdir() if is_manifest(entry.name)]
    except OSError:  # another process has removed the step
        return 0.0
    return max(map(_saved_at, manifests), default=0.0)


def _check_no_later_steps(checkpointer: "Checkpointer", how: str, start: int) -> None:
    """Raise FileExistsError for checkpoints after step `start`, at which the training would start."""
    later = [step for step in checkpointer.steps() if step > start or start == 0]
    if not later or checkpointer._wants_fresh:  # then a training that starts over sets these aside
        return
    raise _exists(
        f"cannot start training{how} at step {start}: {checkpointer._absolute} already holds the checkpoints "
        f"of {_shown(later)}, from which this training would not continue; to continue, pass "
        "resume_from_checkpoint=True (the get_last_checkpoint of transformers finds only stock folders, that "
        "of trunkline.transformers finds these); to start over, use another output_dir, or "
        "checkpointer=trunkline.Checkpointer(..., fresh=True), which moves them to a separate folder and "
        "deletes nothing",
        checkpointer._absolute,
    )


def _stock_folders(output_dir: str) -> list[tuple[int, Path]]:
    """Return the complete stock checkpoints."""
    try:
        entries = [Path(output_dir, name) for name in names_in(output_dir)]
    except FileNotFoundError:
        return []
    found = [(_STOCK_FOLDER.fullmatch(entry.name), entry) for entry in entries]
    return [(int(match[1]), entry) for match, entry in found if match and _is_complete(entry)]


def _is_complete(folder: Path) -> bool:
    return (folder / _STOCK_STATE).is_file() and not os.path.lexists(folder / INCOMPLETE)


def _stock_step(folder: Path) -> int:
    """Return the step of a stock checkpoint; 0 if it is unknown."""
    try:
        return int(json.loads((folder / _STOCK_STATE).read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        match = _STOCK_FOLDER.fullmatch(folder.name)
        return int(match[1]) if match else 0


def _exists(message: str, path: str) -> Exception:
    return exception_of("system", errno.EEXIST, message, path)
