"""A checkpoint plugin for Lightning, which saves with trunkline.save and loads with trunkline.load.

    import lightning
    import trunkline as tl

    trainer = lightning.Trainer(plugins=[tl.lightning.CheckpointIO(background=True)])

Needs the package lightning, or else pytorch-lightning.
"""

import functools
import inspect
import os
import re
import sys
import uuid
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

from trunkline._arguments import bool_argument
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

    The files are those of stock Lightning: torch.load and Trainers without this plugin can read them, and the
    plugin reads theirs. A file appears complete under its name, or not at all.

    background: training goes on as soon as the state is copied to staging memory (`staging_bytes`: as for
    trunkline.save_async), while the file is written. One save runs at a time. The next save raises its error,
    or the end of the run does. Files that Lightning removes meanwhile stay until the running save is durable,
    so that there is a complete checkpoint at any moment, also after Ctrl-C. ModelCheckpoint waits for the
    running save before it checks whether a name is in use, so that it chooses the same names as without
    `background`. Loggers of Lightning that upload the file of each save, such as
    WandbLogger(log_model="all"), wait as well. So does ModelCheckpoint before it links to a file
    (save_last="link"), and raises the error of the save: then the link stays unchanged. The checkpoint that
    Lightning saves before it requeues a SLURM job (hpc_ckpt_1.ckpt) is durable before the requeue. The file
    by which strategies such as "ddp_notebook" and "ddp_spawn" return the weights (.temp.ckpt) is complete
    before rank 0 returns it. At the end of a run rank 0 waits up to 5 seconds for the other ranks to read the
    outcome of its last save. Once trainer.fit() has returned, on any rank, all its checkpoints exist; so do
    those of trainer.save_checkpoint(). Loading a checkpoint waits on all ranks as well, and so does
    trainer.strategy.checkpoint_io.teardown(). Checkpoints of Fabric exist once
    fabric.strategy.checkpoint_io.teardown() has returned on rank 0.

    Ctrl-C, or a signal handler that raises, cancels a save while its state is being copied.

    durable: files survive a power failure once they are saved. Use it from one thread only.
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
        self._background = bool_argument(background, "background")
        self._durable = bool_argument(durable, "durable")
        self._staging_bytes = staging_bytes
        self._engine = engine
        self._saving: SaveHandle | None = None
        self._to_remove: list[str] = []
        if self._background:  # on all ranks, though only the first one saves
            _watch_trainer()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the plugin in a process that a launcher starts."""
        self.__dict__.update(state)
        if self._background:
            _watch_trainer()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: "str | os.PathLike[str]", storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`, whose suffix must be one of trunkline.save (.ckpt, .pt and so on).

        Tensors on CUDA GPUs are written directly, those on other devices are copied to main memory first.
        Raises the error of the save before, if that ran in the background; Unsupported for URLs, TypeError
        for `storage_options`, and the errors of trunkline.save.

        A symbolic link at `path` is replaced by the file, as by stock Lightning: the link of save_last="link"
        leads to another checkpoint. Such a save runs in the foreground.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options: not supported; pass options to {type(self).__name__}() instead"
            )
        name = _local(path)
        try:
            self._save(checkpoint, name)
        except BaseException as error:
            post_save(None, error)
            raise

    def _save(self, checkpoint: dict[str, Any], name: str) -> None:
        if _is_of_requeue(name):
            self._settle_or_warn()  # also if the save before failed: the job ends after this one
        else:
            self._settle()
        absolute_path(name)  # rejects paths that would make folders named "~" or "s3:"
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
            # The tensors change as soon as this returns: those not copied by then would be a mixture.
            if saving is not None and not saving.staged():
                saving.cancel()
                saving._join()
                self._saving = None
                self._to_remove.clear()
            raise

    def _await_copy(self, saving: SaveHandle) -> None:
        """Wait until the tensors may change; the next call, which all ranks make, raises the error."""
        saving._staged.wait()

    def load_checkpoint(
        self,
        path: "str | os.PathLike[str]",
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint of Lightning, verified by the checksums in it.

        map_location: the device for all tensors (None: main memory). weights_only: False allows torch.load to
        run code in the pickle of a file that trunkline.load rejects because of that.

        Raises Unsupported, which names them, for objects other than tensors and plain values. Waits for a
        background save, also one of the first rank, and raises its error.
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
        """Remove the file, or folder, if it exists.

        While a background save runs: once that is durable, and a link to the file leads to the new one. A
        RuntimeWarning names what cannot be removed then.
        """
        name = absolute_path(_local(path))  # removed later: maybe from another directory
        if self._saving is not None:
            self._to_remove.append(name)
            return
        self._settle()
        _remove(name)

    def teardown(self) -> None:
        """Wait for the background save, and raise its error; called at the end of a run.

        Other ranks wait for that of the first one.
        """
        self._settle_on_all_ranks()

    def _replace_link(self, state: Any, link: str) -> None:
        """Replace a symbolic link by the file; trunkline.save would write to its target.

        The link stays until the file is complete: without it, ckpt_path="last" would start over.
        """
        temporary = _temporary_name(link)
        if temporary.is_symlink():  # left by a crash; save() would follow it
            temporary.unlink()
        save(state, temporary, durable=self._durable, engine=self._engine)
        try:
            temporary.replace(link)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if self._durable:
            fsync_directory(os.path.dirname(link))  # noqa: PTH120 - of a str

    def _settle(self) -> None:
        """Wait for the running save, and do the removals that had to wait for it."""
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
        """Wait for the running save, and raise its error; does no removals."""
        saving = self._saving
        if saving is not None:
            saving._join()  # after Ctrl-C the save goes on, and removals still have to wait
            if saving._error is not None:
                self._to_remove.clear()  # they are the newest complete ones
            self._saving = None
            saving.wait()

    def _end_save_unless_failed(self) -> bool:
        """Wait for the running save; if it failed, return False, and the next call raises its error."""
        saving = self._saving
        if saving is not None:
            saving._join()
            if saving._error is not None:
                return False
        self._end_save()
        return True

    def _remove_now(self, path: Any) -> None:
        """Remove the file at `path` (None: any) if its removal had to wait, before it is replaced."""
        if path is None:
            self._settle()
            return
        name = absolute_path(path)
        if name in self._to_remove:
            self._to_remove = [known for known in self._to_remove if known != name]
            _remove_or_warn(name)

    def _will_dangle(self, link: Any) -> bool:
        """Whether it is a link to a file whose removal had to wait."""
        if link is None or not self._to_remove or not os.path.islink(link):  # noqa: PTH114 - any path
            return False
        target = os.path.realpath(link)
        return any(os.path.realpath(name) == target for name in self._to_remove)

    def _keep(self, names: set[str]) -> None:
        """Do not remove these files, which are replaced or used now."""
        self._to_remove = [name for name in self._to_remove if name not in names]

    def _keep_target(self, link: Any) -> None:
        """Do not remove the target of a link (None: of any) that could not be changed."""
        if link is None:
            self._to_remove.clear()
            return
        target = os.path.realpath(link)
        self._to_remove = [name for name in self._to_remove if os.path.realpath(name) != target]


# Plugins that may have a running save; Lightning's callbacks and loggers do not know them.
_in_background: "weakref.WeakSet[CheckpointIO]" = weakref.WeakSet()
_MODEL_CHECKPOINTS = (
    "lightning.pytorch.callbacks.model_checkpoint",
    "pytorch_lightning.callbacks.model_checkpoint",
)
_TRAINERS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_STRATEGIES = ("lightning.pytorch.strategies.strategy", "pytorch_lightning.strategies.strategy")
_FABRICS = ("lightning.fabric.fabric", "lightning_fabric.fabric")
_LOGGERS = ("lightning.pytorch.loggers.logger", "pytorch_lightning.loggers.logger")
_WATCHED = "_trunkline_waits"  # attribute of a method that waits


def _watch_model_checkpoint() -> bool:
    """Make ModelCheckpoint wait for background saves; return False if its methods are not as expected.

    file_exists: ModelCheckpoint chooses another name ("-v1") if a file exists. While the file is being
    written it does not exist yet: two callbacks would choose the same name, and each would replace or remove
    the other's file.

    _link_checkpoint: if the save fails or the process dies, the link leads to a file that does not exist, and
    ckpt_path="last" starts over. So the link is made once the file is saved, and replaced by a rename.
    """
    for name in _MODEL_CHECKPOINTS:
        module = sys.modules.get(name)
        if module is None:
            continue  # no instance can exist
        base = getattr(module, "ModelCheckpoint", None)
        if not inspect.isclass(base) or not vars(base).keys() >= _OF_MODEL_CHECKPOINT:
            return False
        for known in _with_subclasses(base):
            for method in vars(known).keys() & _OF_MODEL_CHECKPOINT:
                if not _watch(known, method):
                    return False
    return True


def _watch_trainer() -> None:
    """Make all ranks count the saves of a Trainer or Fabric, and wait for those outside of fit().

    Strategies also call teardown() of their plugin, which Lightning's wrappers of plugins do not forward.
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
    """Return the plugin of a strategy that saves in the background, also if others wrap it."""
    with suppress(Exception):  # a strategy may have none
        plugin = strategy.checkpoint_io
        for _ in range(_MAX_WRAPPERS):
            if plugin is None or isinstance(plugin, CheckpointIO):
                break
            plugin = getattr(plugin, "checkpoint_io", None)
        if isinstance(plugin, CheckpointIO) and plugin._background:
            return plugin
    return None


