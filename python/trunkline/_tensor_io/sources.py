"""The memory that a save reads, which must stay where and as it is until it is staged."""

from collections.abc import Sequence
from contextlib import suppress

import torch

from trunkline._core import Engine, FileLayout, FileSet, GcPause, crc32c_of_samples
from trunkline._errors import Error
from trunkline._types import Path


class Sources:
    """Tensors and their storages, with addresses and sizes when this was made.

    Holding them keeps them, but not their memory: resizing a storage frees it.
    """

    def __init__(
        self,
        storages: Sequence[torch.UntypedStorage],
        tensors: Sequence[torch.Tensor],
        names: Sequence[str] = (),
    ) -> None:
        """`names`: of the tensors, for messages; none, or as many."""
        self._storages = storages
        self._tensors = tensors
        self._names = names
        self._seen = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        self._watched: _Watched | None = None

    def watch(self) -> None:
        """Have problem() find changes of values, too. For saves whose caller goes on meanwhile."""
        with GcPause():
            self._watched = _Watched(self._tensors)

    def problem(self, what: str, path: str) -> Error | None:
        """Return the error to raise if one of them has been resized since, or was seen to change.

        Not raised here: a traceback would keep them.
        """
        for index, (storage, seen) in enumerate(zip(self._storages, self._seen, strict=True)):
            if (storage.data_ptr(), storage.nbytes()) != seen:
                of = self._named(index) if len(self._storages) == len(self._tensors) else "a tensor"
                return self._error(what, f"the memory of {of} was resized or freed", path)
        changed = None if self._watched is None else self._watched.first_change()
        return None if changed is None else self._error(what, f"{self._named(changed)} was changed", path)

    def _named(self, index: int) -> str:
        return f"the tensor {self._names[index]!r}" if self._names else "a tensor"

    @staticmethod
    def _error(what: str, happened: str, path: str) -> Error:
        return Error(
            None,
            f"{what}: {happened} before it was copied, and nothing was saved; call wait_staged() before "
            "tensors change",
            path,
        )


class _Watched:
    """The values of tensors at one moment, as far as a look that costs next to nothing can know them.

    torch counts operations in place, but not those of fused optimizers, of `.data`, and of numpy arrays that
    share the memory. A few bytes here and there of each tensor find these, if they change most of it.
    The count is that of the whole memory of a view, where others may write beside it: it is used where all
    of that is saved. Nothing here makes a save fail that would succeed otherwise.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._versions = _versions_of(tensors)
        self._addresses, self._sizes = _ranges_of(tensors)
        self._samples = crc32c_of_samples(self._addresses, self._sizes)

    def first_change(self) -> int | None:
        """Return the index of the first tensor that has changed since. Its memory must still be there."""
        versions = _versions_of(self._tensors)
        if versions != self._versions:
            saved = _saved_bytes_by_memory(self._tensors)
            for index, tensor in enumerate(self._tensors):
                if versions[index] != self._versions[index] and _is_saved_whole(tensor, saved):
                    return index
        now, then = crc32c_of_samples(self._addresses, self._sizes), self._samples
        if now == then:
            return None
        starts = range(0, len(then), 4)  # a sample has 4 bytes
        return next(start // 4 for start in starts if now[start : start + 4] != then[start : start + 4])


# What torch raises for tensors that have no count, or no memory to look at.
_UNUSUAL = (RuntimeError, TypeError, ValueError, NotImplementedError)


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often each was changed in place; 0 where torch does not count."""
    try:
        return [tensor._version for tensor in tensors]
    except _UNUSUAL:  # made in torch.inference_mode()
        return [_version_of(tensor) for tensor in tensors]


def _version_of(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except _UNUSUAL:
        return 0


def _ranges_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return address and size of each tensor in main memory; 0 for others, and for what lies scattered."""
    try:
        sizes = [
            tensor.nbytes
            if tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
            else 0
            for tensor in tensors
        ]
        addresses = [
            tensor.data_ptr() if nbytes else 0 for tensor, nbytes in zip(tensors, sizes, strict=True)
        ]
    except _UNUSUAL:  # not initialised yet, or a subclass
        if len(tensors) <= 1:
            return [0] * len(tensors), [0] * len(tensors)
        ranges = [_ranges_of([tensor]) for tensor in tensors]
        return [address for (address,), _ in ranges], [nbytes for _, (nbytes,) in ranges]
    return addresses, sizes


def _saved_bytes_by_memory(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return how many bytes are saved of each storage, by its address."""
    seen: set[tuple[int, int]] = set()
    saved: dict[int, int] = {}
    for tensor in tensors:
        with suppress(*_UNUSUAL):
            at = tensor.data_ptr(), tensor.nbytes
            if at not in seen:
                seen.add(at)
                memory = tensor.untyped_storage().data_ptr()
                saved[memory] = saved.get(memory, 0) + tensor.nbytes
    return saved


def _is_saved_whole(tensor: torch.Tensor, saved: dict[int, int]) -> bool:
    try:
        memory = tensor.untyped_storage()
        return saved.get(memory.data_ptr(), 0) >= memory.nbytes()
    except _UNUSUAL:
        return False


class SourceLayout(FileLayout):
    """A FileLayout of the memory of `sources`."""

    def __init__(self, path: Path, nbytes: int, sources: Sources) -> None:
        """As FileLayout does."""
        super().__init__(path, nbytes)
        self.sources = sources


class CheckedFileSet(FileSet):
    """A FileSet that fails if what it reads is resized, freed or changed before it is staged.

    While it is being staged, memory that is freed may still end the process (SIGSEGV).
    """

    def __init__(
        self,
        layouts: Sequence[FileLayout],
        sources: Sources,
        what: str,
        path: str,
        *,
        engine: Engine | None = None,
        durable: bool = True,
        replace: bool = True,
        stage_all: bool = False,
        staging_bytes: "int | str | None" = None,
    ) -> None:
        """Create the files; `what`, and `path`, are for messages."""
        super().__init__(
            layouts,
            engine=engine,
            durable=durable,
            replace=replace,
            stage_all=stage_all,
            staging_bytes=staging_bytes,
        )
        self._sources: Sources | None = sources
        self._what = what
        self._path = path

    def stage(self) -> None:
        """As FileSet does."""
        sources, self._sources = self._sources, None  # not kept when it is staged
        assert sources is not None
        try:
            problem = sources.problem(self._what, self._path)
            if problem is None:
                super().stage()
                problem = sources.problem(self._what, self._path)
        finally:
            del sources  # an error keeps this frame
        if problem is not None:
            super().discard()
            raise problem

    def discard(self) -> None:
        """As FileSet does."""
        self._sources = None
        super().discard()
