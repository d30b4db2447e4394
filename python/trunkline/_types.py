"""Types of arguments and results, for annotations: those of trunkline._core, and of code that calls it."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SupportsDlpack(Protocol):
    """A tensor of any framework with DLPack."""

    def __dlpack__(self) -> Any:
        """A capsule that lends the tensor."""

    def __dlpack_device__(self) -> Any:
        """(device type, device number)."""


class NumpyLike(Protocol):
    """A numpy array, also of a dtype that the buffer protocol does not support."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Address, shape and dtype of the memory."""


class CudaArray(Protocol):
    """An array in the memory of a CUDA GPU, for example of CuPy or Numba."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape and type of the memory, and the stream that works on it."""


# Memory to write from and to read into; whether it is writable is only known at run time.
ReadableBuffer: TypeAlias = "Buffer | SupportsDlpack | NumpyLike | CudaArray"
WritableBuffer: TypeAlias = ReadableBuffer

# A one-dimensional array of integers (numpy, torch, array.array), or a sequence of int.
Integers: TypeAlias = "Sequence[int] | Buffer | SupportsDlpack | NumpyLike"

Path: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
# [dir, dir, ..., name] or ([dir, dir, ...], name)
StripedPath: TypeAlias = "Sequence[Path] | tuple[Sequence[Path], Path]"
Mode: TypeAlias = Literal["r", "r+", "w", "x", "rb", "r+b", "rb+", "wb", "xb"]
Direct: TypeAlias = Literal["auto", "always", "never", "unless_cached"] | bool


class Alignment(TypedDict):
    """What a copy-free direct transfer requires, in bytes: of the address, and of offset and length."""

    memory: int
    offset: int


class Refusal(TypedDict):
    """Something that was tried and rejected, and why."""

    what: str
    why: str


class GpuPath(TypedDict):
    """The I/O path that is used for the memory of a GPU, and why.

    "gds": GPUDirect Storage, "bounce": pinned buffers, "unknown" while the process uses no GPU.
    """

    path: str
    why: str


class Tuning(TypedDict):
    """The settings that `trunkline tune` measured as fastest, and whether they are in effect.

    `time` is when, in UTC; empty where the path is not tuned.
    """

    in_effect: bool
    time: str
    settings: str
    why: str


class Explanation(TypedDict):
    """The I/O path that an engine uses for a path, and why: Engine.explain."""

    backend: str
    direct: bool
    why: str
    alignment: Alignment
    device: str
    filesystem: str
    mount: str
    gpu: GpuPath
    tuning: Tuning
    refused: list[Refusal]


class BytesByIoPath(TypedDict):
    """Payload bytes by I/O path."""

    direct: int
    bounced: int
    buffered: int
    gds: int


class Latency(TypedDict):
    """Distribution of the latencies of transfers."""

    count: int
    mean_ns: float
    p50_ns: int
    p99_ns: int


class Stats(TypedDict):
    """Counters of an engine: Engine.stats."""

    bytes: BytesByIoPath
    operations: int
    transfers: int
    inline_operations: int
    retries: int
    short_resumes: int
    direct_refusals: int
    errors: int
    pinned_bytes: int
    peak_pinned_bytes: int
    read_latency: Latency
    write_latency: Latency
