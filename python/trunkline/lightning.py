"""Checkpoints of Lightning's Trainer: saved by trunkline.save, loaded by trunkline.load.

    import lightning
    import trunkline as tl

    trainer = lightning.Trainer(plugins=[tl.lightning.CheckpointIO(background=True)])

Needs the package lightning (or, without that one, pytorch-lightning).
"""

import functools
import inspect
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.fabric.plugins import CheckpointIO as _Interface
except ModuleNotFoundError as _error:
    if _error.name != "lightning":
        raise
    from lightning_fabric.plugins import CheckpointIO as _Interface

from trunkline._core import Engine, fsync_directory
from trunkline._errors import Unsupported
from trunkline._formats.pt.loader import TRUST
from trunkline._paths import absolute_path
from trunkline._tensor_io.devices import copied_to, savable
from trunkline._tensor_io.memory import is_in_reach
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.first_rank import await_first_rank, await_other_ranks, common_save, post_save
from trunkline.checkpoint.load import load
from trunkline.checkpoint.save import SaveHandle, save, save_async

__all__ = ["CheckpointIO"]


class CheckpointIO(_Interface):  # type: ignore[misc] # the library may not be installed
    """A plugin for lightning.Trainer and Fabric that reads and writes checkpoints at the speed of the device.

    The files are those of stock Lightning: torch.load and Trainers without this plugin read them, and it
    reads theirs. A file appears whole under its name, or not at all.

    background: training goes on as soon as the state is copied to staging memory (`staging_bytes`: as for
    trunkline.save_async), while the file is written. One save is under way at a time. Its error is raised
    by the next save, or at the end of the run. What Lightning removes meanwhile stays until the save
    before is durable, so that there is a whole checkpoint at any moment, also after Ctrl-C. Before
    ModelCheckpoint looks whether a name is taken it waits for the save that is under way, so that it
    chooses the names that it would choose without `background`. So do the loggers of Lightning that upload
    the file of each save, such as WandbLogger(log_model="all"), before they do. Before it links to a file
    (save_last="link") it waits as well, and raises the error of the save: then the link stays as it is.
    The checkpoint that Lightning saves before it requeues a SLURM job (hpc_ckpt_1.ckpt) is durable before
    the requeue. The file by which strategies such as "ddp_notebook" and "ddp_spawn" return the weights
    (.temp.ckpt) is complete before rank 0 hands it over. At the end of a run rank 0 waits up to 5 seconds
    for the other ranks to learn how its last save ended. Once trainer.fit() has returned, on any rank, all
    that it saved is there; so is what trainer.save_checkpoint() saves outside of it. Loading a checkpoint
    waits on all ranks as well, and so does trainer.strategy.checkpoint_io.teardown(). What Fabric saves is
    there once fabric.strategy.checkpoint_io.teardown() has returned on rank 0.

    Ctrl-C, or a signal handler that raises, while the state is copied gives that save up.

    durable: files survive a power failure once they are saved. To be used from one thread.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        durable: bool = True,
        staging_bytes: "int | str | None" = None,
        engine: Engine | None = None,
    ) -> None:
        """See the class."""
        super().__init__()
        self._background = background
        self._durable = durable
        self._staging_bytes = staging_bytes
        self._engine = engine
        self._saving: SaveHandle | None = None
        self._to_remove: list[str] = []
        if background:  # on all ranks, of which the first alone saves
            _watch_trainer()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a process that a launcher starts."""
        self.__dict__.update(state)
        if self._background:
            _watch_trainer()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: "str | os.PathLike[str]", storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`, whose suffix must be one of trunkline.save (.ckpt, .pt and so on).

        Tensors of CUDA GPUs are written from there, those of other devices by way of main memory. Raises the
        error of the save before, if that was made in the background; Unsupported for URLs, TypeError for
        `storage_options`, errors of trunkline.save.

        A symbolic link at `path` is replaced by the file, as by stock Lightning: the link of save_last="link"
        leads to another checkpoint. This one save is made in the foreground.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options: {type(self).__name__} has none; its options are arguments of the class"
            )
        name = _local(path)
        try:
            self._save(checkpoint, name)
        except BaseException as error:
            post_save(None, error)
            raise

    def _save(self, checkpoint: dict[str, Any], name: str) -> None:
        if _is_of_requeue(name):
            self._settle_or_warn()  # even if the save before failed: the job ends after this one
        else:
            self._settle()
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        state = savable(checkpoint)
        if Path(name).is_symlink():
            self._replace_link(state, absolute_path(name))
            post_save(None)
        elif not self._background or _is_of_requeue(name) or _is_of_launcher(name):
            save(state, name, durable=self._durable, engine=self._engine)
            post_save(None)
        else:
            self._save_in_background(state, name)

    def _save_in_background(self, state: Any, name: str) -> None:
        _watch_loggers()
        saving = None
        try:
            self._saving = saving = save_async(
                state, name, durable=self._durable, staging_bytes=self._staging_bytes, engine=self._engine
            )
            if _watch_model_checkpoint():
                _in_background.add(self)
                post_save(saving)
                self._await_copy(saving)
            else:
                _warn_of_foreground()
                self._settle()
                post_save(None)
        except BaseException:
            # The tensors change as soon as this returns: what is not copied by then would be a mixture.
            if saving is not None and not saving.staged():
                saving.cancel()
                saving._join()
                self._saving = None
                self._to_remove.clear()
            raise

    def _await_copy(self, saving: SaveHandle) -> None:
        """Wait until the tensors may change; its error is left to the next call, which all ranks make."""
        saving._staged.wait()

    def load_checkpoint(
        self,
        path: "str | os.PathLike[str]",
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint of Lightning, verified by the checksums in it.

        map_location: a device, where all tensors go (None: main memory). weights_only: False allows pickles
        that run code, by torch.load, for a file that trunkline.load refuses for holding such.

        Raises Unsupported, which names them, for objects other than tensors and plain values.
        Waits for a save in the background, of the first rank as well, and raises its error.
        """
        name = _local(path)
        self._settle_on_all_ranks()
        device = _device(map_location, name)
        try:
            state = load(name, device=device if is_in_reach(device) else "cpu", engine=self._engine)
        except Unsupported as error:
            if weights_only is not False:
                raise Unsupported(
                    error.errno,
                    f"{str(error).removesuffix(TRUST).rstrip('.')}; if you trust the file, pass "
                    "weights_only=False to the Trainer's fit, validate, test or predict",
                    name,
                ) from error
            return dict(torch.load(name, map_location=device, weights_only=False))
        return dict(copied_to(state, device))

    def remove_checkpoint(self, path: "str | os.PathLike[str]") -> None:
        """Remove the file, or folder, if it is there.

        After a save in the background: when that is durable, and a link to the file leads to the new one. A
        RuntimeWarning says what cannot be removed then.
        """
        name = absolute_path(_local(path))  # removed later: maybe from another directory
        if self._saving is not None:
            self._to_remove.append(name)
            return
        self._settle()
        _remove(name)

    def teardown(self) -> None:
        """Wait for the save in the background, and raise its error; called at the end of a run.

        On other ranks: for that of the first one.
        """
        self._settle_on_all_ranks()

    def _replace_link(self, state: Any, link: str) -> None:
        """Save to the name of a symbolic link, not to what it leads to, as trunkline.save would.

        Until the file is whole the link stays: without it, ckpt_path="last" would start over.
        """
        beside = _beside(link)
        if beside.is_symlink():  # of a crash; save() would follow it
            beside.unlink()
        save(state, beside, durable=self._durable, engine=self._engine)
        try:
            beside.replace(link)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        if self._durable:
            fsync_directory(os.path.dirname(link))  # noqa: PTH120 - of a str

    def _settle(self) -> None:
        """End the save that is under way, and do what had to wait for it."""
        self._end_save()
        while self._to_remove:
            _remove_or_warn(self._to_remove.pop(0))

    def _settle_on_all_ranks(self) -> None:
        self._settle()
        if self._background:
            await_first_rank()

    def _settle_or_warn(self) -> None:
        try:
            self._settle()
        except Exception as error:
            warn_without_failing(f"an earlier save failed: {error}", caller())

    def _end_save(self) -> None:
        """Wait for the save that is under way, and raise its error; what is to be removed stays."""
        saving = self._saving
        if saving is not None:
            saving._join()  # after Ctrl-C the save goes on, and what has to wait for it still has to
            if saving._error is not None:
                self._to_remove.clear()  # they are the newest ones that are whole
            self._saving = None
            saving.wait()

    def _end_save_unless_failed(self) -> bool:
        """End the save that is under way; the error of one that failed is left to the next call."""
        saving = self._saving
        if saving is not None:
            saving._join()
            if saving._error is not None:
                return False
        self._end_save()
        return True

    def _remove_now(self, path: Any) -> None:
        """Remove what is at `path` (None: anywhere) if that had to wait; what comes there later stays."""
        if path is None:
            self._settle()
            return
        name = absolute_path(path)
        if name in self._to_remove:
            self._to_remove = [known for known in self._to_remove if known != name]
            _remove_or_warn(name)

    def _keep(self, names: set[str]) -> None:
        """Let stay what was to be removed, and is replaced or used now."""
        self._to_remove = [name for name in self._to_remove if name not in names]

    def _keep_target(self, link: Any) -> None:
        """Let stay what a link (None: any) leads to, which has not changed though it should have."""
        if link is None:
            self._to_remove.clear()
            return
        target = os.path.realpath(link)
        self._to_remove = [name for name in self._to_remove if os.path.realpath(name) != target]


# Plugins that may have a save under way; Lightning's callbacks and loggers do not know them.
_in_background: "weakref.WeakSet[CheckpointIO]" = weakref.WeakSet()
_MODEL_CHECKPOINTS = (
    "lightning.pytorch.callbacks.model_checkpoint",
    "pytorch_lightning.callbacks.model_checkpoint",
)
_TRAINERS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_STRATEGIES = ("lightning.pytorch.strategies.strategy", "pytorch_lightning.strategies.strategy")
_FABRICS = ("lightning.fabric.fabric", "lightning_fabric.fabric")
_LOGGERS = ("lightning.pytorch.loggers.logger", "pytorch_lightning.loggers.logger")
_WATCHED = "_trunkline_waits"


def _watch_model_checkpoint() -> bool:
    """Have ModelCheckpoint wait for saves in the background; False where it is not as known.

    file_exists: ModelCheckpoint gives a new name ("-v1") where a file is. While the file is still being
    written there is none: two callbacks would choose one name, and each would replace or remove what the
    other saved.

    _link_checkpoint: if the save fails or the process dies, the link leads to a file that does not exist, and
    ckpt_path="last" starts over. So the link is made once the file is saved, and replaced by a rename.
    """
    for name in _MODEL_CHECKPOINTS:
        module = sys.modules.get(name)
        if module is None:
            continue  # nobody makes one
        base = getattr(module, "ModelCheckpoint", None)
        if not inspect.isclass(base) or not vars(base).keys() >= _OF_MODEL_CHECKPOINT:
            return False
        for known in _with_subclasses(base):
            for method in vars(known).keys() & _OF_MODEL_CHECKPOINT:
                if not _watch(known, method):
                    return False
    return True


def _watch_trainer() -> None:
    """Have all ranks count what a Trainer or Fabric saves, and wait for what it saves outside of fit().

    Strategies tear their plugin down, which Lightning's wrappers of plugins do not pass on.
    """
    for names, kind, method in (
        (_TRAINERS, "Trainer", _SAVE),
        (_STRATEGIES, "Strategy", _TEARDOWN),
        (_FABRICS, "Fabric", _SAVE_OF_FABRIC),
    ):
        for name in names:
            known = getattr(sys.modules.get(name), kind, None)
            if inspect.isclass(known) and method in vars(known):
                _watch(known, method)


def _plugin_of(strategy: Any) -> CheckpointIO | None:
    """Return the plugin of a strategy that saves in the background, also where others wrap it."""
    with suppress(Exception):  # a strategy may have none
        plugin = strategy.checkpoint_io
        for _ in range(_MOST_WRAPPERS):
            if plugin is None or isinstance(plugin, CheckpointIO):
                break
            plugin = getattr(plugin, "checkpoint_io", None)
        if isinstance(plugin, CheckpointIO) and plugin._background:
            return plugin
    return None


def _watch_loggers() -> None:
    """Have loggers that upload checkpoints, after each save, wait for saves in the background.

    While a file is still being written they would not find it, and would never upload the last one.
    """
    for name in _LOGGERS:
        base = getattr(sys.modules.get(name), "Logger", None)
        for known in _with_subclasses(base) if inspect.isclass(base) else ():
            if _SCAN in vars(known):
                _watch(known, _SCAN)


def _with_subclasses(base: type) -> list[type]:
    classes = [base]
    for known in classes:  # grows
        classes += known.__subclasses__()
    return classes


def _watch(known: Any, method: str) -> bool:
    """Have a method of a class wait for the saves in the background; False where it is not as known."""
    original = vars(known)[method]
    is_static = isinstance(original, staticmethod)
    function = original.__func__ if is_static else original
    if not inspect.isfunction(function):
        return False
    if getattr(function, _WATCHED, False):
        return True
    waiting = _WAITING[method](function)
    setattr(waiting, _WATCHED, True)
    setattr(known, method, staticmethod(waiting) if is_static else waiting)
    return True


def _waiting_file_exists(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        for plugin in list(_in_background):
            if plugin._end_save_unless_failed():
                plugin._remove_now(_argument(original, "filepath", args, kwargs))
        return original(*args, **kwargs)

    return waiting


def _waiting_link_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        plugins = list(_in_background)
        link = _argument(original, "linkpath", args, kwargs)
        try:
            for plugin in plugins:
                plugin._end_save()
                plugin._keep({absolute_path(each) for each in (*args, *kwargs.values()) if _is_path(each)})
            result = _link(original, args, kwargs, plugins)
        except BaseException:
            for plugin in plugins:
                plugin._keep_target(link)
            raise
        for plugin in plugins:
            plugin._settle()  # now: the link leads to the file before until it leads to the new one
        return result

    return waiting


def _link(original: Callable[..., Any], args: Any, kwargs: Any, plugins: list[CheckpointIO]) -> Any:
    """Have a _link_checkpoint make its link beside the old one, which it replaces then.

    Lightning removes the old one first: if the process died in between, ckpt_path="last" would start over.
    Overrides are called as they are; where they call Lightning's, that is replaced here.
    """
    trainer, path, link = (
        _argument(original, name, args, kwargs) for name in ("trainer", "filepath", "linkpath")
    )
    if (
        not plugins
        or original.__module__ not in _MODEL_CHECKPOINTS
        or link is None
        or not getattr(trainer, "is_global_zero", False)  # others make none
        or absolute_path(path) == absolute_path(link)  # Lightning makes none
        or (Path(link).is_dir() and not Path(link).is_symlink())  # no rename replaces it
    ):
        return original(*args, **kwargs)
    beside = _beside(absolute_path(link))
    try:
        result = original(trainer=trainer, filepath=path, linkpath=os.fspath(beside))
        beside.replace(link)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if any(plugin._durable for plugin in plugins):
        fsync_directory(os.fspath(beside.parent))
    return result


def _beside(link: str) -> Path:
    """Return where what will replace a link is made: no checkpoint for ModelCheckpoint and the like.

    What a crash leaves there is replaced by the next one.
    """
    directory, name = os.path.split(link)
    return Path(directory, f".trunkline-{name}")


def _waiting_scan(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        for plugin in list(_in_background):
            plugin._end_save_unless_failed()
        return original(*args, **kwargs)

    return waiting


def _waiting_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waiting(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = _plugin_of(trainer.strategy)
        if plugin is None:
            return original(trainer, *args, **kwargs)
        with common_save():
            result = original(trainer, *args, **kwargs)
        if trainer.state.status != "running":  # in fit() the next save waits for this one, or teardown()
            try:
                plugin._settle_on_all_ranks()
            finally:
                await_other_ranks()
        return result

    return waiting


def _waiting_teardown(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waiting(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = _plugin_of(strategy)
        try:
            return original(strategy, *args, **kwargs)
        finally:
            try:
                if plugin is not None and plugin is not strategy.checkpoint_io:
                    plugin.teardown()
            finally:
                if plugin is not None:
                    await_other_ranks()

    return waiting


def _waiting_save_of_fabric(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waiting(fabric: Any, *args: Any, **kwargs: Any) -> Any:
        if _plugin_of(getattr(fabric, "strategy", None)) is None:
            return original(fabric, *args, **kwargs)
        with common_save():
            return original(fabric, *args, **kwargs)

    return waiting


def _argument(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Return an argument of a call; None where the function does not know it by this name."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments.get(name)
    except TypeError:
        return None


_SCAN = "_scan_and_log_checkpoints"  # of loggers
_SAVE = "save_checkpoint"  # of the Trainer
_SAVE_OF_FABRIC = "save"
_TEARDOWN = "teardown"  # of strategies
_MOST_WRAPPERS = 100
_WAITING = {
    "file_exists": _waiting_file_exists,
    "_link_checkpoint": _waiting_link_checkpoint,
    _SCAN: _waiting_scan,
    _SAVE: _waiting_save_checkpoint,
    _SAVE_OF_FABRIC: _waiting_save_of_fabric,
    _TEARDOWN: _waiting_teardown,
}
_OF_MODEL_CHECKPOINT = frozenset({"file_exists", "_link_checkpoint"})


@functools.cache
def _warn_of_foreground() -> None:
    warnings.warn(
        "background=True: this version of Lightning has no ModelCheckpoint.file_exists and _link_checkpoint "
        "as known, so that two checkpoints could get the same name, or a link lead nowhere; each save waits "
        "until it is durable. Use Lightning 2.6, or background=False",
        RuntimeWarning,
        stacklevel=3,
    )


def _remove(name: str) -> None:
    import shutil

    if Path(name).is_dir() and not Path(name).is_symlink():
        shutil.rmtree(name)
    else:
        Path(name).unlink(missing_ok=True)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _remove_or_warn(name: str) -> None:
    """Remove what had to wait; an error must not fail what has nothing to do with it, as the next save.

    On rank 0 alone it would be raised in file_exists, in which the other ranks wait for that one.
    """
    try:
        _remove(name)
    except OSError as error:
        why = error.strerror or str(error)
        warn_without_failing(
            f"{name}: could not remove this old checkpoint: {why}; remove it by hand", caller()
        )


def _is_of_requeue(name: str) -> bool:
    """Whether Lightning saves this checkpoint when SLURM ends the job, which it requeues right afterwards."""
    return re.fullmatch(r"hpc_ckpt_\d+\.ckpt", Path(name).name) is not None


def _is_of_launcher(name: str) -> bool:
    """Whether a launcher saves the weights here, on one rank, for the process that has started the ranks.

    That process reads the file once the ranks have exited, and does not hear of an error in the background.
    """
    return Path(name).name == ".temp.ckpt"


def _local(path: "str | os.PathLike[str]") -> str:
    name = os.fspath(path)
    if name.startswith("file://"):
        return name.removeprefix("file://")
    if "://" in name:
        raise Unsupported(
            None, f"{name} is no local path; leave out this plugin to have Lightning save it by fsspec", name
        )
    return name


def _device(map_location: Any, name: str) -> torch.device:
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, str | torch.device):
        return torch.device(map_location)
    raise Unsupported(
        None, f"map_location: must be a device or None, not a {type(map_location).__name__}", name
    )
