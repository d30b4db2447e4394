"""Callbacks of transformers that upload the folder `checkpoint-N` of each save, which we do not make."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_TRUE = ("1", "ON", "YES", "TRUE")  # as transformers reads its variables


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in _TRUE


# By class: the setting that enables it, and whether it is set. Some read their variable when training begins.
_UPLOADS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "WandbCallback": (
        "WANDB_LOG_MODEL=checkpoint",
        lambda callback: getattr(callback._log_model, "value", None) == "checkpoint",
    ),
    "MLflowCallback": ("HF_MLFLOW_LOG_ARTIFACTS", lambda _: _is_set("HF_MLFLOW_LOG_ARTIFACTS")),
    "NeptuneCallback": ("log_checkpoints", lambda callback: callback._log_checkpoints is not None),
    "ClearMLCallback": ("CLEARML_LOG_MODEL", lambda _: _is_set("CLEARML_LOG_MODEL")),
    "FlyteCallback": ("sync_checkpoints", lambda callback: bool(callback.sync_checkpoints)),
}


def find_upload(callbacks: Iterable[object]) -> str | None:
    """Return the setting by which the first of these callbacks uploads checkpoints, with its class."""
    for callback in callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in _UPLOADS:
                setting, is_enabled = _UPLOADS[base.__name__]
                if is_enabled(callback):
                    return f"{setting} ({base.__name__})"
    return None