def _watch_loggers() -> None:
    """Make loggers that upload the checkpoint of each save wait for background saves.

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
    """Make a method of a class wait for background saves; return False if it is not a function."""
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
        path = _argument(original, "filepath", args, kwargs)
        for plugin in list(_in_background):
            if plugin._end_save_unless_failed():
                plugin._remove_now(path)
                if plugin._will_dangle(path):
                    # For Lightning the name of a link to nothing is free. The link is replaced before its
                    # target is removed, so that it leads to a checkpoint all the time.
                    args, kwargs = _with_argument(original, "filepath", _free_name(path), args, kwargs)
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
            plugin._settle()  # only now, since the link led to the previous file until it was replaced
        return result

    return waiting


def _link(original: Callable[..., Any], args: Any, kwargs: Any, plugins: list[CheckpointIO]) -> Any:
    """Make _link_checkpoint create its link under a temporary name, then rename it over the old one.

    Lightning removes the old link first: if the process died in between, ckpt_path="last" would start over.
    Overrides are called unchanged; if they call Lightning's method, that call is replaced here.
    """
    trainer, path, link = (
        _argument(original, name, args, kwargs) for name in ("trainer", "filepath", "linkpath")
    )
    if (
        not plugins
        or original.__module__ not in _MODEL_CHECKPOINTS
        or link is None
        or not getattr(trainer, "is_global_zero", False)  # other ranks make none
        or absolute_path(path) == absolute_path(link)  # Lightning makes none
        or (Path(link).is_dir() and not Path(link).is_symlink())  # no rename replaces it
    ):
        return original(*args, **kwargs)
    temporary = _temporary_name(absolute_path(link))
    try:
        result = original(trainer=trainer, filepath=path, linkpath=os.fspath(temporary))
        temporary.replace(link)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if any(plugin._durable for plugin in plugins):
        fsync_directory(os.fspath(temporary.parent))
    return result


def _temporary_name(link: str) -> Path:
    """Return the temporary name for the replacement of a link, which ModelCheckpoint takes for no checkpoint.

    The next save replaces what a crash leaves there.
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
        if trainer.state.status != "running":  # in fit(), the next save or teardown() waits for this one
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
    """Return an argument of a call; None if the function has none with this name."""
    try:
        return inspect.signature(function).bind(*args, **kwargs).arguments.get(name)
    except TypeError:
        return None


