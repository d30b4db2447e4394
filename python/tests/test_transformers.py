"""trunkline.transformers in the real Trainer of Hugging Face, on a tiny model of random weights."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support_warm

import trunkline as tl
from trunkline._tensor_io.flag import Flag
from trunkline.checkpoint import save as saving
from trunkline.checkpoint.directory import step_save

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")  # the Trainer's advice

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hf_trainer.py"
STEPS = 8
EPOCH = 4


def new_model() -> Any:
    """GPT-2 with dropout: random numbers that are not restored show in the weights. Tied embeddings."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=64)
    return transformers.GPT2LMHeadModel(config)


def new_trainer(kind: Any, directory: Path, **options: Any) -> Any:
    tokens = torch.randint(64, (2 * EPOCH, 12), generator=torch.Generator().manual_seed(1))
    arguments: dict[str, Any] = {
        "max_steps": STEPS,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    own = {name: options.pop(name) for name in ("callbacks", "checkpointer") if name in options}
    return kind(
        model=new_model(),
        args=transformers.TrainingArguments(str(directory), **(arguments | options)),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        eval_dataset=[{"input_ids": row, "labels": row} for row in tokens[:2]],
        **own,
    )


class Crash(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the training in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("crash")


def crashed(directory: Path, step: int, **options: Any) -> None:
    trainer = new_trainer(tl.transformers.Trainer, directory, callbacks=[Crash(step)], **options)
    with pytest.raises(RuntimeError, match="crash"):
        trainer.train()
    trainer.checkpointer.wait()  # this process lives on, and so does the save that was under way


def assert_same_weights(one: Any, other: Any) -> None:
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def losses(trainer: Any) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Stock, and never interrupted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = new_trainer(transformers.Trainer, tmp_path_factory.mktemp("reference"), save_strategy="no")
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("options", "last"),
    [({"save_strategy": "epoch"}, 4), ({"save_steps": 1}, 6)],
)
def test_resumed_run_ends_as_an_uninterrupted_one(
    options: dict[str, Any], last: int, tmp_path: Path, reference: Any
) -> None:
    crashed(tmp_path, 7, **options)
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, **options)
    assert trainer.checkpointer.latest() == last
    trainer.train(resume_from_checkpoint=True)
    assert_same_weights(trainer, reference)
    assert losses(trainer) == losses(reference)
    assert trainer.state.global_step == STEPS
    assert not list(tmp_path.glob("checkpoint-*"))


def test_resumes_from_a_step(tmp_path: Path, reference: Any) -> None:
    first = new_trainer(tl.transformers.Trainer, tmp_path, save_steps=2)
    first.train()
    assert_same_weights(first, reference)
    assert first.checkpointer.steps() == [2, 4, 6, 8]
    first.checkpointer.verify(2)
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, save_steps=2)
    trainer.train(resume_from_checkpoint=2)
    assert_same_weights(trainer, reference)


@pytest.mark.parametrize("name", ["../outside", "/tmp/trunkline-outside", "..", "a/b"])
def test_names_of_a_forged_checkpoint_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    forged = tl.Checkpointer(tmp_path / "checkpoints", process_group=False)
    forged.save(3, {"model": {}, "optimizer": {}, "scheduler": {}, "files": {name: b"x"}}, block=True)
    trainer = new_trainer(tl.transformers.Trainer, tmp_path)
    with pytest.raises(tl.Format, match="not a plain file name"):
        trainer.train(resume_from_checkpoint=True)


