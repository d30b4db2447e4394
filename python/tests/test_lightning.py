"""trunkline.lightning.CheckpointIO in the real Lightning."""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support_warm

import trunkline as tl
from trunkline._tensor_io.flag import Flag
from trunkline.checkpoint import first_rank
from trunkline.checkpoint.ranks.store import RankStore, value_of

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    lightning = pytest.importorskip("lightning", reason="needs Lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    loggers = pytest.importorskip("lightning.pytorch.loggers")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on numbers of workers and loggers

STEPS = 12


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A model with buffers, a momentum and a schedule: what is not restored shows in the weights."""

    def __init__(self, width: int = 8, note: Any = "plain") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.body(batch[0]).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def batches() -> Any:
    """Three to an epoch: Lightning resumes at epochs."""
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4)


def new_model(**arguments: Any) -> Model:
    torch.manual_seed(0)
    return Model(**arguments)


def new_trainer(
    directory: Path, plugin: Any, *, steps: int = STEPS, logger: Any = False, **options: Any
) -> Any:
    saver = callbacks.ModelCheckpoint(
        dirpath=directory, filename="{step}", every_n_train_steps=3, **({"save_top_k": -1} | options)
    )
    return lightning.Trainer(
        accelerator="cpu",
        plugins=[] if plugin is None else [plugin],
        callbacks=[saver],
        max_steps=steps,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )


def same_weights(one: Model, other: Model) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model trained by stock Lightning."""
    model = new_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new_trainer(tmp_path_factory.mktemp("reference"), None).fit(model, batches())
    return model


@pytest.mark.parametrize("background", [False, True])
def test_resumed_run_ends_as_an_uninterrupted_one(background: bool, tmp_path: Path, reference: Model) -> None:
    plugin = tl.lightning.CheckpointIO(background=background)
    new_trainer(tmp_path, plugin, steps=6).fit(new_model(), batches())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=3.ckpt", "step=6.ckpt"]

    model = new_model()
    new_trainer(tmp_path, plugin).fit(model, batches(), ckpt_path=tmp_path / "step=6.ckpt")
    assert model.losses == reference.losses[6:]
    assert same_weights(model, reference)


def test_files_are_those_of_stock_lightning(tmp_path: Path, reference: Model) -> None:
    new_trainer(tmp_path / "ours", tl.lightning.CheckpointIO(background=True), steps=6).fit(
        new_model(), batches()
    )
    stock = torch.load(tmp_path / "ours" / "step=6.ckpt", weights_only=True)
    assert stock["global_step"] == 6
    loaded = Model.load_from_checkpoint(tmp_path / "ours" / "step=6.ckpt")
    assert loaded.hparams.width == 8
    model = new_model()
    new_trainer(tmp_path / "ours", None).fit(model, batches(), ckpt_path=tmp_path / "ours" / "step=6.ckpt")
    assert same_weights(model, reference)

    new_trainer(tmp_path / "stock", None, steps=6).fit(new_model(), batches())
    model = new_model()
    new_trainer(tmp_path / "stock", tl.lightning.CheckpointIO()).fit(
        model, batches(), ckpt_path=tmp_path / "stock" / "step=6.ckpt"
    )
    assert same_weights(model, reference)


def test_background_copies_before_training_goes_on(tmp_path: Path) -> None:
    plugin = tl.lightning.CheckpointIO(background=True)
    weight = torch.ones(1 << 20)
    plugin.save_checkpoint({"weight": weight}, tmp_path / "new" / "a.ckpt")
    weight.zero_()
    assert plugin.load_checkpoint(tmp_path / "new" / "a.ckpt")["weight"].eq(1).all()


def test_only_the_last_one_stays(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, tl.lightning.CheckpointIO(background=True), save_top_k=1, save_last=True)
    trainer.fit(new_model(), batches())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", f"step={STEPS}.ckpt"]
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == STEPS


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("target", ["file", "nothing", "folder"])
def test_a_link_is_replaced_and_what_it_leads_to_stays(
    background: bool, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tl.lightning.CheckpointIO(background=background)
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    if target == "file":
        plugin.save_checkpoint({"global_step": 4}, best)
    if target == "folder":
        best.mkdir()
    last.symlink_to("best.ckpt")
    monkeypatch.chdir(tmp_path)
    plugin.save_checkpoint({"global_step": 10}, "last.ckpt")
    plugin.teardown()
    assert torch.load(last) == {"global_step": 10}
    assert not last.is_symlink()
    if target == "file":
        assert torch.load(best) == {"global_step": 4}
    names = ["last.ckpt"] if target == "nothing" else ["best.ckpt", "last.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


class GetsBetterThenWorse(Model):
    """The second epoch is the best one."""

    def on_train_epoch_end(self) -> None:
        self.log("val", float(abs(self.current_epoch - 1)))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("save_last", ["link", True])
def test_the_best_one_stays_when_a_run_with_a_link_is_resumed(
    background: bool, save_last: str | bool, tmp_path: Path
) -> None:
    def fit(epochs: int, ckpt_path: Path | None, save_last: str | bool) -> None:
        saver = callbacks.ModelCheckpoint(tmp_path, monitor="val", save_top_k=1, save_last=save_last)
        torch.manual_seed(0)
        lightning.Trainer(
            accelerator="cpu",
            plugins=[tl.lightning.CheckpointIO(background=background)],
            callbacks=[saver],
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(GetsBetterThenWorse(), batches(), ckpt_path=ckpt_path)
        best = Path(saver.best_model_path)
        assert best.name == "epoch=1-step=6.ckpt"
        assert torch.load(best, weights_only=True)["global_step"] == 6

    fit(2, None, "link")
    assert (tmp_path / "last.ckpt").readlink() == Path("epoch=1-step=6.ckpt")
    fit(4, tmp_path / "last.ckpt", save_last)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] > 6


class GetsBetter(Model):
    """Each epoch is better than the one before."""

    def on_train_epoch_end(self) -> None:
        self.log("val", 1 / (1 + self.current_epoch))


def test_a_continued_run_has_the_same_names_as_without_the_plugin(tmp_path: Path) -> None:
    """The target of the link is to be removed while Lightning looks for a free name for the link."""

    def names(folder: str, plugins: list[Any]) -> list[tuple[str, bool]]:
        path = tmp_path / folder
        for epochs in (1, 3, 4):
            lightning.Trainer(
                accelerator="cpu",
                plugins=plugins,
                callbacks=[callbacks.ModelCheckpoint(path, monitor="val", save_top_k=1, save_last="link")],
                max_epochs=epochs,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(GetsBetter(), batches(), ckpt_path=path / "last.ckpt" if epochs > 1 else None)
        return sorted((each.name, each.exists()) for each in path.iterdir())

    stock = names("stock", [])
    assert ("last.ckpt", True) in stock
    assert names("waiting", [tl.lightning.CheckpointIO()]) == stock
    assert names("background", [tl.lightning.CheckpointIO(background=True)]) == stock


@pytest.fixture
def faults() -> Iterator[tl.Faults]:
    made = tl.Faults()
    yield made
    made.release()


@pytest.fixture
def plugin(faults: tl.Faults) -> Any:
    """A plugin whose saves go on in the background, on an engine that takes faults."""
    return tl.lightning.CheckpointIO(background=True, engine=tl.Engine(faults=faults))


def test_the_last_whole_file_stays_until_the_next_is_durable(
    tmp_path: Path, plugin: Any, faults: tl.Faults
) -> None:
    older, newer = tmp_path / "older.ckpt", tmp_path / "newer.ckpt"
    plugin.save_checkpoint({"x": torch.ones(3)}, older)
    plugin.teardown()
    faults.hold("write", faults.commands("write"))
    plugin.save_checkpoint({"x": torch.zeros(3)}, newer)
    plugin.remove_checkpoint(older)
    assert older.exists()
    assert not newer.exists()
    faults.release()
    plugin.teardown()
    assert newer.exists()
    assert not older.exists()


def test_a_link_stays_until_what_replaces_it_is_saved(
    tmp_path: Path, plugin: Any, faults: tl.Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    plugin.save_checkpoint({"global_step": 4}, best)
    plugin.teardown()
    last.symlink_to("best.ckpt")

    def assert_unchanged() -> None:
        assert torch.load(last) == {"global_step": 4}
        assert last.is_symlink()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]

    faults.fail("sync", faults.commands("sync"), 28)
    with pytest.raises(tl.Error, match="ENOSPC"):
        plugin.save_checkpoint({"global_step": 10}, last)
    assert_unchanged()

    def interrupted(path: Path, target: Any) -> None:
        assert torch.load(path) == {"global_step": 10}
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plugin.save_checkpoint({"global_step": 10}, last)
    assert_unchanged()
    plugin.save_checkpoint({"global_step": 10}, last)
    assert torch.load(last) == {"global_step": 10}
    assert torch.load(best) == {"global_step": 4}


def test_a_save_that_is_interrupted_before_the_copy_is_given_up(
    tmp_path: Path, plugin: Any, faults: tl.Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the next cell of a notebook does with the tensors must not get into the file."""
    tensor = torch.ones(3)
    plugin.save_checkpoint({"x": tensor}, tmp_path / "a.ckpt")
    plugin.teardown()

    def interrupted(saving: tl.SaveHandle) -> None:
        monkeypatch.setattr(tl.SaveHandle, "staged", lambda _: False)  # as of a large state
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        faults.hold("write", faults.commands("write"), 1000)
        patches.setattr(plugin, "_await_copy", interrupted)
        threading.Timer(0.2, faults.release).start()
        with pytest.raises(KeyboardInterrupt):
            plugin.save_checkpoint({"x": tensor * 2}, tmp_path / "a.ckpt")
    plugin.teardown()
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["x"], tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    plugin.save_checkpoint({"x": tensor * 3}, tmp_path / "a.ckpt")
    plugin.teardown()
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["x"], tensor * 3)


def test_a_requeue_is_saved_though_the_save_before_failed(
    tmp_path: Path, plugin: Any, faults: tl.Faults
) -> None:
    faults.fail("sync", faults.commands("sync"), 5)
    plugin.save_checkpoint({"x": torch.ones(3)}, tmp_path / "a.ckpt")
    with pytest.warns(RuntimeWarning, match=r"an earlier save failed.*EIO"):
        plugin.save_checkpoint({"x": torch.zeros(3)}, tmp_path / "hpc_ckpt_1.ckpt")
    assert torch.equal(torch.load(tmp_path / "hpc_ckpt_1.ckpt")["x"], torch.zeros(3))


def save_next(plugin: Any, directory: Path) -> None:
    plugin.save_checkpoint({}, directory / "next.ckpt")


def tear_down(plugin: Any, directory: Path) -> None:
    plugin.teardown()


def load_older(plugin: Any, directory: Path) -> None:
    plugin.load_checkpoint(directory / "older.ckpt")


@pytest.mark.parametrize("act", [save_next, tear_down, load_older])
def test_the_last_whole_file_stays_after_an_interrupted_wait(
    act: Callable[[Any, Path], None],
    tmp_path: Path,
    plugin: Any,
    faults: tl.Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C ends the wait for the save, not the save itself; nothing is removed before that is over."""
    oldest, older, newer = (tmp_path / f"{name}.ckpt" for name in ("oldest", "older", "newer"))
    for path in (oldest, older):
        plugin.save_checkpoint({"x": torch.ones(3)}, path)
    plugin.teardown()
    faults.hold("write", faults.commands("write"))
    plugin.save_checkpoint({"x": torch.zeros(3)}, newer)
    plugin.remove_checkpoint(oldest)

    def interrupted(flag: Flag, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return waits(flag, timeout)

    waits = Flag.wait
    with monkeypatch.context() as patch:
        patch.setattr(Flag, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            act(plugin, tmp_path)
    plugin.remove_checkpoint(older)
    assert not newer.exists()
    assert older.exists()
    assert oldest.exists()
    faults.release()
    plugin.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["newer.ckpt"]


@pytest.mark.parametrize("act", [save_next, tear_down])
def test_an_error_in_the_background_surfaces(
    act: Callable[[Any, Path], None], tmp_path: Path, plugin: Any, faults: tl.Faults
) -> None:
    older = tmp_path / "older.ckpt"
    plugin.save_checkpoint({"x": torch.ones(3)}, older)
    plugin.teardown()
    faults.fail("sync", faults.commands("sync"), 5)
    plugin.save_checkpoint({"x": torch.zeros(3)}, tmp_path / "newer.ckpt")
    plugin.remove_checkpoint(older)
    with pytest.raises(tl.Error, match="EIO") as caught:
        act(plugin, tmp_path)
    assert caught.value.errno == 5
    plugin.teardown()  # once is enough
    assert [path.name for path in tmp_path.iterdir()] == ["older.ckpt"]


def test_an_error_in_the_background_ends_the_run(tmp_path: Path, plugin: Any, faults: tl.Faults) -> None:
    faults.fail("sync", 0, 5)
    with pytest.raises(tl.Error, match="EIO"):
        new_trainer(tmp_path, plugin).fit(new_model(), batches())


@pytest.mark.parametrize("name", ["~/runs/last.ckpt", "s3:/bucket/last.ckpt"])
def test_makes_no_folders_with_names_of_homes_and_urls(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="expanduser|is a URL"):
        tl.lightning.CheckpointIO(background=False).save_checkpoint({"state_dict": {}}, name)
    assert list(tmp_path.iterdir()) == []


def test_removes_files_folders_and_nothing(tmp_path: Path) -> None:
    plugin = tl.lightning.CheckpointIO()
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.ckpt" / "shard").touch()
    (tmp_path / "file.ckpt").touch()
    for name in ("folder.ckpt", "file.ckpt", "nothing.ckpt"):
        plugin.remove_checkpoint(tmp_path / name)
    assert not list(tmp_path.iterdir())


def look_for_name(plugin: Any, directory: Path) -> None:
    trainer = lightning.Trainer(accelerator="cpu", plugins=[plugin], logger=False)
    for name in ("next", "older"):
        callbacks.ModelCheckpoint(directory).file_exists(directory / f"{name}.ckpt", trainer)


@pytest.mark.parametrize("act", [save_next, tear_down, load_older, look_for_name])
def test_what_cannot_be_removed_later_is_warned_of(
    act: Callable[[Any, Path], None],
    tmp_path: Path,
    plugin: Any,
    faults: tl.Faults,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    older = tmp_path / "older.ckpt"
    plugin.save_checkpoint({}, older)
    plugin.teardown()
    faults.hold("write", faults.commands("write"))
    plugin.save_checkpoint({}, tmp_path / "newer.ckpt")
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*could not remove")  # is printed then, and not raised
        patch.setattr(Path, "unlink", unlink)
        plugin.remove_checkpoint(older)
        faults.release()
        act(plugin, tmp_path)
        plugin.teardown()
        with pytest.raises(PermissionError):  # nothing to wait for: as stock Lightning does
            plugin.remove_checkpoint(older)
    said = (
        f"RuntimeWarning: could not remove the old checkpoint {older}: Permission denied; remove it by hand"
    )
    assert capfd.readouterr().err.count(said) == 1
    assert (tmp_path / "newer.ckpt").exists()
    assert (tmp_path / "next.ckpt").exists() == (act is save_next)


def test_other_objects_need_consent(tmp_path: Path) -> None:
    plugin = tl.lightning.CheckpointIO()
    new_trainer(tmp_path, plugin, steps=3).fit(new_model(note=Path("of", "mine")), batches())
    path = tmp_path / "step=3.ckpt"
    with pytest.raises(tl.Unsupported, match=r"Path.*weights_only=False"):
        new_trainer(tmp_path, plugin, steps=4).fit(new_model(), batches(), ckpt_path=path)
    trainer = new_trainer(tmp_path, plugin, steps=4)
    trainer.fit(new_model(), batches(), ckpt_path=path, weights_only=False)
    assert trainer.global_step == 4


def test_arguments_that_it_has_no_use_for(tmp_path: Path) -> None:
    plugin = tl.lightning.CheckpointIO()
    for name in ("background", "durable"):
        with pytest.raises(TypeError, match=f"^{name}: must be True or False, not 'yes'"):
            tl.lightning.CheckpointIO(**{name: "yes"})
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(tl.Unsupported, match="s3://bucket/a.ckpt is not a local path"):
        plugin.save_checkpoint({}, "s3://bucket/a.ckpt")
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "missing.ckpt")
    plugin.save_checkpoint({"x": torch.ones(2)}, f"file://{tmp_path}/a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt", map_location="meta")["x"].is_meta
    with pytest.raises(tl.Unsupported, match="map_location"):
        plugin.load_checkpoint(tmp_path / "a.ckpt", map_location={})


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_starts_over_keeps_the_files_of_the_earlier_one(background: bool, tmp_path: Path) -> None:
    """ModelCheckpoint gives new names where files are, and removes only those that it saved itself."""
    for _ in range(2):
        plugin = tl.lightning.CheckpointIO(background=background)
        new_trainer(tmp_path, plugin, steps=6, save_top_k=1).fit(new_model(), batches())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=6-v1.ckpt", "step=6.ckpt"]
    for path in tmp_path.glob("*.ckpt"):
        assert tl.load(path)["global_step"] == 6


class SlowestDisk(tl.lightning.CheckpointIO):
    """Saves in the background of which none ends before something waits for it."""

    def __init__(self) -> None:
        self.faults = tl.Faults()
        super().__init__(background=True, engine=tl.Engine(faults=self.faults))

    def _end_save(self) -> None:
        self.faults.release()
        super()._end_save()
        self.faults.hold("write", self.faults.commands("write"))

    def _end_save_unless_failed(self) -> bool:
        self.faults.release()
        return bool(super()._end_save_unless_failed())


def best_and_newest(folder: Path) -> list[Any]:
    """Two callbacks whose file names are the same."""
    return [
        callbacks.ModelCheckpoint(folder, monitor="val", save_top_k=1),
        callbacks.ModelCheckpoint(folder, save_top_k=1, every_n_epochs=1),
    ]


def three_of_one_name(folder: Path) -> list[Any]:
    return [callbacks.ModelCheckpoint(folder, monitor="val", save_top_k=3, filename="m")]


def last_of_one_name(folder: Path) -> list[Any]:
    return [callbacks.ModelCheckpoint(folder, save_top_k=2, monitor="val", filename="m", save_last=True)]


class GetsWorse(Model):
    """The first epoch is the best one."""

    def on_train_epoch_end(self) -> None:
        self.log("val", float(self.current_epoch))


def run_of(make_savers: Callable[[Path], list[Any]], folder: Path, plugin: Any) -> dict[str, Any]:
    """Return what a run leaves: the epochs in its files, and what each callback calls its best."""
    savers = make_savers(folder)
    trainer = lightning.Trainer(
        accelerator="cpu",
        plugins=[] if plugin is None else [plugin],
        callbacks=savers,
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(GetsWorse(), batches())
    return {
        "files": {path.name: torch.load(path, weights_only=True)["epoch"] for path in folder.iterdir()},
        "best": [Path(saver.best_model_path).name for saver in savers],
        "last": [Path(saver.last_model_path).name for saver in savers],
    }


@pytest.mark.parametrize("make_savers", [best_and_newest, three_of_one_name, last_of_one_name])
def test_names_are_those_of_stock_lightning(make_savers: Callable[[Path], list[Any]], tmp_path: Path) -> None:
    """A name that is being saved in the background is taken, as it is in the foreground."""
    stock = run_of(make_savers, tmp_path / "stock", None)
    assert run_of(make_savers, tmp_path / "foreground", tl.lightning.CheckpointIO()) == stock
    assert run_of(make_savers, tmp_path / "background", SlowestDisk()) == stock
    assert all((tmp_path / "background" / name).exists() for name in stock["best"])
    if make_savers is best_and_newest:
        assert stock["files"] == {"epoch=0-step=3.ckpt": 0, "epoch=3-step=12.ckpt": 3}
    if make_savers is three_of_one_name:
        assert stock["files"] == {"m.ckpt": 0, "m-v1.ckpt": 1, "m-v2.ckpt": 2}


def test_a_callback_that_looks_by_itself_waits_too(tmp_path: Path) -> None:
    class Looks(callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
        def file_exists(self, filepath: Any, trainer: Any) -> bool:
            return Path(filepath).exists()

    def savers(folder: Path) -> list[Any]:
        return [Looks(folder, monitor="val", save_top_k=3, filename="m")]

    found = run_of(savers, tmp_path, SlowestDisk())["files"]
    assert found == {"m.ckpt": 0, "m-v1.ckpt": 1, "m-v2.ckpt": 2}


class Uploads(loggers.Logger):  # type: ignore[misc, name-defined]
    """Looks for new files as Lightning's WandbLogger(log_model="all") and MLFlowLogger do."""

    name = version = "uploads"

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, float] = {}
        self.uploaded: list[tuple[str, int]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self._scan_and_log_checkpoints(checkpoint_callback)

    def _scan_and_log_checkpoints(self, checkpoint_callback: Any) -> None:
        for time, path, *_ in loggers.utilities._scan_checkpoints(checkpoint_callback, self.known):
            self.known[path] = time
            self.uploaded.append((Path(path).name, torch.load(path)["global_step"]))


def test_loggers_upload_every_checkpoint(tmp_path: Path) -> None:
    uploads = Uploads()
    trainer = new_trainer(tmp_path, SlowestDisk(), steps=6, save_top_k=1, logger=uploads)
    trainer.fit(new_model(), batches())
    assert uploads.uploaded == [("step=3.ckpt", 3), ("step=6.ckpt", 6)]


LIGHTNING = ("torch", "lightning", "lightning.pytorch.demos.boring_classes")


def run_ranks(script: Path, directory: Path) -> None:
    """Run it on two ranks, which find in their environment that they are started already."""
    for rank in support_warm.run_ranks([script, directory], modules=LIGHTNING):
        assert rank.returncode == 0, rank.stderr


RANKS_LEAVE = """
import os, sys, threading
from pathlib import Path
import lightning, lightning.pytorch.demos.boring_classes, torch
import trunkline as tl

faults = tl.Faults()
plugin = tl.lightning.CheckpointIO(background=True, engine=tl.Engine("threads", faults=faults))
saver = lightning.pytorch.callbacks.ModelCheckpoint(sys.argv[1], filename="last")
model = lightning.pytorch.demos.boring_classes.BoringModel()

def hold_for_a_while():
    faults.hold("write", faults.commands("write"), 1000)
    threading.Timer(1, faults.release).start()

class Saves(lightning.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 1:
            trainer.save_checkpoint(Path(sys.argv[1], "during.ckpt"))
        if trainer.global_step == 2:
            hold_for_a_while()
            trainer.save_checkpoint(Path(sys.argv[1], "during.ckpt"))
            assert trainer.strategy.load_checkpoint(Path(sys.argv[1], "during.ckpt"))["global_step"] == 2

    def on_train_end(self, trainer, model):
        hold_for_a_while()
        trainer.save_checkpoint(Path(sys.argv[1], "ended.ckpt"))

    def on_fit_end(self, trainer, model):
        if trainer.global_rank == 0:
            raise RuntimeError("of one rank alone")

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=2, limit_val_batches=0, logger=False,
    plugins=[plugin], callbacks=[saver, Saves()], enable_progress_bar=False,
)
try:
    trainer.fit(model)
except RuntimeError:
    pass
rank = trainer.global_rank
assert torch.load(Path(sys.argv[1], "ended.ckpt"))["global_step"] == 2, rank
hold_for_a_while()
trainer.save_checkpoint(Path(sys.argv[1], "after.ckpt"))
assert torch.load(Path(sys.argv[1], "after.ckpt"))["global_step"] == 2, rank
faults.fail("write", faults.commands("write"), 5, 1)
try:
    trainer.save_checkpoint(Path(sys.argv[1], "failed.ckpt"))
except tl.Error as error:
    assert "EIO" in str(error), error
else:
    raise AssertionError(f"rank {rank} hears nothing of the failure")
trainer.validate(model)
Path(sys.argv[1], f"whole-{rank}").touch()
"""


def test_all_ranks_find_what_the_first_one_saves(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS_LEAVE)
    run_ranks(script, tmp_path)
    assert {path.name for path in tmp_path.glob("whole-*")} == {"whole-0", "whole-1"}


FABRIC = """
import sys, threading
from pathlib import Path
import lightning, torch
import trunkline as tl
from lightning.fabric.strategies import DDPStrategy

faults = tl.Faults()
plugin = tl.lightning.CheckpointIO(background=True, engine=tl.Engine("threads", faults=faults))
strategy = DDPStrategy(checkpoint_io=plugin, process_group_backend="gloo")
fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
path = Path(sys.argv[1], "last.ckpt")
for step in range(1, 4):
    faults.hold("write", faults.commands("write"), 1000)
    fabric.save(path, {"step": step, "x": torch.full((100_000,), float(step))})
    threading.Timer(0.5, faults.release).start()
    loaded = fabric.load(path)
    assert loaded["step"] == step, (fabric.global_rank, loaded["step"], step)
    fabric.barrier()
Path(sys.argv[1], f"whole-{fabric.global_rank}").touch()
"""

WRAPPED = """
import sys, threading
from pathlib import Path
import lightning, lightning.pytorch.demos.boring_classes, torch
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
import trunkline as tl

faults = tl.Faults()
plugin = tl.lightning.CheckpointIO(background=True, engine=tl.Engine("threads", faults=faults))
path = Path(sys.argv[1], "last.ckpt")

class Saves(lightning.Callback):
    def on_train_batch_end(self, trainer, *args):
        faults.hold("write", faults.commands("write"), 1000)
        threading.Timer(1, faults.release).start()
        trainer.save_checkpoint(path)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=2, limit_val_batches=0, logger=False,
    plugins=[_WrappingCheckpointIO(plugin)], callbacks=[Saves()], enable_progress_bar=False,
    enable_checkpointing=False,
)
trainer.fit(lightning.pytorch.demos.boring_classes.BoringModel())
assert torch.load(path)["global_step"] == 2, trainer.global_rank
faults.hold("write", faults.commands("write"), 1000)
threading.Timer(1, faults.release).start()
trainer.save_checkpoint(Path(sys.argv[1], "after.ckpt"))
assert torch.load(Path(sys.argv[1], "after.ckpt"))["global_step"] == 2, trainer.global_rank
Path(sys.argv[1], f"whole-{trainer.global_rank}").touch()
"""


@pytest.mark.parametrize("code", [FABRIC, WRAPPED], ids=["fabric", "wrapped"])
def test_all_ranks_wait_for_what_the_first_one_saves(tmp_path: Path, code: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
    run_ranks(script, tmp_path)
    assert {path.name for path in tmp_path.glob("whole-*")} == {"whole-0", "whole-1"}


HANDS_BACK = """
import sys, threading, time, types
from pathlib import Path
import lightning, lightning.pytorch.demos.boring_classes, torch
import trunkline as tl
from trunkline.checkpoint import first_rank

plugin = tl.lightning.CheckpointIO(background=True)
path = Path(sys.argv[1], "last.ckpt")

class Saves(lightning.Callback):
    def on_train_end(self, trainer, model):
        if trainer.global_rank == 0:
            first_rank._READERS_SECONDS = 100
            faults = tl.Faults()
            plugin._engine = tl.Engine("threads", faults=faults)
            faults.hold("write", faults.commands("write"), 1000)
            threading.Timer(0.5, faults.release).start()
        else:  # looks once a second: after rank 0 has saved the weights for the main process, and would exit
            first_rank.time = types.SimpleNamespace(
                monotonic=time.monotonic, sleep=lambda seconds: time.sleep(1)
            )
        trainer.save_checkpoint(path)

model = lightning.pytorch.demos.boring_classes.BoringModel()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp_fork", max_steps=2, limit_val_batches=0, logger=False,
    plugins=[plugin], callbacks=[Saves()], enable_progress_bar=False, enable_checkpointing=False,
)
trainer.fit(model)
saved = torch.load(path)
assert saved["global_step"] == 2
for name, weight in model.state_dict().items():
    assert torch.equal(weight, saved["state_dict"][name]), name
"""


def test_ranks_hear_of_the_last_save_while_the_launcher_hands_the_weights_back(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANDS_BACK)
    done = support_warm.run([script, tmp_path], modules=LIGHTNING)
    assert done.returncode == 0, done.stderr


class Save:
    """The handle of a save that is over once a test says so."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._error: BaseException | None = None

    def _join(self) -> None:
        self.ended.wait()


class Ranks:
    """Two ranks of one process, which have a store in common; one runs at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._saves = [first_rank._Saves(), first_rank._Saves()]
        self._store = RankStore(torch.distributed.HashStore(), 60.0)
        self._threads: list[Callable[[], object]] = []
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(first_rank, "start_thread", lambda run, done=None: self._threads.append(run))
        self.turn_to(0)

    def turn_to(self, rank: int) -> None:
        def store(*, on_first_rank: bool) -> RankStore | None:
            return self._store if on_first_rank == (rank == 0) else None

        self._monkeypatch.setattr(first_rank, "_saves", self._saves[rank])
        self._monkeypatch.setattr(first_rank, "_store", store)

    def run_thread(self) -> None:
        self._threads.pop(0)()

    def posted(self, number: int) -> bytes | None:
        return self._store.do(lambda each: value_of(each, str(number)))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_what_one_rank_saves_by_itself_is_not_posted(ranks: Ranks) -> None:
    saving = Save()
    with first_rank.common_save():
        first_rank.post_save(saving)  # type: ignore[arg-type]
    first_rank.post_save(None)  # of a plugin that saves in the foreground
    assert ranks.posted(1) == b"running"
    saving.ended.set()
    ranks.run_thread()
    assert ranks.posted(1) == b"saved"
    first_rank.post_save(Save())  # type: ignore[arg-type]
    first_rank.post_save(None, OSError("of another save"))
    assert ranks.posted(1) == b"saved"


def test_of_several_saves_at_once_the_last_one_is_posted(ranks: Ranks) -> None:
    first, second = Save(), Save()
    with first_rank.common_save():
        first_rank.post_save(first)  # type: ignore[arg-type]
        first_rank.post_save(second)  # type: ignore[arg-type]
    first.ended.set()
    ranks.run_thread()
    assert ranks.posted(1) == b"running"
    second._error = OSError("disk full")
    second.ended.set()
    ranks.run_thread()
    assert ranks.posted(1) == b"failed: disk full"


def test_a_save_that_is_passed_on_later_is_posted(ranks: Ranks) -> None:
    with first_rank.common_save():
        pass
    first_rank.post_save(None)
    assert ranks.posted(1) == b"saved"


def test_the_first_rank_waits_until_the_others_know_the_outcome(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = 0

    def other_rank_reads(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        ranks.turn_to(1)
        with first_rank.common_save():
            pass
        with pytest.raises(tl.RankError, match="rank 0 failed: disk full"):
            first_rank.await_first_rank()
        ranks.turn_to(0)

    clock = types.SimpleNamespace(sleep=other_rank_reads, monotonic=lambda: 0.0)
    monkeypatch.setattr(first_rank, "time", clock)
    with first_rank.common_save():
        first_rank.post_save(None, OSError("disk full"))
    first_rank.await_other_ranks()
    assert pauses == 1
    first_rank.await_other_ranks()
    assert pauses == 1


def test_the_first_rank_does_not_wait_long_for_ranks_that_died(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(first_rank, "time", types.SimpleNamespace(sleep=pause, monotonic=lambda: now))
    with first_rank.common_save():
        pass
    first_rank.await_other_ranks()
    assert now == 0  # nothing was saved
    with first_rank.common_save():
        first_rank.post_save(None)
    for _ in range(2):  # once is enough
        first_rank.await_other_ranks()
        assert 5 <= now < 6


@pytest.mark.parametrize("module", ["wandb", "mlflow"])
def test_the_loggers_upload_by_the_method_that_waits(module: str) -> None:
    known = importlib.import_module(f"lightning.pytorch.loggers.{module}")
    (logger,) = (
        each
        for each in vars(known).values()
        if getattr(each, "__module__", "") == known.__name__
        and inspect.isclass(each)
        and "after_save_checkpoint" in vars(each)
    )
    assert "self._scan_and_log_checkpoints(" in inspect.getsource(vars(logger)["after_save_checkpoint"])


def test_looking_for_a_name_leaves_the_error_to_the_next_save(
    tmp_path: Path, plugin: Any, faults: tl.Faults
) -> None:
    older = tmp_path / "older.ckpt"
    saver = callbacks.ModelCheckpoint(tmp_path)
    trainer = lightning.Trainer(accelerator="cpu", plugins=[plugin], logger=False, callbacks=[saver])
    plugin.save_checkpoint({"x": torch.ones(3)}, older)
    plugin.teardown()
    faults.fail("sync", faults.commands("sync"), 5)
    plugin.save_checkpoint({"x": torch.zeros(3)}, tmp_path / "newer.ckpt")
    plugin.remove_checkpoint(older)
    assert saver.file_exists(tmp_path / "older.ckpt", trainer)
    assert not saver.file_exists(tmp_path / "newer.ckpt", trainer)
    with pytest.raises(tl.Error, match="EIO"):
        save_next(plugin, tmp_path)


def fit_with_link(
    folder: Path, plugin: Any, *, counts: bool = True, kind: Any = callbacks.ModelCheckpoint, **arguments: Any
) -> Any:
    saver = kind(folder, save_last="link", enable_version_counter=counts)
    trainer = lightning.Trainer(
        accelerator="cpu",
        plugins=[plugin],
        callbacks=[saver],
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(Model(), batches(), **arguments)
    return trainer


class SecondSaveFails(SlowestDisk):
    """Of two saves, the second one meets a full disk."""

    saves = 0

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saves += 1
        if self.saves == 2:
            self._end_save()  # it holds the writes of the next one: that fails later
            self.faults.fail("sync", self.faults.commands("sync"), 28)
        super().save_checkpoint(checkpoint, path)


@pytest.mark.parametrize("counts", [True, False])
def test_the_link_to_the_last_one_stays_when_the_next_save_fails(counts: bool, tmp_path: Path) -> None:
    with pytest.raises(tl.Error, match="ENOSPC"):
        fit_with_link(tmp_path, SecondSaveFails(), counts=counts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=3.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").readlink() == Path("epoch=0-step=3.ckpt")
    trainer = fit_with_link(tmp_path, SlowestDisk(), counts=counts, ckpt_path="last")
    assert trainer.global_step == 9
    assert len(trainer.lightning_module.losses) == 6
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 9


class LinksByItself(callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
    """Has arguments of other names."""

    @staticmethod
    def _link_checkpoint(*given: Any) -> None:
        callbacks.ModelCheckpoint._link_checkpoint(*given)


@pytest.mark.parametrize("kind", [callbacks.ModelCheckpoint, LinksByItself])
@pytest.mark.parametrize("counts", [True, False])
def test_the_link_leads_to_a_checkpoint_at_every_line(counts: bool, kind: Any, tmp_path: Path) -> None:
    """Wherever the process dies, ckpt_path="last" finds a checkpoint."""
    last = tmp_path / "last.ckpt"
    files = {inspect.getsourcefile(tl.lightning), inspect.getsourcefile(callbacks.ModelCheckpoint)}
    targets: list[str] = []
    steps: list[int] = []
    lost: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files or not (targets or last.is_symlink()):
            return look
        if not last.exists():
            lost.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        elif targets[-1:] != [os.readlink(last)]:  # noqa: PTH115
            targets.append(os.readlink(last))  # noqa: PTH115
            steps.append(torch.load(last, weights_only=True)["global_step"])
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        fit_with_link(tmp_path, SlowestDisk(), counts=counts, kind=kind)
    finally:
        sys.settrace(before)
    assert lost == []
    assert steps == [3, 6, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=2-step=9.ckpt", "last.ckpt"]


def test_the_link_leads_to_a_checkpoint_after_an_interrupted_wait(
    tmp_path: Path, plugin: Any, faults: tl.Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = callbacks.ModelCheckpoint(tmp_path)
    trainer = lightning.Trainer(accelerator="cpu", plugins=[plugin], logger=False, callbacks=[saver])
    oldest, older, newer, last = (tmp_path / f"{name}.ckpt" for name in ("oldest", "older", "newer", "last"))
    for path in (oldest, older):
        plugin.save_checkpoint({}, path)
    plugin.teardown()
    last.symlink_to("older.ckpt")
    faults.hold("write", faults.commands("write"))
    plugin.save_checkpoint({}, newer)
    for path in (oldest, older):
        plugin.remove_checkpoint(path)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(plugin, "_end_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver._link_checkpoint(trainer, str(newer), str(last))
    faults.release()
    plugin.teardown()
    assert sorted(path.name for path in tmp_path.glob("*")) == ["last.ckpt", "newer.ckpt", "older.ckpt"]
    assert last.exists()


@pytest.mark.parametrize("old", ["link", "file", "folder", "nothing"])
def test_what_a_crash_left_beside_the_link_is_replaced(old: str, tmp_path: Path, plugin: Any) -> None:
    saver = callbacks.ModelCheckpoint(tmp_path)
    trainer = lightning.Trainer(accelerator="cpu", plugins=[plugin], logger=False, callbacks=[saver])
    best, newer, last = (tmp_path / f"{name}.ckpt" for name in ("best", "newer", "last"))
    for step, path in enumerate((best, newer)):
        plugin.save_checkpoint({"global_step": step}, path)
    plugin.teardown()
    beside = tmp_path / ".trunkline-last.ckpt"
    beside.symlink_to("best.ckpt")
    if old == "link":
        last.symlink_to("best.ckpt")
        plugin.save_checkpoint({"global_step": 2}, last)  # a file in the place of the link
        assert torch.load(best)["global_step"] == 0
        last.unlink()
        last.symlink_to("best.ckpt")
        beside.symlink_to("best.ckpt")
    if old == "file":
        last.write_bytes(b"of stock Lightning")
    if old == "folder":
        last.mkdir()
        beside.unlink()
    saver._link_checkpoint(trainer, str(newer), str(last))
    assert last.readlink() == Path("newer.ckpt")
    saver._link_checkpoint(trainer, str(newer), str(newer))
    assert [torch.load(path)["global_step"] for path in (best, newer, last)] == [0, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt", "newer.ckpt"]


def test_a_callback_that_links_by_itself_waits_too(tmp_path: Path) -> None:
    class Links(callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
        def _link_checkpoint(self, trainer: Any, filepath: Any, linkpath: Any) -> None:
            assert Path(filepath).exists()
            super()._link_checkpoint(trainer, filepath, linkpath)

    def savers(folder: Path) -> list[Any]:
        return [Links(folder, save_last="link", enable_version_counter=False)]

    assert run_of(savers, tmp_path, SlowestDisk())["files"] == {"epoch=3-step=12.ckpt": 3, "last.ckpt": 3}


def test_a_callback_whose_arguments_are_not_known_waits_too(tmp_path: Path) -> None:
    class Wraps(callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
        def file_exists(self, *given: Any) -> bool:
            return bool(super().file_exists(*given))

        @staticmethod
        def _link_checkpoint(*given: Any) -> None:
            assert Path(given[1]).exists()
            callbacks.ModelCheckpoint._link_checkpoint(*given)

    def savers(folder: Path) -> list[Any]:
        return [Wraps(folder, save_last="link")]

    assert run_of(savers, tmp_path, SlowestDisk())["files"] == {"epoch=3-step=12.ckpt": 3, "last.ckpt": 3}


def test_what_is_saved_before_a_requeue_is_saved_before_the_requeue(tmp_path: Path) -> None:
    """SLURM ends the job that Lightning requeues."""
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    plugin = tl.lightning.CheckpointIO(background=True)
    for number in (1, 2):
        path = Path(trainer._checkpoint_connector.hpc_save_path(tmp_path))
        plugin.save_checkpoint({"global_step": number}, path)
        assert path.name == f"hpc_ckpt_{number}.ckpt"
        assert plugin._saving is None
        assert torch.load(path) == {"global_step": number}


def test_what_a_launcher_hands_over_is_complete(tmp_path: Path) -> None:
    launcher = importlib.import_module("lightning.pytorch.strategies.launchers.multiprocessing")
    assert '".temp.ckpt"' in inspect.getsource(launcher)
    plugin = tl.lightning.CheckpointIO(background=True)
    plugin.save_checkpoint({"x": torch.ones(3)}, tmp_path / ".temp.ckpt")
    assert plugin._saving is None
    assert torch.equal(torch.load(tmp_path / ".temp.ckpt")["x"], torch.ones(3))


def test_what_is_linked_anew_is_not_removed(
    tmp_path: Path, plugin: Any, faults: tl.Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []
    saver = callbacks.ModelCheckpoint(tmp_path)
    trainer = lightning.Trainer(accelerator="cpu", plugins=[plugin], logger=False, callbacks=[saver])
    newer, last = tmp_path / "newer.ckpt", tmp_path / "last.ckpt"
    last.symlink_to("older.ckpt")
    faults.hold("write", faults.commands("write"))
    plugin.save_checkpoint({"global_step": 4}, newer)
    plugin.remove_checkpoint(last)
    faults.release()
    assert last.is_symlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", removed.append)
        saver._link_checkpoint(trainer, str(newer), str(last))
    assert removed == []  # it is replaced by a rename
    plugin.teardown()
    assert torch.load(last)["global_step"] == 4


@pytest.mark.parametrize("method", ["file_exists", "_link_checkpoint"])
@pytest.mark.filterwarnings("default")
def test_without_the_known_lightning_saves_are_made_in_the_foreground(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks.ModelCheckpoint, method, len)
    tl.lightning._warn_of_foreground.cache_clear()
    plugin = tl.lightning.CheckpointIO(background=True)
    with pytest.warns(RuntimeWarning, match="background=True: the methods ModelCheckpoint"):
        plugin.save_checkpoint({"x": torch.ones(3)}, tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists()