def _with_argument(
    function: Callable[..., Any], name: str, value: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Return the arguments of a call with one of them replaced, which it has."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.arguments[name] = value
    return bound.args, bound.kwargs


def _free_name(path: Any) -> str:
    """Return a name beside the path that no file has."""
    return f"{os.fspath(path)}.{uuid.uuid4().hex}"


_SCAN = "_scan_and_log_checkpoints"  # of loggers
_SAVE = "save_checkpoint"  # of the Trainer
_SAVE_OF_FABRIC = "save"
_TEARDOWN = "teardown"  # of strategies
_MAX_WRAPPERS = 100
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
        "background=True: the methods ModelCheckpoint.file_exists and _link_checkpoint of this version of "
        "Lightning are not supported, so two checkpoints could get the same name, or a link could dangle; "
        "therefore each save waits until it is durable. Use Lightning 2.6, or background=False",
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
    """Remove a file whose removal had to wait; an error must not make an unrelated call fail.

    It would be raised only on rank 0, in file_exists, where the other ranks wait for rank 0.
    """
    try:
        _remove(name)
    except OSError as error:
        why = error.strerror or str(error)
        warn_without_failing(
            f"could not remove the old checkpoint {name}: {why}; remove it by hand", caller()
        )


def _is_of_requeue(name: str) -> bool:
    """Whether Lightning saves this checkpoint when SLURM ends the job, just before it requeues the job."""
    return re.fullmatch(r"hpc_ckpt_\d+\.ckpt", Path(name).name) is not None


def _is_of_launcher(name: str) -> bool:
    """Whether a launcher saves the weights to this file, on one rank, for the process that started the ranks.

    That process reads the file once the ranks have exited, and would not learn of an error in the background.
    """
    return Path(name).name == ".temp.ckpt"


def _local(path: "str | os.PathLike[str]") -> str:
    name = os.fspath(path)
    if name.startswith("file://"):
        return name.removeprefix("file://")
    if "://" in name:
        raise Unsupported(
            None, f"{name} is not a local path; omit this plugin to let Lightning save it by fsspec", name
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
