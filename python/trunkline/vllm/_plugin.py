"""What vLLM calls through its entry point vllm.general_plugins, in each of its processes."""

from trunkline._logging import Log

_log = Log("stream")

LOAD_FORMAT = "trunkline"


def register() -> None:
    """Add the load format "trunkline" to vLLM. May be called more than once.

    Never raises: vLLM would not start then, whatever its load format. If this vLLM has another structure, it
    rejects --load-format trunkline, and the log has the reason.
    """
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from trunkline.vllm._loader import loader_class

        register_model_loader(LOAD_FORMAT)(loader_class())
    except Exception as error:
        _log.warn("--load-format %s is not available in this vLLM: %s", LOAD_FORMAT, error)
