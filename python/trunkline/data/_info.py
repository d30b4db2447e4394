"""What an index knows besides its arrays: small, and JSON-able."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class IndexInfo:
    """Format of the samples, and the arguments that decide what they are."""

    format: str
    root_bytes: int  # of the paths in the blob: the folder that all files are in, with the slash after it
    ranges_per_sample: int = 1
    record_bytes: int = 0  # of a uniform sample; 0 where there is a table
    stride_bytes: int = 0
    framing: str = ""  # "tfrecord": ranges include lengths and checksums
    dtype: Any = None  # of the rows of .npy files, as numpy.lib.format.dtype_to_descr returns it
    row_shape: tuple[int, ...] = ()
    columns: tuple[str, ...] | None = None  # of Parquet files; None: all
    classes: tuple[str, ...] = ()
    skipped: tuple[tuple[str, int, str], ...] = ()
    volume: tuple[tuple[str, ...], int] | None = None  # directories and stripe_bytes of the files' volume
    parameters: dict[str, Any] = field(default_factory=dict)  # more that decides what samples are
