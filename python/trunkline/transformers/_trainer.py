"""Makes Hugging Face's Trainer save its checkpoints in the background, by trunkline.Checkpointer."""

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

from trunkline._arguments import started_ranks
from trunkline._errors import Error, Format, Unsupported, exception_of
from trunkline._tensor_io.devices import savable
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory.checkpointer import Checkpointer
from trunkline.checkpoint.save import take_failures
from trunkline.transformers._measurements import Measurements, keeps_best_of, warn_without_evaluation
from trunkline.transformers._preemption import agree_on_preemption, on_any_rank
from trunkline.transformers._resume import INCOMPLETE, plan_resume
from trunkline.transformers._uploads import find_upload

__all__ = ["BackgroundCheckpoints", "Trainer"]


class BackgroundCheckpoints:
    """Makes a Trainer save through a Checkpointer: class Mine(BackgroundCheckpoints, SFTTrainer).

    When to save is configured as usual (save_strategy, save_steps), and the same state is saved: model,
    optimizer, scheduler, scaler, random number generators of all ranks, and the state of the Trainer. Each
    checkpoint is a step of `checkpointer`. Training waits until everything is copied to staging memory, so
    that callbacks, hooks and the model's own code may change the weights at any time, and goes on while the
    copy is written. Works with one process, and with several started by torchrun (DDP), each of which writes
    an equal share.

    train(resume_from_checkpoint=...) accepts True for the last checkpoint, an int for a step (or its digits
    in a str, unless a file has that name), the path of the Checkpointer's directory or of a step in it, or,
    as usual, a folder that a stock Trainer saved. A training that would not continue from the existing
    checkpoints is rejected before it starts: its saves would fail, maybe hours later, or mix the steps of two
    runs. Checkpointer(..., fresh=True) sets the checkpoints aside in each train() that does not resume from
    them. When train() returns, the last checkpoint is durable.

    If a save fails in the background, the next save raises its error, or train() does at the end. If another
    exception ends train() before that, the next train() warns of it (RuntimeWarning).

    With keep_best in the Checkpointer, a checkpoint of a step that was just evaluated has the metrics of that
    evaluation, such as "eval_loss". train() raises ValueError if they lack the metric of keep_best.
    """

    def __init__(self, *args: Any, checkpointer: Checkpointer | None = None, **kwargs: Any) -> None:
        """Accept the arguments of the Trainer, and `checkpointer`.

        checkpointer: None makes one in the folder `checkpoints` of args.output_dir, which keeps
        args.save_total_limit checkpoints (None, 0 or less: all).

        Raises Unsupported for options that need the files of stock checkpoints: load_best_model_at_end,
        pushing checkpoints to the Hub, save_only_model, FSDP, DeepSpeed; for enable_jit_checkpoint with
        several ranks if this version of transformers implements it in an unknown way; and for
        metric_for_best_model with a save_total_limit, which would remove the best checkpoint. Raises
        ValueError for ranks of torchrun that form no process group, TypeError for a `checkpointer` of another
        type. Warns (RuntimeWarning) of a save_total_limit that has no effect because `checkpointer` has its
        own limit.
        """
        _check_type(checkpointer)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        # The directory that output_dir is relative to, even if the working directory changes later.
        self._working_directory = "" if Path(trainer.args.output_dir).is_absolute() else os.getcwd()  # noqa: PTH109
        _check_supported(trainer)
        _check_best_is_kept(trainer.args, checkpointer)
        if checkpointer is not None:
            _warn_of_unused_limit(_limit_of(trainer.args), checkpointer)
            if _saves(trainer.args):
                warn_without_evaluation(checkpointer._context.rules, _name_of(trainer.args.eval_strategy))
        self.checkpointer = checkpointer or Checkpointer(
            Path(trainer.args.output_dir) / "checkpoints", keep=_limit_of(trainer.args)
        )
        self._measurements = Measurements(self.checkpointer._context.rules)
        if trainer.args.push_to_hub:
            self._check_no_upload()
        agree_on_preemption(trainer)
        self._save_folder: str | None = None  # for small files, while a checkpoint is made
        self._resumed: dict[str, Any] | None = None  # the state from which the training starts

    def train(
        self,
        resume_from_checkpoint: "str | os.PathLike[str] | bool | int | None" = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train as the Trainer does; see the class for `resume_from_checkpoint`.

        Raises FileNotFoundError if there is no such checkpoint, Corrupt for a damaged one, Format for one
        that no Trainer saved, and FileExistsError if there are checkpoints from which this training would not
        continue (unless it saves none: save_strategy="no"), or if resume_from_checkpoint=True finds a newer
        folder of a stock Trainer in output_dir.
        """
        trainer: Any = self
        self._measurements.forget()
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

        Raises Unsupported if the checkpoints are in it: they would be uploaded, with the optimizer's state.
        """
        self._check_no_upload()
        return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]

    def _check_no_upload(self) -> None:
        trainer: Any = self
        output = os.path.realpath(os.path.join(self._working_directory, trainer.args.output_dir))  # noqa: PTH118
        checkpoints = os.path.realpath(self.checkpointer._absolute)
        if os.path.commonpath([output, checkpoints]) == output:
            raise Unsupported(
                None,
                "push_to_hub would upload the checkpoints as well, with the optimizer's state: "
                f"{checkpoints} is in output_dir ({output}); pass a checkpointer with another directory, for "
                f'example checkpointer=Checkpointer("{output}-checkpoints")',
            )

    def _await_earlier_saves(self) -> None:
        """Wait for saves of this process into the directory: their checkpoints count as well.

        Warns of saves that failed. The training that made them is over, and this one must not end at its
        first save because of them: the caller of train() cannot call save() again.
        """
        self.checkpointer._wait_for_saves()
        text, _ = take_failures(self.checkpointer, self.checkpointer._absolute)
        if text:
            warn_without_failing(f"{text}; this training starts without that checkpoint", caller())

    @contextmanager
    def _resuming(self, checkpoint: "str | bool | int | None") -> Iterator[Any]:
        """Load the checkpoint, and write its small files into a folder from which the Trainer reads them."""
        self._resumed = None
        if checkpoint is None or not isinstance(checkpoint, int):
            yield checkpoint
            return
        directory = self.checkpointer._absolute
        state = self._load(checkpoint)
        _check_is_of_trainer(state, checkpoint, directory)
        with tempfile.TemporaryDirectory(prefix="trunkline-") as folder:
            for name, contents in state["files"].items():
                if name in (".", "..") or Path(name).name != name:  # a forged checkpoint
                    raise Format(
                        None,
                        f"cannot resume from {directory}: the checkpoint has a file named {name!r}, which is "
                        "not a plain file name; use another checkpoint",
                        directory,
                    )
                (Path(folder) / name).write_bytes(contents)
            try:
                # While it is set, the Trainer loads it instead of the stock checkpoint that it is given.
                self._resumed = state
                del state  # so that parts of it can be freed once they are loaded
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

    # Called by the Trainer, which makes a checkpoint of small files in a folder of this process as usual. The
    # methods that would write model, optimizer and scheduler do nothing: the Checkpointer saves these.

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        self._measurements.record(trainer.state.global_step, metrics)
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:
            raise Unsupported(None, "hyperparameter search needs the checkpoints of the stock Trainer")
        trainer: Any = self
        with tempfile.TemporaryDirectory(prefix="trunkline-") as folder:
            self._save_folder = folder
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            finally:
                self._save_folder = None
                # It names the folder that is removed now; state.best_global_step has the best step.
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
        # Created by enable_jit_checkpoint for its stock checkpoint; a stock Trainer's must stay.
        preempted = trainer.args.enable_jit_checkpoint and (stock / INCOMPLETE).exists()
        save = self._save_before_preemption if preempted else self._save_and_stage
        try:
            save(trainer.state.global_step, savable(state))
        finally:
            if preempted:
                with suppress(OSError):  # another rank did it
                    if [path.name for path in stock.iterdir()] == [INCOMPLETE]:
                        (stock / INCOMPLETE).unlink(missing_ok=True)
                        stock.rmdir()

    def _save_before_preemption(self, step: int, state: Any) -> None:
        """Save durably, since the process may be killed soon.

        No later save follows. So if it fails, maybe with the error of the save before, which was not reported
        yet, all ranks try again once.
        """
        trainer: Any = self
        failure = self._failure_of_save(step, state)
        # A collective operation after the failure shows the ranks that it is over.
        if not on_any_rank(failure is not None, trainer.args):
            return
        self._save_and_stage(step, state)
        self.checkpointer.wait()
        why = "" if failure is None else f"; the first failed: {failure}"
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

        Any code that runs next may change them: on_save of a callback, hooks of the backward pass, train() of
        an optimizer, forward() of a model with a momentum encoder, a notebook cell run again after Ctrl-C.
        """
        try:
            self.checkpointer.save(step, state, metrics=self._measurements.of(step)).wait_staged()
        except BaseException:
            last = self.checkpointer._last_save()
            if last is not None and not last.staged():  # interrupted: the weights may change from here on
                last.cancel()
                last._join()
            raise

    def _get_output_dir(self, trial: Any) -> str:
        if self._save_folder is not None:
            return self._save_folder
        return os.path.join(self._working_directory, super()._get_output_dir(trial))  # type: ignore[misc] # noqa: PTH118

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for from_pretrained(), as usual."""
        if self._save_folder is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        else:
            os.makedirs(str(output_dir), exist_ok=True)  # noqa: PTH103 - the Trainer passes a str

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._save_folder is None:
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
            optimizer = copy.deepcopy(optimizer)  # the Trainer may start again, with smaller batches
        else:
            del self._resumed["optimizer"]  # frees its memory
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
    """Return how many checkpoints the Trainer's arguments keep; None: all, also for 0 or less."""
    limit: int | None = args.save_total_limit
    return None if limit is None or limit <= 0 else limit