def test_resumes_from_a_stock_folder(tmp_path: Path, reference: Any) -> None:
    new_trainer(transformers.Trainer, tmp_path).train()
    trainer = new_trainer(tl.transformers.Trainer, tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_weights(trainer, reference)


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_resume_that_failed_leaves_nothing_for_the_next(
    tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    """The next one loads the weights of its own checkpoint, not those that were loaded before the failure."""
    new_trainer(transformers.Trainer, tmp_path / "stock").train()
    ours = tmp_path / "ours"
    new_trainer(tl.transformers.Trainer, ours, max_steps=3, learning_rate=1e-1).train()
    trainer = new_trainer(tl.transformers.Trainer, ours)

    def fail(path: Path, contents: bytes) -> int:
        raise failure(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail)
        with pytest.raises(failure):
            trainer.train(resume_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-3"))
    assert_same_weights(trainer, reference)


@pytest.mark.parametrize("resume", [True, 3])
def test_a_checkpoint_that_no_trainer_saved_is_refused(tmp_path: Path, resume: Any) -> None:
    other = tl.Checkpointer(tmp_path / "checkpoints", process_group=False)
    other.save(3, {"model": new_model().state_dict(), "step": 3}, block=True)
    trainer = new_trainer(tl.transformers.Trainer, tmp_path)
    with pytest.raises(tl.Format, match="lacks optimizer, scheduler, files") as caught:
        trainer.train(resume_from_checkpoint=resume)
    which, call = ("the newest checkpoint", "load()") if resume is True else ("step 3", "load(3)")
    for part in (which, f"Checkpointer('{tmp_path}/checkpoints').{call}"):
        assert part in str(caught.value)
    assert trainer._resumed is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output_dir with the steps 6 and 8, not to be changed."""
    directory = tmp_path_factory.mktemp("trained")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new_trainer(tl.transformers.Trainer, directory, save_steps=2, save_total_limit=2).train()
    return directory


@pytest.fixture
def output(trained: Path, tmp_path: Path) -> Path:
    """A copy that may change."""
    return shutil.copytree(trained, tmp_path / "output")


def stock_folder(output: Path, step: int) -> Path:
    """As a stock Trainer leaves it, as far as this matters before training."""
    folder = output / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def started_steps(trainer: Any) -> list[int]:
    """Let a trainer note the steps that it takes."""
    steps: list[int] = []

    class Note(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    trainer.add_callback(Note())
    return steps


@pytest.mark.parametrize("resume", [None, False, "the usual idiom", "a stock folder of an earlier step"])
def test_starting_over_is_refused_before_any_training(output: Path, resume: Any) -> None:
    if resume == "the usual idiom":
        resume = transformers.trainer_utils.get_last_checkpoint(str(output))
        assert resume is None
    if resume == "a stock folder of an earlier step":
        resume = str(stock_folder(output, 5))
    trainer = new_trainer(tl.transformers.Trainer, output, save_steps=2, save_total_limit=2)
    steps = started_steps(trainer)
    with pytest.raises(FileExistsError) as caught:
        trainer.train(resume_from_checkpoint=resume)
    for part in ("steps 6, 8", "resume_from_checkpoint=True", "output_dir", "fresh=True"):
        assert part in str(caught.value)
    assert steps == []
    assert trainer.checkpointer.steps() == [6, 8]


def test_a_training_that_saves_nothing_starts_beside_checkpoints(output: Path) -> None:
    new_trainer(transformers.Trainer, output, save_steps=4, max_steps=4).train()
    for resume, started in (None, [0, 1, 2, 3, 4, 5]), (str(output / "checkpoint-4"), [4, 5]):
        trainer = new_trainer(tl.transformers.Trainer, output, save_strategy="no", max_steps=6)
        steps = started_steps(trainer)
        trainer.train(resume_from_checkpoint=resume)
        assert steps == started
        assert trainer.checkpointer.steps() == [6, 8]


def test_a_training_that_saves_on_sigterm_alone_does_not_start_over(output: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer = new_trainer(tl.transformers.Trainer, output, save_strategy="no", enable_jit_checkpoint=True)
        with pytest.raises(FileExistsError, match="steps 6, 8"):
            trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_training_twice_does_not_start_over_by_itself(output: Path) -> None:
    trainer = new_trainer(tl.transformers.Trainer, output)
    trainer.train(resume_from_checkpoint=True)
    with pytest.raises(FileExistsError, match="steps 6, 8"):
        trainer.train()


class Interrupt(transformers.TrainerCallback):  # type: ignore[misc]
    """Ctrl-C while the checkpoint of a step is written in the background."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("again", ["the same trainer", "another one"])
def test_a_save_that_is_still_under_way_counts_when_the_training_starts_again(
    tmp_path: Path, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell of a notebook, after Ctrl-C while the first checkpoint was written."""
    faults = tl.Faults()
    faults.hold("write", 0)
    checkpointer = tl.Checkpointer(tmp_path / "checkpoints", engine=tl.Engine(faults=faults))
    trainer = new_trainer(
        tl.transformers.Trainer, tmp_path, save_steps=2, callbacks=[Interrupt(2)], checkpointer=checkpointer
    )
    other = new_trainer(tl.transformers.Trainer, tmp_path, save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    join = tl.SaveHandle._join

    def written_while_joined(handle: Any) -> None:
        faults.release()
        join(handle)

    monkeypatch.setattr(tl.SaveHandle, "_join", written_while_joined)
    trainer = trainer if again == "the same trainer" else other
    steps = started_steps(trainer)
    with pytest.raises(FileExistsError, match=r"cannot start training at step 0: .* step 2, "):
        trainer.train(resume_from_checkpoint=False)  # decided before the first checkpoint existed
    assert steps == []


@pytest.mark.parametrize("again", ["the same trainer", "a new one"])
def test_a_failed_save_of_an_interrupted_training_does_not_end_the_next(tmp_path: Path, again: str) -> None:
    faults = tl.Faults()
    faults.hold("sync", 0, 1)
    faults.fail("sync", 0, errno.ENOSPC)
    checkpointer = tl.Checkpointer(tmp_path / "checkpoints", engine=tl.Engine(faults=faults))
    trainer = new_trainer(
        tl.transformers.Trainer, tmp_path, save_steps=2, callbacks=[Interrupt(2)], checkpointer=checkpointer
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    faults.release()
    trainer.remove_callback(Interrupt)
    if again == "a new one":
        del trainer, checkpointer
        gc.collect()
        trainer = new_trainer(tl.transformers.Trainer, tmp_path, save_steps=2)
    with pytest.warns(RuntimeWarning, match="saving step 2 .*ENOSPC.*this training starts without") as warned:
        trainer.train()
    (warning,) = (each for each in warned if "starts without" in str(each.message))
    assert warning.filename == __file__
    assert trainer.checkpointer.latest() == 8


def test_fresh_sets_the_earlier_training_aside(output: Path, reference: Any) -> None:
    checkpointer = tl.Checkpointer(output / "checkpoints", keep=2, fresh=True)
    trainer = new_trainer(tl.transformers.Trainer, output, save_steps=4, checkpointer=checkpointer)
    trainer.train()
    assert_same_weights(trainer, reference)
    assert checkpointer.steps() == [4, 8]
    (aside,) = (output / "checkpoints").glob("aside-*")
    assert tl.Checkpointer(aside).steps() == [6, 8]
    trainer.train()
    assert checkpointer.steps() == [4, 8]
    assert len(list((output / "checkpoints").glob("aside-*"))) == 2, "each training that starts over does"


def test_with_fresh_each_training_that_starts_over_sets_the_one_before_aside(output: Path) -> None:
    directory = output / "checkpoints"
    checkpointer = tl.Checkpointer(directory, fresh=True)
    with pytest.warns(RuntimeWarning, match="fresh=True has no effect"):
        checkpointer.load()  # to look at it; the training does not continue from this
    trainer = new_trainer(
        tl.transformers.Trainer, output, checkpointer=checkpointer, save_steps=2, max_steps=4
    )
    for count, known in (1, [6, 8]), (2, [2, 4]):
        trainer.train()
        assert checkpointer.steps() == [2, 4]
        aside = sorted(directory.glob("aside-*"), key=lambda path: path.stat().st_ctime_ns)
        assert len(aside) == count
        assert tl.Checkpointer(aside[-1]).steps() == known
    trainer.train(resume_from_checkpoint=True)
    assert len(list(directory.glob("aside-*"))) == 2


@pytest.mark.parametrize("given", ["run/ck", Path("run/ck"), True, {}])
def test_a_checkpointer_of_another_type(tmp_path: Path, given: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^checkpointer: must be a trunkline.Checkpointer or None, not "
    ) as caught:
        new_trainer(tl.transformers.Trainer, tmp_path, checkpointer=given)
    assert ("pass trunkline.Checkpointer('run/ck')" in str(caught.value)) == isinstance(given, str | Path)


@pytest.mark.parametrize(("limit", "keep"), [(2, 3), (2, None), (2, 2), (None, 3)])
def test_a_limit_that_the_checkpointer_does_not_use(
    tmp_path: Path, limit: int | None, keep: int | None
) -> None:
    checkpointer = tl.Checkpointer(tmp_path / "checkpoints", keep=keep)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        new_trainer(tl.transformers.Trainer, tmp_path, checkpointer=checkpointer, save_total_limit=limit)
    said = [str(each.message) for each in caught if "save_total_limit has no effect" in str(each.message)]
    assert len(said) == (limit is not None and limit != keep)
    assert all(f"keep={keep}" in text for text in said)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-00000006", "step-6"])
def test_paths_of_our_checkpoints_resume_from_them(output: Path, name: str, reference: Any) -> None:
    trainer = new_trainer(tl.transformers.Trainer, output)
    steps = started_steps(trainer)
    trainer.train(resume_from_checkpoint=str(output / name))
    assert steps == ([] if name == "checkpoints" else [6, 7])
    assert_same_weights(trainer, reference)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-00000006", True])
def test_a_relative_output_dir_means_what_it_meant_when_the_trainer_was_made(
    output: Path, name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = new_trainer(tl.transformers.Trainer, Path(output.name))
    steps = started_steps(trainer)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    stock = stock_folder(output, 9)
    with pytest.raises(FileExistsError, match=f"'{stock}' for the former"):
        trainer.train(resume_from_checkpoint=True)
    shutil.rmtree(stock)
    with pytest.raises(FileNotFoundError, match=f"it is the output_dir; .* in {output}/checkpoints "):
        trainer.train(resume_from_checkpoint=str(output))
    with pytest.raises(FileExistsError, match=f"at step 0: {output}/checkpoints already holds"):
        trainer.train()
    trainer.train(resume_from_checkpoint=name if name is True else str(output / name))
    assert steps == ([6, 7] if name == "checkpoints/step-00000006" else [])
    assert list(Path.cwd().iterdir()) == []


def test_a_step_that_is_not_there_is_said_to_be_missing(output: Path) -> None:
    for name, why in (
        ("step-00000007", "no checkpoint of step 7; it has steps 6, 8"),
        ("step-7", "checkpoints: 6, 8. Pass"),
    ):
        with pytest.raises(FileNotFoundError, match=why):
            new_trainer(tl.transformers.Trainer, output).train(
                resume_from_checkpoint=str(output / "checkpoints" / name)
            )


def test_digits_resume_from_a_step(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(output)
    trainer = new_trainer(tl.transformers.Trainer, output)
    steps = started_steps(trainer)
    trainer.train(resume_from_checkpoint="6")  # as a command line has it
    assert steps == [6, 7]
    (output / "6").mkdir()
    with pytest.raises(FileNotFoundError, match="6 is not a checkpoint of transformers.Trainer"):
        new_trainer(tl.transformers.Trainer, output).train(resume_from_checkpoint="6")


@pytest.mark.parametrize(
    ("name", "why", "example"),
    [
        ("", "it is the output_dir", 8),
        ("checkpoint-6", "it does not exist", 6),
        ("checkpoint-9", "it has no trainer_state.json", 8),
        ("elsewhere", "it does not exist", 8),
    ],
)
def test_paths_that_are_no_checkpoints_are_told_where_they_are(
    output: Path, name: str, why: str, example: int
) -> None:
    (output / "checkpoint-9").mkdir()
    trainer = new_trainer(tl.transformers.Trainer, output)
    steps = started_steps(trainer)
    with pytest.raises(FileNotFoundError) as caught:
        trainer.train(resume_from_checkpoint=str(output / name))
    text = str(caught.value)
    assert (
        f"resume_from_checkpoint: {output / name} is not a checkpoint of transformers.Trainer: {why}" in text
    )
    assert f"{output / 'checkpoints'} (steps 6, 8)" in text
    assert f"resume_from_checkpoint={example}" in text
    assert steps == []


def test_checkpoints_of_another_directory_are_refused(output: Path, tmp_path: Path) -> None:
    trainer = new_trainer(tl.transformers.Trainer, tmp_path / "new")
    for name in ("checkpoints", "checkpoints/step-00000006"):
        with pytest.raises(ValueError, match=r"^resume_from_checkpoint: .*Checkpointer\("):
            trainer.train(resume_from_checkpoint=str(output / name))


@pytest.mark.parametrize(
    "state", ["", "{}", "[]", '{"global_step": 1e999}', pytest.param("[" * 100_000, id="nested")]
)
def test_the_step_of_a_stock_folder_with_a_damaged_state_is_in_its_name(tmp_path: Path, state: str) -> None:
    from trunkline.transformers import _resume

    (stock_folder(tmp_path, 7) / "trainer_state.json").write_text(state)
    assert _resume._stock_step(tmp_path / "checkpoint-7") == 7


@pytest.mark.parametrize("ours", [True, False])
def test_the_newest_is_ambiguous_beside_a_newer_stock_folder(output: Path, ours: bool) -> None:
    for number in (9, 10):
        stock_folder(output, number)
    (output / "checkpoint-11").mkdir()  # cut off: nothing can continue from it
    if not ours:
        shutil.rmtree(output / "checkpoints")
    trainer = new_trainer(tl.transformers.Trainer, output)
    with pytest.raises(FileExistsError) as caught:
        trainer.train(resume_from_checkpoint=True)
    assert f"resume_from_checkpoint='{output / 'checkpoint-10'}'" in str(caught.value)
    assert ("resume_from_checkpoint=8" in str(caught.value)) == ours
    assert ("contains only checkpoints of a stock Trainer" in str(caught.value)) != ours
    for number in (9, 10):
        (output / f"checkpoint-{number}").rename(output / f"checkpoint-{number - 6}")
    for number in (3, 4):  # from before
        os.utime(output / f"checkpoint-{number}" / "trainer_state.json", (0, 0))
    if ours:
        trainer.train(resume_from_checkpoint=True)


def test_the_newest_is_ambiguous_beside_a_stock_folder_that_was_saved_later(output: Path) -> None:
    stock_folder(output, 3)
    os.utime(output / "checkpoint-3" / "trainer_state.json", (0, 0))
    stock = stock_folder(output, 2)  # of a stock Trainer that started over
    in_an_hour = time.time() + 3600
    os.utime(stock / "trainer_state.json", (in_an_hour, in_an_hour))
    trainer = new_trainer(tl.transformers.Trainer, output)
    with pytest.raises(FileExistsError, match=r"checkpoint-2 of a stock Trainer was saved after step 8"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.checkpointer.latest() == 8
    trainer.train(resume_from_checkpoint=8)


def incomplete_folder(output: Path, step: int) -> Path:
    """As a stock Trainer with enable_jit_checkpoint leaves it when it is killed while it saves."""
    folder = stock_folder(output, step)
    (folder / "model.safetensors").write_bytes(b"half")
    (folder / "checkpoint-is-incomplete.txt").touch()
    return folder


def test_an_incomplete_stock_folder_is_not_taken_for_a_newer_checkpoint(output: Path, reference: Any) -> None:
    incomplete_folder(output, 10)
    trainer = new_trainer(tl.transformers.Trainer, output)
    trainer.train(resume_from_checkpoint=True)
    assert_same_weights(trainer, reference)


def test_evaluation_draws_random_numbers_too(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3}
    stock = new_trainer(transformers.Trainer, tmp_path / "stock", **options)
    stock.train()
    crashed(tmp_path / "ours", 5, **options)
    trainer = new_trainer(tl.transformers.Trainer, tmp_path / "ours", **options)
    trainer.train(resume_from_checkpoint=True)
    assert_same_weights(trainer, stock)


def test_the_limit_and_the_directory_are_those_of_the_arguments(tmp_path: Path) -> None:
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, save_steps=1, save_total_limit=2)
    trainer.train()
    assert trainer.checkpointer.steps() == [STEPS - 1, STEPS]
    assert trainer.checkpointer.directory == tmp_path / "checkpoints"
    state = trainer.checkpointer.load()
    assert sorted(state) == ["files", "model", "optimizer", "scheduler"]
    assert json.loads(state["files"]["trainer_state.json"])["global_step"] == STEPS
    trainer.save_model()  # as ever
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, trainer.model.lm_head.weight)


class LazyFlag(Flag):
    """Set by the save's thread only once somebody waits for it: the copy is made as late as it can be."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.wanted.set()
        return super().wait(timeout)


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Background saves copy nothing until somebody waits for them."""
    monkeypatch.setattr(saving, "Flag", LazyFlag)
    begin = step_save.StepSave.begin

    def begin_late(job: Any) -> Any:
        (handle,) = saving._under_way
        while not (handle._staged.wanted.wait(0.01) or handle._done.wanted.is_set()):
            pass
        return begin(job)

    monkeypatch.setattr(step_save.StepSave, "begin", begin_late)


def add_one(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


class Meddle(transformers.TrainerCallback):  # type: ignore[misc]
    """Changes the weights in one event after a save."""

    def __init__(self, event: str) -> None:
        self.saved: dict[int, Any] = {}
        setattr(self, event, self.change)

    def change(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        add_one(kwargs["model"])


class KeepsCopies(tl.transformers.Trainer):  # type: ignore[misc, name-defined]
    """Notes what each checkpoint must hold."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.expected = getattr(self, "expected", {})
        state = self.model.state_dict()
        self.expected[self.state.global_step] = {name: value.clone() for name, value in state.items()}
        super()._save_checkpoint(model, trial)


def assert_holds_what_was_saved(trainer: Any, steps: list[int]) -> None:
    assert trainer.checkpointer.steps() == steps
    for step in steps:
        saved = trainer.checkpointer.load(step)["model"]
        wrong = [name for name in saved if not torch.equal(saved[name], trainer.expected[step][name])]
        assert wrong == [], f"step {step}"


@pytest.mark.parametrize("event", ["on_save", "on_train_end", "on_step_begin", "on_epoch_begin"])
def test_callbacks_may_change_the_weights(tmp_path: Path, event: str, late_copies: None) -> None:
    trainer = new_trainer(KeepsCopies, tmp_path, callbacks=[Meddle(event)], save_steps=4)
    trainer.train()
    assert_holds_what_was_saved(trainer, [4, 8])


@pytest.mark.parametrize("where", ["backward", "forward", "optimizer"])
def test_code_in_a_step_may_change_the_weights(tmp_path: Path, where: str, late_copies: None) -> None:
    """As layer-wise optimizers, momentum encoders and schedule-free optimizers do."""
    trainer = new_trainer(KeepsCopies, tmp_path, save_steps=4)
    if where == "backward":

        def step(parameter: Any) -> None:
            parameter.data.add_(parameter.grad, alpha=-0.1)

        for parameter in trainer.model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    elif where == "forward":
        trainer.model.register_forward_pre_hook(lambda model, inputs: add_one(model))
    else:
        trainer.create_optimizer().train = lambda: add_one(trainer.model)
    trainer.train()
    assert_holds_what_was_saved(trainer, [4, 8])


def test_the_weights_may_change_after_an_interrupted_training(tmp_path: Path, late_copies: None) -> None:
    class Interrupt(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    trainer = new_trainer(KeepsCopies, tmp_path, callbacks=[Interrupt()], save_steps=4)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    add_one(trainer.model)
    trainer.checkpointer.wait()
    assert_holds_what_was_saved(trainer, [4])


def test_a_save_that_is_interrupted_before_the_copy_is_given_up(
    tmp_path: Path, late_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(handle: Any, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tl.SaveHandle, "wait_staged", interrupted)
    trainer = new_trainer(KeepsCopies, tmp_path, save_steps=4)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    add_one(trainer.model)
    assert trainer.checkpointer.steps() == []


def test_errors_of_saving_end_the_training(tmp_path: Path) -> None:
    faults = tl.Faults()
    faults.fail("sync", 0, 28)
    checkpointer = tl.Checkpointer(tmp_path / "here", engine=tl.Engine(faults=faults))
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, checkpointer=checkpointer)
    with pytest.raises(tl.Error, match="ENOSPC"):
        trainer.train()
    assert checkpointer.latest() is None


def test_an_error_of_the_last_save_is_raised_by_train(tmp_path: Path) -> None:
    faults = tl.Faults()
    faults.fail("sync", 0, 28, 100)
    checkpointer = tl.Checkpointer(tmp_path / "here", engine=tl.Engine(faults=faults))
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, checkpointer=checkpointer, save_steps=STEPS)
    with pytest.raises(tl.Error, match="ENOSPC"):
        trainer.train()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_none_keeps_all(tmp_path: Path, limit: int) -> None:
    options = {"save_total_limit": limit, **BEST}
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, **options, save_steps=2)
    trainer.train()
    assert trainer.checkpointer.steps() == [2, 4, 6, 8]
    checkpointer = tl.Checkpointer(tmp_path / "here", keep=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        new_trainer(tl.transformers.Trainer, tmp_path, **options, checkpointer=checkpointer)


BEST: dict[str, Any] = {"metric_for_best_model": "eval_loss", "eval_strategy": "steps", "eval_steps": 1}


def best_at_first(trainer: Any) -> Any:
    """Let the first evaluation be the best."""
    evaluate = trainer.evaluate

    def worse_and_worse(*args: Any, **kwargs: Any) -> Any:
        return evaluate(*args, **kwargs) | {"eval_loss": float(trainer.state.global_step)}

    trainer.evaluate = worse_and_worse
    return trainer


def test_a_limit_does_not_remove_the_best_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(tl.Unsupported, match=r"save_total_limit=2 .*save_total_limit=None.*keep=2"):
        new_trainer(tl.transformers.Trainer, tmp_path, save_steps=1, save_total_limit=2, **BEST)
    new_trainer(
        tl.transformers.Trainer, tmp_path, save_strategy="best", save_total_limit=2, **BEST
    )  # whose last checkpoint is the best
    checkpointer = tl.Checkpointer(tmp_path / "here", keep=2)
    with pytest.warns(RuntimeWarning, match=r"metric_for_best_model='eval_loss': .*keep=2.*keep=None"):
        new_trainer(tl.transformers.Trainer, tmp_path, checkpointer=checkpointer, **BEST)


def test_keep_best_keeps_the_best_of_the_evaluations(tmp_path: Path) -> None:
    checkpointer = tl.Checkpointer(tmp_path / "here", keep=1, keep_best=("eval_loss", "min", 2))
    options = {"save_steps": 1, "max_steps": 5, "checkpointer": checkpointer, **BEST}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer = best_at_first(new_trainer(tl.transformers.Trainer, tmp_path, **options))
    trainer.train()
    assert checkpointer.steps() == [1, 2, 5]
    assert checkpointer.best() == 1
    assert checkpointer.metrics(5)["eval_loss"] == 5.0


def test_a_metric_that_the_evaluation_lacks_ends_the_training_before_anything_is_removed(
    tmp_path: Path,
) -> None:
    checkpointer = tl.Checkpointer(tmp_path / "here", keep=1, keep_best=("loss", "min", 2))
    options = {"save_steps": 1, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, checkpointer=checkpointer, **options)
    with pytest.raises(ValueError, match=r"keep_best: 'loss' is not among .*'eval_loss'"):
        trainer.train()
    checkpointer.wait()
    assert checkpointer.steps() == [1]


def test_keep_best_without_evaluations_is_warned_of(tmp_path: Path) -> None:
    checkpointer = tl.Checkpointer(tmp_path / "here", keep=1, keep_best=("eval_loss", "min", 2))
    with pytest.warns(RuntimeWarning, match="does not evaluate"):
        new_trainer(tl.transformers.Trainer, tmp_path, checkpointer=checkpointer)


def test_the_best_checkpoint_is_known_by_its_step(tmp_path: Path) -> None:
    options = {"save_steps": 1, "max_steps": 5, **BEST}
    trainer = best_at_first(new_trainer(tl.transformers.Trainer, tmp_path, **options))
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert trainer.state.best_model_checkpoint is None
    assert trainer.checkpointer.steps() == [1, 2, 3, 4, 5]
    for step in trainer.checkpointer.steps():
        saved = json.loads(trainer.checkpointer.load(step)["files"]["trainer_state.json"])
        assert saved["best_model_checkpoint"] is None
        assert saved["best_global_step"] == 1
    again = best_at_first(new_trainer(tl.transformers.Trainer, tmp_path, **options | {"max_steps": 6}))
    again.train(resume_from_checkpoint=True)
    assert again.state.best_global_step == 1
    assert again.state.best_metric == 1.0


def test_training_ends_well_beside_stock_folders_with_a_limit(tmp_path: Path) -> None:
    options = {"save_steps": 3, **BEST}
    best_at_first(new_trainer(transformers.Trainer, tmp_path, **options, max_steps=6)).train()
    checkpointer = tl.Checkpointer(tmp_path / "checkpoints", keep=1)
    trainer = new_trainer(
        tl.transformers.Trainer, tmp_path, **options, checkpointer=checkpointer, save_total_limit=1
    )
    trainer.evaluate = lambda *args, **kwargs: {"eval_loss": -1.0}  # the new one is the best
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.checkpointer.steps() == [8]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


def test_train_waits_for_its_last_save_when_it_fails(tmp_path: Path) -> None:
    class Fail(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise RuntimeError("at the end")

    trainer = new_trainer(tl.transformers.Trainer, tmp_path, callbacks=[Fail()])
    with pytest.raises(RuntimeError, match="at the end"):
        trainer.train()
    assert trainer.checkpointer._last.done()


def test_a_preempted_training_leaves_a_durable_step_and_no_stock_folder(
    tmp_path: Path, reference: Any
) -> None:
    class Preempt(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (manager,) = managers
            assert state.global_step <= 5
            manager.is_checkpoint_requested = state.global_step == 5  # as SIGTERM does, some seconds later

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert trainer.checkpointer._last.done()

    before = signal.getsignal(signal.SIGTERM)
    options = {"enable_jit_checkpoint": True, "save_strategy": "no"}
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, **options)
    callbacks = trainer.callback_handler.callbacks
    managers = [each.jit_manager for each in callbacks if hasattr(each, "jit_manager")]
    callbacks.insert(0, Preempt())
    try:
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert trainer.checkpointer.steps() == [5]
    assert not list(tmp_path.glob("checkpoint-*"))
    again = new_trainer(tl.transformers.Trainer, tmp_path, save_strategy="no")
    again.train(resume_from_checkpoint=True)
    assert_same_weights(again, reference)


@pytest.mark.parametrize("failing", ["the save before", "its own save"])
def test_a_preempted_training_saves_although_a_save_fails(tmp_path: Path, failing: str) -> None:
    """It is the last occasion: what could be raised later, or tried again, would come too late."""
    faults = tl.Faults()
    at = 4 if failing == "the save before" else 5

    class Preempt(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == at:
                checkpointer.wait()  # what it has synced so far is counted
                faults.fail("sync", faults.commands("sync"), errno.ENOSPC)
                if at == 4:  # in the background, after the copy
                    faults.hold("sync", faults.commands("sync"), 1)
            if state.global_step == 5:
                faults.release()
            manager.is_checkpoint_requested = state.global_step == 5

    before = signal.getsignal(signal.SIGTERM)
    checkpointer = tl.Checkpointer(tmp_path / "checkpoints", engine=tl.Engine(faults=faults))
    options = {"enable_jit_checkpoint": True, "save_steps": 2, "checkpointer": checkpointer}
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, **options)
    callbacks = trainer.callback_handler.callbacks
    (manager,) = (each.jit_manager for each in callbacks if hasattr(each, "jit_manager"))
    callbacks.insert(0, Preempt())
    try:
        with pytest.warns(RuntimeWarning, match="step 5 was saved at the second attempt; .*ENOSPC"):
            trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert checkpointer.steps() == ([2, 5] if at == 4 else [2, 4, 5])
    checkpointer.verify(5)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("jit", [False, True])
def test_the_mark_of_an_incomplete_stock_folder_stays(tmp_path: Path, jit: bool) -> None:
    """Otherwise code that looks for the last checkpoint would mistake the partial one for complete."""
    folder = incomplete_folder(tmp_path, 2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    before = signal.getsignal(signal.SIGTERM)
    try:
        new_trainer(
            tl.transformers.Trainer, tmp_path, save_steps=2, max_steps=2, enable_jit_checkpoint=jit
        ).train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


TRAINER = ("torch", "transformers.trainer", "accelerate")

PREEMPT_ONE_RANK = """
import os, sys
import torch
import transformers
import trunkline as tl
from test_transformers import new_trainer

class Preempt(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            torch.distributed.barrier()  # the save before is staged on both
            faults.release()
            if os.environ["RANK"] == "0":
                manager._enable_checkpoint()  # as its timer does, some seconds after SIGTERM

torch.distributed.init_process_group("gloo")
faults = tl.Faults()
fails = sys.argv[2] == "the save before"
if fails and os.environ["RANK"] == "0":  # which writes all
    faults.hold("write", 0)
    faults.fail("sync", 0, 28)
checkpointer = tl.Checkpointer(os.path.join(sys.argv[1], "checkpoints"), engine=tl.Engine(faults=faults))
options = {"enable_jit_checkpoint": True, "save_steps": 3, "ddp_timeout": 60, "checkpointer": checkpointer}
trainer = new_trainer(tl.transformers.Trainer, sys.argv[1], callbacks=[Preempt()], **options)
(manager,) = (each.jit_manager for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager"))
trainer.train()
assert trainer.checkpointer.steps() == ([4] if fails else [3, 4]), trainer.checkpointer.steps()
torch.distributed.destroy_process_group()  # its threads end now, not at any moment of the exit
"""


@pytest.mark.parametrize("failing", ["nothing", "the save before"])
def test_ranks_agree_on_the_step_of_a_preemption(tmp_path: Path, failing: str) -> None:
    """SIGTERM may reach one rank only, or each at another step; and the save before may have failed."""
    script = tmp_path / "preempt.py"
    script.write_text(PREEMPT_ONE_RANK)
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [script, tmp_path / "run", failing]
    for rank in support_warm.run_ranks(command, modules=TRAINER, env=environment, timeout=240):
        assert rank.returncode == 0, rank.stdout + rank.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("lacks", ["a manager", "_enable_checkpoint", "is_checkpoint_requested", "nothing"])
def test_ranks_that_cannot_agree_on_a_preemption_are_refused(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of transformers may make its checkpoint in another way."""
    from trunkline.transformers._preemption import AgreedPreemption, agree_on_preemption

    parts = {"_enable_checkpoint": print, "is_checkpoint_requested": False}
    parts.pop(lacks, None)
    manager = None if lacks == "a manager" else SimpleNamespace(**parts)
    callbacks: list[Any] = [SimpleNamespace(), SimpleNamespace(jit_manager=manager)]
    args = SimpleNamespace(enable_jit_checkpoint=True, world_size=2)
    trainer = SimpleNamespace(args=args, callback_handler=SimpleNamespace(callbacks=callbacks))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    if lacks != "nothing":
        with pytest.raises(
            tl.Unsupported,
            match="enable_jit_checkpoint with several ranks: the CheckpointManager of transformers 5",
        ):
            agree_on_preemption(trainer)
        args.world_size = 1
    agree_on_preemption(trainer)
    assert len(callbacks) == (3 if lacks == "nothing" else 2)
    assert isinstance(callbacks[0], AgreedPreemption) == (lacks == "nothing")


def test_ranks_that_do_not_know_of_each_other_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(
        tl.transformers.Trainer, tmp_path
    )  # before torchrun's variable: accelerate heeds it
    monkeypatch.setenv("WORLD_SIZE", "2")
    from trunkline.transformers._trainer import _check_supported

    with pytest.raises(ValueError, match=r"2 ranks, but the Trainer knows of 1.*use_cpu=True"):
        _check_supported(trainer)


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tl.Unsupported, match="push_to_hub with a hub_strategy"):
        new_trainer(tl.transformers.Trainer, tmp_path, push_to_hub=True, hub_strategy="every_save")
    assert not tmp_path.joinpath("checkpoints").exists()


def test_a_logger_that_uploads_checkpoints_is_refused(tmp_path: Path) -> None:
    integration = transformers.integrations.integration_utils
    callback = object.__new__(integration.WandbCallback)  # as made where wandb is installed
    callback._log_model = integration.WandbLogModel.CHECKPOINT
    with pytest.raises(
        tl.Unsupported, match=r"WANDB_LOG_MODEL=checkpoint \(WandbCallback\) needs the checkpoints"
    ):
        new_trainer(tl.transformers.Trainer, tmp_path, callbacks=[callback])
    callback._log_model = integration.WandbLogModel.END
    new_trainer(tl.transformers.Trainer, tmp_path, callbacks=[callback])


@pytest.mark.parametrize("begins", ["when it is made", "later"])
def test_checkpoints_are_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str) -> None:
    created: list[Any] = []
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda *_, **__: created.append(1))
    options = {} if begins == "later" else {"push_to_hub": True, "hub_strategy": "end"}
    with pytest.raises(tl.Unsupported, match=r"would upload the checkpoints .*out-checkpoints"):
        new_trainer(tl.transformers.Trainer, tmp_path / "out", **options).push_to_hub()
    assert created == []
    elsewhere = tl.Checkpointer(tmp_path / "elsewhere")
    new_trainer(
        tl.transformers.Trainer,
        tmp_path / "out",
        checkpointer=elsewhere,
        push_to_hub=True,
        hub_strategy="end",
    )
    assert created == [1]


def test_resuming_from_the_newest_of_none_names_the_way_out(tmp_path: Path) -> None:
    trainer = new_trainer(tl.transformers.Trainer, tmp_path, max_steps=1)
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet") as caught:
        trainer.train(resume_from_checkpoint=True)
    idiom = "resume_from_checkpoint=trainer.checkpointer.latest() is not None"
    assert str(caught.value).endswith(idiom)
    assert caught.value.filename == str(tmp_path / "checkpoints")
    exec(f"trainer.train({idiom})", {"trainer": trainer})
    assert trainer.state.global_step == 1


RUN_EXAMPLE = """
import runpy, sys
script, directory = sys.argv[1:]
for name, *more in ["whole"], ["halves", "--stop-after", "3"], ["halves"]:
    sys.argv = [script, "--directory", f"{directory}/{name}", "--steps", "6", "--hidden", "32", *more]
    runpy.run_path(script, run_name="__main__")
"""


def test_example_under_torchrun(tmp_path: Path) -> None:
    """Two ranks, stopped after some steps and started again, end as two ranks that were not stopped."""
    script = tmp_path / "run_example.py"
    script.write_text(RUN_EXAMPLE)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, script, EXAMPLE, tmp_path],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("resumed after step") == 1
    assert "resumed after step 3" in done.stdout
    whole, halves = (
        tl.Checkpointer(tmp_path / name / "checkpoints", process_group=False) for name in ("whole", "halves")
    )
    assert whole.latest() == halves.latest() == 6
    ours, theirs = halves.load(), whole.load()
    assert {"rng_state_0.pth", "rng_state_1.pth"} < ours["files"].keys()
    assert ours["files"]["rng_state_0.pth"] != ours["files"]["rng_state_1.pth"]
    changed = [name for name in ours["model"] if not torch.equal(ours["model"][name], theirs["model"][name])]
    assert changed == []
