"""Measures this machine, in about a second: computing with weights, copying to a GPU, reading storage."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from trunkline import _core
from trunkline._errors import errno_reason, exception_of

_SECONDS = 0.3  # for each measurement
_EDGE = 2048  # of the matrices, in elements
_GPU_EDGE = 8192  # so large that the time to launch kernels is negligible
_MATRICES_BYTES = 256 << 20  # more than caches hold, so that weights come from memory, as in a model
_REQUEST_BYTES = 16 << 20
_REQUESTS = 4  # in flight
_COPIED_BYTES = 64 << 20


def measure_compute(dtype: torch.dtype, device: torch.device) -> Callable[[int, int], float]:
    """Return a function of (bytes of weights, rows in the batch): the seconds that a pass over them computes.

    Measured by multiplying matrices that are not in the processor's caches, one batch size at a time.
    """
    matrices: list[torch.Tensor] = []
    by_batch: dict[int, float] = {}

    def seconds(weight_bytes: int, batch_size: int) -> float:
        if batch_size not in by_batch:
            if not matrices:
                edge = _GPU_EDGE if device.type == "cuda" else _EDGE
                count = max(4, _MATRICES_BYTES // (edge * edge * dtype.itemsize))
                matrices.extend(torch.ones(edge, edge, dtype=dtype, device=device) for _ in range(count))
            by_batch[batch_size] = _seconds_per_byte(matrices, batch_size)
        return weight_bytes * by_batch[batch_size]

    return seconds


def _seconds_per_byte(matrices: list[torch.Tensor], batch_size: int) -> float:
    rows = torch.ones(batch_size, matrices[0].shape[1], dtype=matrices[0].dtype, device=matrices[0].device)
    if rows.is_cuda:
        return _seconds_per_byte_on_gpu(matrices, rows)
    with torch.no_grad():
        torch.nn.functional.linear(rows, matrices[0])
        start = time.perf_counter()
        times: list[float] = []
        while not times or time.perf_counter() - start < _SECONDS:
            before = time.perf_counter()
            torch.nn.functional.linear(rows, matrices[len(times) % len(matrices)])
            times.append(time.perf_counter() - before)
    return median(times) / matrices[0].nbytes  # the median: other programs may use the processor, too


def _seconds_per_byte_on_gpu(matrices: "list[torch.Tensor]", rows: torch.Tensor) -> float:
    stream = torch.cuda.current_stream(rows.device)
    times: list[float] = []
    with torch.no_grad():
        start = time.perf_counter()
        while len(times) < 2 or time.perf_counter() - start < _SECONDS:  # the first one warms up
            before = time.perf_counter()
            for matrix in matrices:
                torch.nn.functional.linear(rows, matrix)
            stream.synchronize()
            times.append(time.perf_counter() - before)
    return median(times[1:]) / sum(matrix.nbytes for matrix in matrices)


def measure_copying(device: torch.device) -> float:
    """Return the bandwidth, in bytes per second, of copies from pinned memory to the GPU."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device)
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 2 or time.perf_counter() - start < _SECONDS:
        before = time.perf_counter()
        target.copy_(source, non_blocking=True)
        stream.synchronize()
        times.append(time.perf_counter() - before)
    return _COPIED_BYTES / median(times[1:])


def measure_reading(directories: "list[Path]") -> float:
    """Return the bandwidth, in bytes per second, of reading the largest file of each directory, all at once.

    Raises FileNotFoundError for a directory without a file that is large enough.
    """
    files = [_core.open(_largest(directory)) for directory in directories]
    try:
        buffers = [torch.empty(_REQUEST_BYTES, dtype=torch.uint8) for _ in range(_REQUESTS * len(files))]
        ends = [file.size // _REQUEST_BYTES * _REQUEST_BYTES for file in files]
        at = [0] * len(files)
        done = 0

        def send(index: int) -> "_core.Future":
            which = index % len(files)
            at[which] = (at[which] + _REQUEST_BYTES) % ends[which]
            return files[which].async_pread(buffers[index], at[which])

        start = time.perf_counter()
        in_flight = [send(index) for index in range(len(buffers))]
        while time.perf_counter() - start < _SECONDS:
            for index, future in enumerate(in_flight):
                done += future.result()
                in_flight[index] = send(index)
        for future in in_flight:
            done += future.result()
        return done / (time.perf_counter() - start)
    finally:
        for file in files:
            file.close()


def _largest(directory: Path) -> Path:
    if not directory.is_dir():
        code = errno.ENOTDIR if directory.exists() else errno.ENOENT
        raise exception_of(
            "system",
            code,
            f"cannot measure the bandwidth of {os.fspath(directory)}: {errno_reason(code)}; name existing "
            'directories (volumes=), or give the bandwidth, for example bandwidth="6.8GB"',
            os.fspath(directory),
        )
    files = [path for path in directory.iterdir() if path.is_file()]
    found = max(files, key=lambda path: path.stat().st_size, default=None)
    if found is None or found.stat().st_size < _REQUEST_BYTES:
        raise exception_of(
            "system",
            2,
            f"cannot measure the bandwidth of {os.fspath(directory)}: it has no file of at least "
            f"{_REQUEST_BYTES >> 20} MiB; give the bandwidth, for example "
            'bandwidth="6.8GB"',
            os.fspath(directory),
        )
    return found
