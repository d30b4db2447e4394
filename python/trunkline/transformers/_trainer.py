"""Checkpoints of Hugging Face's Trainer, saved in the background by trunkline.Checkpointer."""

import copy
import errno
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer import TRAINER_STATE_NAME

from trunkline._errors import Error, Format, Unsupported, exception_of
from trunkline._tensor_io.devices import savable
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory.checkpointer import Checkpointer
from trunkline.checkpoint.save import take_failures
from trunkline.transformers._preemption import agree_on_preemption, on_any_rank
from trunkline.transformers._resume import INCOMPLETE, plan_resume
from trunkline.transformers._uploads import find_upload

__all__ = ["BackgroundCheckpoints", "Trainer"]


class BackgroundCheckpoints:
    """Makes a Trainer save through a Checkpointer: class Mine(BackgroundCheckpoints, SFTTrainer).

    When to save is as ever (save_strategy, save_steps), and what is saved too: model, optimizer, schedule,
    scaler, random numbers of all ranks, state of the Trainer. A checkpoint is a step of `checkpointer`. The
    training waits until all is copied to staging memory, so that callbacks, hooks and the model's own code
    may change the weights at any time, and goes on while that is written. It is for one process, and for
    many by torchrun (DDP), each of which writes an equal share.

    train(resume_from_checkpoint=...) accepts True for the last checkpoint, an int for that of a step (or its
    digits in a str, unless there is a file of that name), the path of the Checkpointer's directory or of a
    step in it, or as ever that of a folder that a stock Trainer saved. A training that would not continue
    from the checkpoints that are there is refused before it starts: its saves would fail, maybe hours later,
    or mix the steps of two runs. Checkpointer(..., fresh=True) sets them aside, with each train() that does
    not resume from them. When train() returns, the last one is durable.

    A save that fails in the background raises its error at the next one, or from train() at the end. If
    train() ends before that by another exception, the next train() warns of it (RuntimeWarning).
    """

    def __init__(self, *args: Any, checkpointer: Checkpointer | None = None, **kwargs: Any) -> None:
        """Take the arguments of the Trainer, and `checkpointer`.

        checkpointer: None is one in the folder `checkpoints` of args.output_dir, which keeps
        args.save_total_limit checkpoints (None, 0 or less: all).

        Raises Unsupported for what needs the files of stock checkpoints: load_best_model_at_end, pushing
        checkpoints to the Hub, save_only_model, FSDP, DeepSpeed; for enable_jit_checkpoint with several
        ranks where transformers does not make that checkpoint as known; and for metric_for_best_model with a
        save_total_limit, which would remove the best checkpoint. Raises ValueError for ranks of torchrun that
        do not know of each other, TypeError for a `checkpointer` of another type. Warns (RuntimeWarning) of a
        save_total_limit that is not used: the `checkpointer` has a number of its own.
        """
        _check_type(checkpointer)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        # What output_dir is relative to, also after a change of the working directory.
        self._working_directory = "" if Path(trainer.args.output_dir).is_absolute() else os.getcwd()  # noqa: PTH109
        _refuse_what_cannot_be(trainer)
        _keep_the_best(trainer.args, checkpointer)
        if checkpointer is not None:
            _warn_of_unused_limit(_limit_of(trainer.args), checkpointer)
        self.checkpointer = checkpointer or Checkpointer(
            Path(trainer.args.output_dir) / "checkpoints", keep=_limit_of(trainer.args)
        )
        if trainer.args.push_to_hub:
            self._refuse_to_upload()
        agree_on_preemption(trainer)
        self._saved_into: str | None = None  # the folder of small files, while a checkpoint is made
        self._resumed: dict[str, Any] | None = None  # the state that the training starts from

    def train(
        self,
        resume_from_checkpoint: "str | os.PathLike[str] | bool | int | None" = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train as the Trainer does; see the class for `resume_from_checkpoint`.

        Raises FileNotFoundError where there is no such checkpoint, Corrupt for a damaged one, Format for one
        that no Trainer saved, FileExistsError where there are checkpoints that this training would not
        continue from (unless it saves none: save_strategy="no"), and where resume_from_checkpoint=True finds
        a newer folder of a stock Trainer in output_dir.
        """
        trainer: Any = self
        self._await_earlier_saves()
        plan = self.checkpointer._agree(
            lambda: plan_resume(
                resume_from_checkpoint, self.checkpointer, self._get_output_dir(None), _saves(trainer.args)
            ),
            "train()",
        )
        if plan is None or isinstance(plan, str):
            self.checkpointer._start_over()
        try:
            with self._resuming(plan) as folder:
                result = super().train(folder, *args, **kwargs)  # type: ignore[misc]
        except Exception:
            last = self.checkpointer._last_save()
            if last is not None:
                last._join()  # if that fails too, the next train() warns of it, or the process at its exit
            raise
        self.checkpointer.wait()
        return result

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload output_dir as the Trainer does.

        Raises Unsupported where the checkpoints lie in it: they would go along, with the optimizer's state.
        """
        self._refuse_to_upload()
        return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]

    def _refuse_to_upload(self) -> None:
        trainer: Any = self
        output = os.path.realpath(os.path.join(self._working_directory, trainer.args.output_dir))  # noqa: PTH118
        checkpoints = os.path.realpath(self.checkpointer._absolute)
        if os.path.commonpath([output, checkpoints]) == output:
            raise Unsupported(
                None,
                "push_to_hub would upload the checkpoints as well, with the optimizer's state: "
                f"{checkpoints} lies in output_dir ({output}); pass a checkpointer of another directory, for "
                f'example checkpointer=Checkpointer("{output}-checkpoints")',
            )

    def _await_earlier_saves(self) -> None:
        """Wait for what this process still saves into the directory: those checkpoints count as well.

        Warns of saves that failed. The training that made them is over, and this one must not end at its
        first save because of them: who calls train() cannot call save() again.
        """
        self.checkpointer._wait_for_saves()
        text, _ = take_failures(self.checkpointer, self.checkpointer._absolute)
        if text:
            warn_without_failing(f"{text}; this training starts without that checkpoint", caller())

    @contextmanager
    def _resuming(self, checkpoint: "str | bool | int | None") -> Iterator[Any]:
        """Load the checkpoint, and lay its small files into a folder for the Trainer to read them."""
        self._resumed = None
        if checkpoint is None or not isinstance(checkpoint, int):
            yield checkpoint
            return
        directory = self.checkpointer._absolute
        state = self._load(checkpoint)
        _refuse_other_states(state, checkpoint, directory)
        with tempfile.TemporaryDirectory(prefix="trunkline-") as folder:
            for name, contents in state["files"].items():
                if name in (".", "..") or Path(name).name != name:  # of a checkpoint that somebody forged
                    raise Format(
                        None,
                        f"cannot resume from {directory}: the name {name!r} of a file in "
                        "the checkpoint is not a plain file name; use another checkpoint",
                        directory,
                    )
                (Path(folder) / name).write_bytes(contents)
            try:
                # While it is set, the Trainer loads it instead of the stock checkpoint that it is given.
                self._resumed = state
                del state  # what is loaded is freed
                yield folder
            finally:
                self._resumed = None

    def _load(self, checkpoint: "bool | int") -> Any:
        if checkpoint is not True:
            return self.checkpointer.load(checkpoint)
        try:
            return self.checkpointer.load()
        except FileNotFoundError as error:
            raise exception_of(
                "system",
                errno.ENOENT,
                f"resume_from_checkpoint=True: {error}; for a training that may be starting for the first "
                "time, pass resume_from_checkpoint=trainer.checkpointer.latest() is not None",
                self.checkpointer._absolute,
            ) from None

    # What the Trainer calls. It makes a checkpoint as ever, of small files in a folder of this process; where
    # it would write model, optimizer and schedule nothing happens: they go to the Checkpointer.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:
            raise Unsupported(None, "hyperparameter search needs the checkpoints of the stock Trainer")
        trainer: Any = self
        with tempfile.TemporaryDirectory(prefix="trunkline-") as folder:
            self._saved_into = folder
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            finally:
                self._saved_into = None
                # A name in the folder that goes now; state.best_global_step says which step is the best.
                trainer.state.best_model_checkpoint = None
            for path in Path(folder).glob(f"*/{TRAINER_STATE_NAME}"):
                trainer.state.save_to_json(os.fspath(path))
            files = {path.name: path.read_bytes() for path in Path(folder).glob("*/*")}
        state = {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "files": _of_all_ranks(files),
        }
        stock = Path(trainer._get_output_dir(trial)) / f"checkpoint-{trainer.state.global_step}"
        # Made by enable_jit_checkpoint for its stock checkpoint; a stock Trainer's is not ours.
        preempted = trainer.args.enable_jit_checkpoint and (stock / INCOMPLETE).exists()
        save = self._save_before_the_end if preempted else self._save_and_stage
        try:
            save(trainer.state.global_step, savable(state))
        finally:
            if preempted:
                with suppress(OSError):  # another rank did it
                    if [path.name for path in stock.iterdir()] == [INCOMPLETE]:
                        (stock / INCOMPLETE).unlink(missing_ok=True)
                        stock.rmdir()

    def _save_before_the_end(self, step: int, state: Any) -> None:
        """Save durably: the process may be killed soon, and no later save comes.

        So where it fails, maybe with the error of the save before, which nobody has seen yet, all ranks try
        it once more.
        """
        trainer: Any = self
        failure = self._failure_of_save(step, state)
        # That they have begun a collective operation since tells them that the failure is over.
        if not on_any_rank(failure is not None, trainer.args):
            return
        self._save_and_stage(step, state)
        self.checkpointer.wait()
        why = "" if failure is None else f"; the first: {failure}"
        warn_without_failing(f"step {step} was saved at the second attempt{why}", caller())

    def _failure_of_save(self, step: int, state: Any) -> Error | None:
        try:
            self._save_and_stage(step, state)
            self.checkpointer.wait()
        except Error as error:
            return error
        return None

    def _save_and_stage(self, step: int, state: Any) -> None:
        """Begin to save, and return once the weights may change.

        Whatever runs next may change them: on_save of a callback, hooks of the backward pass, train() of an
        optimizer, forward() of a model with a momentum encoder, the next cell of a notebook after Ctrl-C.
        """
        try:
            self.checkpointer.save(step, state).wait_staged()
        except BaseException:
            last = self.checkpointer._last_save()
            if last is not None and not last.staged():  # interrupted: the weights may change from here on
                last.cancel()
                last._join()
            raise

    def _get_output_dir(self, trial: Any) -> str:
        if self._saved_into is not None:
            return self._saved_into
        return os.path.join(self._working_directory, super()._get_output_dir(trial))  # type: ignore[misc] # noqa: PTH118

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for from_pretrained(), as ever."""
        if self._saved_into is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        else:
            os.makedirs(str(output_dir), exist_ok=True)  # noqa: PTH103 - a str of the Trainer's

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._saved_into is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        trainer: Any = self
        (trainer.model if model is None else model).load_state_dict(self._resumed.pop("model"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        trainer: Any = self
        optimizer = self._resumed["optimizer"]
        if trainer.args.auto_find_batch_size:
            optimizer = copy.deepcopy(optimizer)  # the Trainer may begin anew, with smaller batches
        else:
            del self._resumed["optimizer"]  # and its memory
        trainer.optimizer.load_state_dict(optimizer)
        trainer.lr_scheduler.load_state_dict(self._resumed["scheduler"])


class Trainer(BackgroundCheckpoints, transformers.Trainer):  # type: ignore[misc] # without the library no type
    """transformers.Trainer that saves its checkpoints in the background; see BackgroundCheckpoints."""


def _check_type(checkpointer: Any) -> None:
    if checkpointer is None or isinstance(checkpointer, Checkpointer):
        return
    shown = repr(os.fspath(checkpointer)) if isinstance(checkpointer, str | os.PathLike) else "..."
    raise TypeError(
        "checkpointer: must be a trunkline.Checkpointer or None, not "
        f"{type(checkpointer).__name__}; pass trunkline.Checkpointer({shown})"
    )


def _limit_of(args: Any) -> int | None:
    """Return how many checkpoints the arguments of the Trainer let stay; None: all, also for 0 or less."""
    limit: int | None = args.save_total_limit
    return None if limit is None or limit <= 0 else limit


def _warn_of_unused_limit(limit: int | None, checkpointer: Checkpointer) -> None:
    keep = checkpointer._context.keep
    if limit is None or limit == keep:
        return
    kept = "all checkpoints (keep=None)" if keep is None else f"keep={keep} checkpoints"
    warnings.warn(
        f"save_total_limit: not used: the Checkpointer keeps {kept}; pass keep={limit} to it instead",
        RuntimeWarning,
        stacklevel=3,
    )


def _saves(args: Any) -> bool:
    """Whether training may save: also where only SIGTERM asks for it (enable_jit_checkpoint)."""
    return _strategy_of(args) != "no" or bool(getattr(args, "enable_jit_checkpoint", False))


def _strategy_of(args: Any) -> str:
    return str(getattr(args.save_strategy, "value", args.save_strategy))


def _keep_the_best(args: Any, checkpointer: Checkpointer | None) -> None:
    """Refuse, or warn of, a limit that would remove the best checkpoint: a Checkpointer keeps the last."""
    if args.metric_for_best_model is None or _strategy_of(args) in (
        "no",
        "best",
    ):  # "best": the last is the best
        return
    metric = f"metric_for_best_model={args.metric_for_best_model!r}"
    if checkpointer is None and _limit_of(args) is not None:
        raise Unsupported(
            None,
            f"{metric} with save_total_limit={args.save_total_limit}: the last checkpoints are kept, and the "
            "best one would be removed; pass save_total_limit=None to keep all or, if only the last matter, "
            f"checkpointer=trunkline.Checkpointer(..., keep={args.save_total_limit})",
        )
    keep = None if checkpointer is None else checkpointer._context.keep
    if keep is not None:
        warnings.warn(
            f"{metric}: the Checkpointer keeps the last checkpoints (keep={keep}), also "
            "where an earlier one is the best; pass keep=None to it to keep all",
            RuntimeWarning,
            stacklevel=3,
        )


def _refuse_other_states(state: Any, step: int, directory: str) -> None:
    """Refuse what other code than a Trainer has saved into the directory."""
    needed = ("model", "optimizer", "scheduler", "files")
    missing = [key for key in needed if not isinstance(state, dict) or key not in state]
    if not missing:
        return
    which = "the newest checkpoint" if step is True else f"step {step}"
    number = "" if step is True else str(step)
    raise Format(
        None,
        f"cannot resume from {directory}: {which} was not saved by tl.transformers.Trainer (it lacks "
        f"{', '.join(missing)}); load it with trunkline.Checkpointer({directory!r}).load({number}), or "
        "resume from a checkpoint of a Trainer",
        directory,
    )


def _of_all_ranks(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of all ranks, on each: those that save together have the same state."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return files
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, files)
    return {name: contents for each in every for name, contents in sorted(each.items())}


def _refuse_what_cannot_be(trainer: Any) -> None:
    args = trainer.args
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.world_size != ranks:
        raise ValueError(
            f"torchrun started {ranks} ranks, but the Trainer knows of {args.world_size}, so that each would "
            "save checkpoints of its own to one place; without GPUs pass use_cpu=True to TrainingArguments"
        )
    refused = {
        "load_best_model_at_end": args.load_best_model_at_end,
        "push_to_hub with a hub_strategy that pushes checkpoints": args.push_to_hub
        and args.hub_strategy != "end",
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "save_only_model": args.save_only_model,
    }
    upload = find_upload(trainer.callback_handler.callbacks)
    if upload is not None:
        refused[upload] = _saves(args)
    for name, used in refused.items():
        if used:
            raise Unsupported(
                None, f"{name} needs the checkpoints of transformers.Trainer; use that one, or leave it out"
            )
