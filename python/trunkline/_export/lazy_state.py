"""A state whose tensors are still in files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trunkline._export.placeholders import Placeholders
from trunkline._export.stored import Stored
from trunkline._tensor_io.tensors import bytes_of


@dataclass(frozen=True)
class StoredBytes:
    """Bytes [begin, end) of a stored tensor."""

    stored: Stored
    begin: int
    end: int
    name: str


@dataclass
class LazyState:
    """A state: `value` is what was saved, with placeholders in the place of most tensors.

    `names` and `stored` describe the placeholders, by their index.
    """

    value: Any
    placeholders: Placeholders
    names: Sequence[str]
    stored: Sequence[Stored]
    source: str  # for messages: "step 100 of /data/run"
    step: int | None = None
    warnings: list[str] = field(default_factory=list)

    def content_of(self, address: int, nbytes: int) -> StoredBytes | None:
        """Return the stored bytes that the memory at an address stands for; None for other memory."""
        found = self.placeholders.find(address) if nbytes > 0 else None
        if found is None:
            return None
        index, begin = found
        return StoredBytes(self.stored[index], begin, begin + nbytes, self.names[index])

    @property
    def is_verified(self) -> bool:
        """Whether every byte that is read is compared with a checksum."""
        return all(file.is_verified for each in self.stored for file in each.files())


def placeholder_tensors(
    placeholders: Placeholders, described: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> list[torch.Tensor]:
    """Return the placeholders as tensors of these dtypes and shapes."""
    return [
        torch.empty(shape, dtype=dtype, device="cpu")
        if 0 in shape
        else placeholders.tensor(index).view(dtype).reshape(shape)
        for index, (dtype, shape) in enumerate(described)
    ]


def at_key(value: Any, key: str | None, source: str) -> Any:
    """Return the part of a nested mapping that `key` names: a key, or several with dots between them.

    Raises ValueError, which names the keys that there are.
    """
    if key is None:
        return value
    rest = key
    while rest:
        head = _longest_key(value, rest)
        if head is None:
            raise no_key(key, value if isinstance(value, Mapping) else {}, source)
        value = value[head]
        rest = rest[len(head) + 1 :]
    return value


def _longest_key(value: Any, rest: str) -> str | None:
    if not isinstance(value, Mapping):
        return None
    found = [
        name for name in value if isinstance(name, str) and (rest == name or rest.startswith(f"{name}."))
    ]
    return max(found, key=len, default=None)


def no_key(key: str, keys: "Mapping[Any, Any] | Sequence[Any]", source: str) -> ValueError:
    """Make the error for a key that a state does not have."""
    shown = ", ".join(repr(each) for each in list(keys)[:8]) + (", ..." if len(keys) > 8 else "")
    return ValueError(
        f"key: {source} has no {key!r}; there {'is' if len(keys) == 1 else 'are'} {shown or 'none'}"
    )


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor that is in memory."""
    return bytes_of(tensor.detach().contiguous())
