"""An open file whose tensors are read one by one, and slices of them."""

from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from trunkline._errors import Error, Unsupported
from trunkline._formats.slices import Block, block_of, runs_of
from trunkline._tensor_io.arrays import array_of
from trunkline._tensor_io.memory import empty_bytes
from trunkline._torch_or_numpy import HAS_TORCH, torch

if TYPE_CHECKING:
    from typing_extensions import Self

    from trunkline._formats.slices import Runs


class Description(NamedTuple):
    """Dtype and shape of a stored tensor, and whether its bytes are stored in C order, as they are loaded."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_plain: bool


class Source(Protocol):
    """What a TensorReader reads from."""

    path: str
    metadata: dict[str, str]

    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of the file; a name for each tensor that has it."""

    def describe(self, name: str) -> Description:
        """Return the description of a tensor."""

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor."""

    def read_runs(self, name: str, runs: "Runs", target: torch.Tensor) -> None:
        """Read ranges of the bytes of a plain tensor into flat memory, one after the other."""

    def close(self) -> None:
        """Close the files."""


class TensorReader:
    """The tensors of an open file or step, by name; each is read when it is asked for.

    Made by open_tensors(). `with` closes it, and so does close(). Thread-safe.
    """

    def __init__(self, source: Source, device: torch.device, *, verifies_slices: bool) -> None:
        """Not for users: open_tensors() makes readers."""
        self._device = device
        self._source: Source | None = source
        self._names = Counter(source.names())  # how many tensors have each name
        self._path = source.path
        self._verifies_slices = verifies_slices

    def keys(self) -> list[str]:
        """Return the names of all tensors, in the order of the file."""
        return list(self._names)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a tensor, and verify it as open_tensors() was told.

        Raises KeyError if there is none, Unsupported if several tensors have the name.
        """
        return self._result(name, self._of(name).read(name))

    get_tensor = __getitem__  # as safetensors.safe_open

    def get_slice(self, name: str) -> "TensorSlice":
        """Return a tensor to read slices of: get_slice("weight")[0:10]. Raises KeyError if there is none."""
        return TensorSlice(self, name, self._of(name).describe(name))

    def metadata(self) -> dict[str, str]:
        """Return the metadata of a .safetensors file; of a step its number, commit and time; else empty."""
        return dict(self._opened().metadata)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def close(self) -> None:
        """Close the files. Tensors that were read stay."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __enter__(self) -> "Self":
        """Return the reader, which is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the reader."""
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._source is None else f"{len(self)} tensors"
        return f"<trunkline.TensorReader {self._path!r}: {state}>"

    def _opened(self) -> Source:
        source = self._source
        if source is None:
            raise Error(None, f"{self._path}: the reader is closed; call open_tensors() again", self._path)
        return source

    def _of(self, name: str) -> Source:
        source = self._opened()
        if name not in self._names:
            raise KeyError(f"{self._path} has no tensor named {name!r}; keys() has all names")
        if self._names[name] > 1:
            raise Unsupported(
                None,
                f"{self._path} has {self._names[name]} tensors that are named {name!r}, under different keys "
                '(such as 0 and "0", or "a.b" and "b" in "a"); load them with load()',
                self._path,
            )
        return source

    def _result(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what users get of a tensor: where torch is not installed, an array."""
        return tensor if HAS_TORCH else cast("torch.Tensor", array_of(tensor, name))

    def _slice(self, name: str, about: Description, block: Block) -> torch.Tensor:
        source = self._of(name)
        runs = runs_of(block, about.shape, about.dtype.itemsize)
        if runs is None or not about.is_plain or self._verifies_slices:
            whole = source.read(name)
            ranges = (slice(at, at + n) for at, n in zip(block.begin, block.shape, strict=True))
            return whole[tuple(ranges)][block.rest].clone()
        memory = empty_bytes(len(runs.offsets) * runs.nbytes, self._device)
        if memory.numel():
            source.read_runs(name, runs, memory)
        read = memory.view(about.dtype).reshape(block.shape)[block.rest]
        return read if read.numel() == memory.numel() // about.dtype.itemsize else read.clone()


class TensorSlice:
    """A stored tensor of which slices are read: what TensorReader.get_slice() returns."""

    def __init__(self, reader: TensorReader, name: str, about: Description) -> None:
        """Not for users: TensorReader.get_slice() makes them."""
        self._reader = reader
        self._name = name
        self._about = about

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._about.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self._about.dtype

    def get_shape(self) -> list[int]:
        """Return the shape as safetensors does, as a list."""
        return list(self._about.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read tensor[index], of integers, slices and an Ellipsis, as a tensor of its own.

        Only the bytes of the slice are read, and small gaps between them; of a slice with steps also what the
        steps leave out. Raises TypeError for any other index, IndexError for one outside of the shape.
        """
        read = self._reader._slice(self._name, self._about, block_of(index, self._about.shape))
        return self._reader._result(self._name, read)

    def __repr__(self) -> str:
        return f"<trunkline.TensorSlice {self._name!r}: {self.dtype}, {list(self.shape)}>"
