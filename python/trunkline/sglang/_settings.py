"""What TRUNKLINE_SGLANG asks for."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline._core import parse_size

VARIABLE = "TRUNKLINE_SGLANG"
_EXAMPLE = '\'{"memory_budget": "20GB"}\''
_OF_STREAMING = ("memory_budget", "pack_dir", "volumes", "unit_bytes", "retry_seconds")
_KNOWN = ("stream", *_OF_STREAMING)


@dataclass(frozen=True)
class Settings:
    """What the variable says."""

    # Read weights in each pass; or False: keep all in memory, and only load them faster.
    stream: bool = True
    # As the arguments of trunkline.transformers.from_pretrained; None: its default.
    memory_budget: int | None = None
    pack_dir: str | None = None
    volumes: tuple[str, ...] | None = None
    unit_bytes: int | None = None
    retry_seconds: float = 60.0  # SGLang itself ends a server that computes for 300 s (--watchdog-timeout)


def settings_of_environment() -> Settings | None:
    """Return the settings; None if the variable is not set, or empty. Raises ValueError."""
    text = os.environ.get(VARIABLE, "").strip()
    return _parsed(text) if text else None


def _parsed(text: str) -> Settings:
    source = VARIABLE
    if not text.startswith("{"):
        source = f"the file {text}, which {VARIABLE} names"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{VARIABLE}: must be JSON, such as {_EXAMPLE}, or the path of a file with it: {error}"
            ) from None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source}: is not JSON: {error}; an example: {_EXAMPLE}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{source}: must be a JSON object, such as {_EXAMPLE}")
    if unknown := sorted(values.keys() - set(_KNOWN)):
        raise ValueError(f"{source}: {unknown[0]!r} is unknown; known are {', '.join(_KNOWN)}")
    stream = values.get("stream", True)
    if not isinstance(stream, bool):
        raise ValueError(f"{source}: stream: must be true or false, not {stream!r}")
    if not stream and (useless := [name for name in _OF_STREAMING if values.get(name) is not None]):
        raise ValueError(
            f'{source}: {useless[0]}: has no effect with "stream": false, which keeps the whole model in '
            "memory; remove one of them"
        )
    return Settings(
        stream=stream,
        memory_budget=_size(values, "memory_budget", source),
        pack_dir=_path(values.get("pack_dir"), "pack_dir", source),
        volumes=_paths(values.get("volumes"), source),
        unit_bytes=_size(values, "unit_bytes", source),
        retry_seconds=_seconds(values.get("retry_seconds", Settings.retry_seconds), source),
    )


def _size(values: dict[str, Any], name: str, source: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    try:
        size = parse_size(value, name)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None
    if size < 1:
        raise ValueError(f"{source}: {name}: must be at least 1")
    return size


def _seconds(value: Any, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{source}: retry_seconds: must be a number of seconds, not {value!r}")
    return float(value)


def _path(value: Any, name: str, source: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{source}: {name}: must be the path of a directory, not {value!r}")
    return value


def _paths(value: Any, source: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise ValueError(f"{source}: volumes: must be a list of directories, not {value!r}")
    return tuple(str(_path(each, "volumes", source)) for each in value)