def _warn_of_unused_limit(limit: int | None, checkpointer: Checkpointer) -> None:
    keep = checkpointer._context.keep
    if limit is None or limit == keep:
        return
    kept = "all checkpoints (keep=None)" if keep is None else f"keep={keep} checkpoints"
    warnings.warn(
        f"save_total_limit has no effect: the Checkpointer keeps {kept}; pass keep={limit} to it instead",
        RuntimeWarning,
        stacklevel=3,
    )


def _saves(args: Any) -> bool:
    """Whether training may save, if only after SIGTERM (enable_jit_checkpoint)."""
    return _strategy_of(args) != "no" or bool(getattr(args, "enable_jit_checkpoint", False))


def _strategy_of(args: Any) -> str:
    return _name_of(args.save_strategy)


def _name_of(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


def _check_best_is_kept(args: Any, checkpointer: Checkpointer | None) -> None:
    """Reject, or warn of, a limit that would remove the best checkpoint: only the last ones are kept."""
    if args.metric_for_best_model is None or _strategy_of(args) in (
        "no",
        "best",
    ):  # "best": the last is the best
        return
    metric = f"metric_for_best_model={args.metric_for_best_model!r}"
    if checkpointer is None and _limit_of(args) is not None:
        raise Unsupported(
            None,
            f"{metric} with save_total_limit={args.save_total_limit} is not supported: only the last "
            "checkpoints are kept, so the best one would be removed; pass save_total_limit=None to keep all "
            "or, if only the last ones matter, "
            f"checkpointer=trunkline.Checkpointer(..., keep={args.save_total_limit})",
        )
    keep = None if checkpointer is None else checkpointer._context.keep
    if checkpointer is not None and keeps_best_of(checkpointer._context.rules, args.metric_for_best_model):
        return
    if keep is not None:
        warnings.warn(
            f"{metric}: the Checkpointer keeps only the last checkpoints (keep={keep}), even if an earlier "
            "one is the best; pass keep=None to it to keep all, or keep_best to keep the best",
            RuntimeWarning,
            stacklevel=3,
        )


def _check_is_of_trainer(state: Any, step: int, directory: str) -> None:
    """Raise Format for a state that was not saved by a Trainer."""
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
    """Return the files of all ranks, on each of them: ranks that save together must have the same state."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return files
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, files)
    return {name: contents for each in every for name, contents in sorted(each.items())}


def _check_supported(trainer: Any) -> None:
    args = trainer.args
    ranks = started_ranks()
    if args.world_size != ranks:
        raise ValueError(
            f"torchrun started {ranks} ranks, but the Trainer knows of {args.world_size}, so each rank would "
            "save its own checkpoints into the same directory; without GPUs pass use_cpu=True to "
            "TrainingArguments"
        )
    unsupported = {
        "load_best_model_at_end": args.load_best_model_at_end,
        "push_to_hub with a hub_strategy that pushes checkpoints": args.push_to_hub
        and args.hub_strategy != "end",
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "save_only_model": args.save_only_model,
    }
    upload = find_upload(trainer.callback_handler.callbacks)
    if upload is not None:
        unsupported[upload] = _saves(args)
    for name, used in unsupported.items():
        if used:
            raise Unsupported(
                None,
                f"{name} needs the checkpoints of transformers.Trainer; turn it off, or use that Trainer",
            )
