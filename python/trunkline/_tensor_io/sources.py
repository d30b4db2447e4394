"""The memory that a save reads, which must not move or change until it is staged."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from trunkline._core import Engine, FileLayout, FileSet, GcPause, crc32c_of_samples
from trunkline._errors import Error
from trunkline._torch_or_numpy import torch
from trunkline._types import Path


class Sources:
    """Tensors and their storages, with their addresses and sizes at the beginning of a save.

    References keep the objects alive, but not their memory: resizing a storage frees it.
    """

    def __init__(
        self,
        storages: Sequence[torch.UntypedStorage],
        tensors: Sequence[torch.Tensor],
        name_of: "Callable[[int], str | None]" = lambda _: None,
    ) -> None:
        """`name_of`: called with an index of `tensors`, for a message: what the user calls that tensor.

        It may be called from another thread while the user changes the objects that hold the tensors.
        """
        self._storages = storages
        self._tensors = tensors
        self._name_of = name_of
        self._seen = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
        self._watched: _Watched | None = None

    def watch(self) -> None:
        """Make problem() find changes of values, too. For saves whose caller goes on meanwhile."""
        with GcPause():
            self._watched = _Watched(self._tensors)

    def problem(self, what: str, path: str) -> Error | None:
        """Return the error to raise if a tensor was resized, or was found to have changed; else None.

        Not raised here: a traceback would keep the tensors alive.
        """
        for storage, seen in zip(self._storages, self._seen, strict=True):
            if (storage.data_ptr(), storage.nbytes()) != seen:
                of = self._named(self._tensor_on(storage))
                return self._error(what, f"the memory of {of} was resized or freed", path)
        changed = None if self._watched is None else self._watched.first_change()
        return None if changed is None else self._error(what, f"{self._named(changed)} was changed", path)

    def _tensor_on(self, storage: torch.UntypedStorage) -> int | None:
        for index, tensor in enumerate(self._tensors):
            with suppress(*_UNUSUAL):
                if tensor.untyped_storage()._cdata == storage._cdata:
                    return index
        return None

    def _named(self, index: int | None) -> str:
        return "a tensor" if index is None else self._name_of(index) or "a tensor"

    @staticmethod
    def _error(what: str, happened: str, path: str) -> Error:
        return Error(
            None,
            f"{what}: {happened} before it was copied, so nothing was saved; call wait_staged() before "
            "changing tensors",
            path,
        )


class _Watched:
    """Version counters and samples of tensors, which detect most changes at almost no cost.

    torch counts in-place operations, but not those of fused optimizers, of `.data`, and of numpy arrays that
    share the memory. Samples of a few bytes of each tensor detect these, if they change most of it. The count
    is that of the whole storage of a view, where other code may write beside it: it is used only if the whole
    storage is saved. Nothing here makes a save fail that would succeed otherwise.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._versions = _versions_of(tensors)
        self._addresses, self._sizes = _ranges_of(tensors)
        self._samples = crc32c_of_samples(self._addresses, self._sizes)

    def first_change(self) -> int | None:
        """Return the index of the first changed tensor, or None. Its memory must still exist."""
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


# Raised by torch for tensors without a version counter, or without accessible memory.
_UNUSUAL = (RuntimeError, TypeError, ValueError, NotImplementedError)


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how often each was changed in place; 0 if torch does not count."""
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
    """Return address and size of each contiguous tensor in main memory; 0 for others."""
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
        """Accept the arguments of FileLayout, and `sources`."""
        super().__init__(path, nbytes)
        self.sources = sources


class CheckedFileSet(FileSet):
    """A FileSet that fails if its sources are resized, freed or changed before they are staged.

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
        access_of: "str | None" = None,
    ) -> None:
        """Create the files; `what` and `path` are for messages."""
        super().__init__(
            layouts,
            engine=engine,
            durable=durable,
            replace=replace,
            stage_all=stage_all,
            staging_bytes=staging_bytes,
            access_of=access_of,
        )
        self._sources: Sources | None = sources
        self._what = what
        self._path = path

    def stage(self) -> None:
        """Do as FileSet, and see the class."""
        sources, self._sources = self._sources, None  # not kept alive once staged
        assert sources is not None
        try:
            problem = sources.problem(self._what, self._path)
            if problem is None:
                super().stage()
                problem = sources.problem(self._what, self._path)
        finally:
            del sources  # an error keeps this frame alive
        if problem is not None:
            super().discard()
            raise problem

    def discard(self) -> None:
        """Do as FileSet, and see the class."""
        self._sources = None
        super().discard()
