"""The arguments of tl.data.index(), checked."""

import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trunkline._paths import absolute_path
from trunkline.data._kinds import FORMATS

Report = Callable[[int, int], object]  # files done, of all


@dataclass(frozen=True)
class Options:
    """What decides which samples an index has, and how it is made."""

    format: str  # also "auto"
    record_bytes: int | None
    stride_bytes: int | None
    header_bytes: int
    columns: tuple[str, ...] | None
    cache: str | None  # "auto", a path, or None: not saved
    skip: bool
    report: Report | None
    workers: int


def options_of(
    format: Any,  # noqa: A002
    record_bytes: Any,
    stride_bytes: Any,
    header_bytes: Any,
    columns: Any,
    cache: Any,
    on_error: Any,
    progress: Any,
    workers: Any,
) -> Options:
    """Check the arguments of tl.data.index(). Raises TypeError and ValueError."""
    if format not in ("auto", *FORMATS):
        raise ValueError(
            f"format: must be one of {', '.join(('auto', *FORMATS))}, not {format!r}; where each file is one "
            'sample, such as an image, it is "files"'
        )
    if format == "auto" and record_bytes is not None:
        format = "records"  # noqa: A001
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error: must be "raise" or "skip", not {on_error!r}')
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: must be callable, or None, not {type(progress).__name__}")
    record = _whole(record_bytes, "record_bytes", 1)
    if format == "records" and record is None:
        raise ValueError('record_bytes: format "records" requires the size of a record in bytes')
    for value, name in (
        (record_bytes, "record_bytes"),
        (stride_bytes, "stride_bytes"),
        (header_bytes, "header_bytes"),
    ):
        if format == "auto" and value not in (None, 0):
            raise ValueError(f'{name}: requires record_bytes= as well (format "records")')
        if format != "records" and value not in (None, 0):
            raise ValueError(f'{name}: only format "records" supports it, not {format!r}')
    if format != "auto":
        check_columns(columns, format)
    return Options(
        format=format,
        record_bytes=record,
        stride_bytes=_whole(stride_bytes, "stride_bytes", 1),
        header_bytes=_whole(header_bytes, "header_bytes", 0) or 0,
        columns=_columns(columns),
        cache=_cache(cache),
        skip=on_error == "skip",
        report=progress,
        workers=_whole(workers, "workers", 1) or max(4, min(16, 2 * (os.cpu_count() or 1))),
    )


def check_columns(columns: Any, format: str) -> None:  # noqa: A002
    """Raise ValueError if there are columns, but the format has none."""
    if columns is not None and format != "parquet":
        raise ValueError(f'columns: only format "parquet" supports them, not {format!r}')


def _whole(value: Any, name: str, least: int) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: must be an integer or None, not {type(value).__name__}")
    if not least <= number < 2**63:
        raise ValueError(f"{name}: must be at least {least} and below 2^63, not {number}")
    return number


def _columns(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"columns: must be a list of names, or None, not {type(value).__name__}")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"columns: must be a list of names, but {name!r} is not a str")
    if not names:
        raise ValueError("columns: must name at least one column")
    if len(set(names)) != len(names):
        raise ValueError("columns: a name is given twice")
    return names


def _cache(value: Any) -> str | None:
    if value is None or value is False:
        return None
    if value is True or value == "auto":
        return "auto"
    return absolute_path(value, "cache")
