"""What SGLang calls through its entry point sglang.srt.plugins, in each of its processes."""

from collections.abc import Callable
from typing import Any

from trunkline._errors import Unsupported
from trunkline._logging import Log
from trunkline.sglang._settings import VARIABLE, Settings, settings_of_environment

_log = Log("stream")

_LOAD = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def register() -> None:
    """Let SGLang stream or load the weights of its models, if TRUNKLINE_SGLANG is set; else do nothing.

    SGLang only logs what a plugin raises, and would go on without it: so errors end the process (SystemExit).
    """
    try:
        settings = settings_of_environment()
    except ValueError as error:
        raise SystemExit(f"trunkline: {error}") from None
    if settings is None:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        raise SystemExit(f"trunkline: {VARIABLE} is set, but this SGLang cannot be used: {error}") from error

    for target, hook in (_streaming_hooks(settings) if settings.stream else _loading_hooks()).items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    _check_in_effect()
    _log.debug("the loading of models is taken over, because %s is set", VARIABLE)


def _streaming_hooks(settings: Settings) -> dict[str, Callable[..., Any]]:
    def load(original: Any, runner: Any) -> Any:
        from trunkline.sglang._model_loading import load_streamed

        return load_streamed(original, runner, settings)

    return {_LOAD: load}


def _loading_hooks() -> dict[str, Callable[..., Any]]:
    from trunkline.sglang._fast_loading import ITERATORS, load_and_check, read_weights

    return {_LOAD: load_and_check, **dict.fromkeys(ITERATORS, read_weights)}


def _check_in_effect() -> None:
    """End the process unless SGLang will call load(): it only logs that a function cannot be found.

    That the weights are read by Trunkline is checked once they are loaded.
    """
    try:
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.plugins.hook_registry import HookRegistry

        if _LOAD in HookRegistry._patched and hasattr(ModelRunner.load_model, "__wrapped__"):
            return
        raise Unsupported(None, "ModelRunner.load_model could not be taken over")
    except Exception as error:
        import sglang

        raise SystemExit(
            f"trunkline: {VARIABLE} is set, but SGLang {getattr(sglang, '__version__', '')} cannot be used "
            f"with it: {error}; unset {VARIABLE} to serve without Trunkline"
        ) from error
