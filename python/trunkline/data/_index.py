"""Where each sample is: tl.data.Index."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy

from trunkline._core import Volume
from trunkline.data._info import IndexInfo
from trunkline.data._paths_view import PathSequence

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    View = Callable[[Any, int], object]

# The arrays of an index, and their types. Those of files first; "offsets" and "lengths" only where samples
# are not uniform, "first_offsets" only where they are.
ARRAYS = {
    "path_blob": numpy.uint8,
    "path_ends": numpy.uint64,
    "sizes": numpy.uint64,
    "mtimes_ns": numpy.int64,
    "inodes": numpy.uint64,
    "first_samples": numpy.uint64,
    "class_files": numpy.uint64,
    "class_ids": numpy.int64,
    "first_offsets": numpy.uint64,
    "offsets": numpy.uint64,
    "lengths": numpy.uint64,
}


def _read_only(array: "NDArray[Any]") -> "NDArray[Any]":
    view = array.view()
    view.flags.writeable = False
    return view


class Index:
    """Where each sample is: an immutable table of files, offsets and lengths. Made by tl.data.index().

    len(index) is the number of samples, which are numbered from 0, file after file. A sample takes at most 16
    bytes of memory, or none where all have one size; tables that come from a cache file are mapped, not read.
    Indexes can be pickled, which costs little: by the path of the cache file where there is one. Thread-safe.
    """

    # Read by the native reader: _path_blob, _path_ends, _first_samples, _sizes, _mtimes_ns, _inodes;
    # _offsets, _lengths and _ranges_per_sample, or _record_bytes, _stride_bytes and _first_offsets; _framing.
    _path_blob: "NDArray[numpy.uint8]"
    _path_ends: "NDArray[numpy.uint64]"
    _first_samples: "NDArray[numpy.uint64]"
    _sizes: "NDArray[numpy.uint64]"
    _mtimes_ns: "NDArray[numpy.int64]"
    _inodes: "NDArray[numpy.uint64]"
    _offsets: "NDArray[numpy.uint64] | None"
    _lengths: "NDArray[numpy.uint64] | None"
    _first_offsets: "NDArray[numpy.uint64] | None"

    def __init__(
        self, info: IndexInfo, arrays: "dict[str, NDArray[Any]]", cached_at: tuple[str, int] | None = None
    ) -> None:
        """Private: use tl.data.index().

        `arrays`: as ARRAYS names them. `cached_at`: the file that they are mapped from, and the checksum of
        its header.
        """
        self._info = info
        self._arrays = {
            name: _read_only(numpy.ascontiguousarray(arrays[name], dtype))
            for name, dtype in ARRAYS.items()
            if name in arrays
        }
        self._cached_at = cached_at
        for name in ARRAYS:
            setattr(self, f"_{name}", self._arrays.get(name))
        self._framing = info.framing
        self._ranges_per_sample = info.ranges_per_sample
        self._record_bytes = info.record_bytes
        self._stride_bytes = info.stride_bytes

    def __len__(self) -> int:
        return int(self._first_samples[-1])

    def __repr__(self) -> str:
        count = len(self._sizes)
        files = "1 file" if count == 1 else f"{count} files"
        samples = "1 sample" if len(self) == 1 else f"{len(self)} samples"
        return f"<Index of {samples} in {files}, format {self.format!r}>"

    @property
    def format(self) -> str:
        """What the files are: "files", "records", "npy", "npz", "tfrecord", "webdataset" or "parquet"."""
        return self._info.format

    @property
    def nbytes(self) -> int:
        """Bytes of the table of samples, without the list of files; 0 if all samples have one size."""
        return sum(table.nbytes for table in (self._offsets, self._lengths) if table is not None)

    @functools.cached_property
    def _volume(self) -> Volume | None:
        """The volume of the files; None: paths are paths."""
        if self._info.volume is None:
            return None
        directories, stripe_bytes = self._info.volume
        return Volume(directories, stripe_bytes=stripe_bytes)

    @functools.cached_property
    def paths(self) -> Sequence[str]:
        """The absolute paths of the files, or their names in the volume, in the order of their samples."""
        return PathSequence(self._path_blob, self._path_ends)

    @property
    def classes(self) -> list[str]:
        """Names of the classes, sorted: the first folders below the indexed one; empty if there are none."""
        return list(self._info.classes)

    @property
    def skipped(self) -> list[tuple[str, int, str]]:
        """What on_error="skip" left out: (path, offset in the file in bytes, reason) of each."""
        return list(self._info.skipped)

    def labels(self, samples: "ArrayLike") -> "NDArray[numpy.int64]":
        """Return the class of each sample, as an index into `classes`.

        `samples`: numbers of samples, an array of integers of any shape; the result has the same shape.
        Raises IndexError for a number that is not that of a sample, ValueError if there are no classes.
        """
        if not self._info.classes:
            raise ValueError("the index has no classes: its files are not in one folder for each class")
        asked = numpy.asarray(samples)
        if asked.dtype.kind not in "iu" and asked.size:
            raise TypeError(f"samples: must be integers, not {asked.dtype}")
        if asked.size and (int(asked.min()) < 0 or int(asked.max()) >= len(self)):
            outside = int(asked.min()) if int(asked.min()) < 0 else int(asked.max())
            raise IndexError(f"samples: {outside} is not the number of a sample, 0 to {len(self) - 1}")
        files = numpy.searchsorted(self._first_samples, asked.astype(numpy.uint64), side="right") - 1
        runs = numpy.searchsorted(self._arrays["class_files"], files.astype(numpy.uint64), side="right") - 1
        return numpy.asarray(self._arrays["class_ids"][runs], numpy.int64)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the samples: a hexadecimal str, the same for a copy of the data elsewhere.

        Made from the format and its parameters, the files' names below the indexed folder, their sizes, and
        how many samples each has; not from their contents or times.
        """
        digest = hashlib.sha256()
        info = asdict(self._info)
        kept = (
            "format",
            "record_bytes",
            "stride_bytes",
            "framing",
            "dtype",
            "row_shape",
            "columns",
            "parameters",
        )
        digest.update(json.dumps({name: info[name] for name in kept}, sort_keys=True).encode())
        paths = PathSequence(self._path_blob, self._path_ends)
        for each in range(len(paths)):
            digest.update(paths.encoded(each)[self._info.root_bytes :] + b"\0")
        for array in (self._sizes, self._first_samples):
            digest.update(array.astype("<u8").tobytes())
        return digest.hexdigest()[:32]

    def _view(self, memory: Any, sample: int) -> object:
        """Return what users get for the bytes of a sample, without a copy where that is possible.

        `memory`: a memoryview; a list of them, one for each range, if a sample has several.
        """
        return self._viewer(memory, sample)

    @functools.cached_property
    def _viewer(self) -> "View":
        from trunkline.data._views import viewer

        return viewer(self._info, self.paths, self._first_samples, self._offsets)

    def __getstate__(self) -> dict[str, Any]:
        if self._cached_at is not None:
            return {"cached_at": self._cached_at}
        return {"info": self._info, "arrays": self._arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "cached_at" in state:
            from trunkline.data._cache import reopen

            self.__dict__.update(reopen(*state["cached_at"]).__dict__)
        else:
            Index.__init__(self, state["info"], state["arrays"])
