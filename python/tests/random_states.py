"""Random training states for tests: each from one number, and compared to the last bit after loading."""

import collections
import itertools
import math
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

FILLED = 0xA5  # what fill() writes

_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]
_VIEW_DTYPES = [torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex64, torch.bfloat16]
_ARRAY_DTYPES = ["?", "<i2", "<u8", "<f2", ">f4", "<f8", "<c8", "<c16", "<M8[s]", "<U3", "S5", "V3"]
_STRUCTURED = np.dtype([("a", "<i4"), ("b", "<f2", (2,))])


def state_of(seed: int) -> dict[str, Any]:
    """Make a state, in new memory; equal seeds make equal states."""
    return _Maker(seed).state()


def is_tensorless(state: Any) -> bool:
    """Whether there is not one byte in tensors and arrays, so that no shard is written."""
    return all(leaf.nbytes == 0 for leaf in _leaves(state))


def can_be_filled(state: Any) -> bool:
    """Whether the documents promise that load(into=) fills it."""
    return all(
        not (leaf.is_conj() or leaf.is_neg())
        if isinstance(leaf, torch.Tensor)
        else leaf.flags.c_contiguous and leaf.flags.writeable and leaf.flags.aligned
        for leaf in _leaves(state)
    )


def fill(state: Any) -> None:
    """Overwrite all memory of a state, also what lies between its elements."""
    for leaf in _leaves(state):
        if isinstance(leaf, torch.Tensor):
            _storage(leaf)[:] = FILLED
        else:
            base = leaf
            while isinstance(base.base, np.ndarray):
                base = base.base
            if base.flags.writeable and base.flags.c_contiguous:
                base.reshape(-1).view(np.uint8)[:] = FILLED


def difference(found: Any, expected: Any, filled: bool = False) -> str | None:
    """Say what differs from what load() promises of `expected`, or None. `filled`: it was the `into`."""
    ours: list[Any] = []
    theirs: list[Any] = []
    a, b = _shown(found, ours), _shown(expected, theirs)
    if a != b:
        return f"structure or values differ: found {a}, expected {b}"
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not np.array_equal(_bytes(one), _bytes(other)):
            return f"tensor {number} has other bytes: {b}"
    return None if filled else _other_memory(ours, theirs)


def gaps_are_untouched(state: Any) -> bool:
    """Whether what fill() wrote between the elements of tensors is still there."""
    touched: dict[int, tuple[Any, Any]] = {}
    for leaf in _leaves(state):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            storage = _storage(leaf)
            at = storage.ctypes.data
            touched.setdefault(at, (storage, np.zeros(storage.size, bool)))[1][_addresses(leaf) - at] = True
    return all(bool((storage[~mask] == FILLED).all()) for storage, mask in touched.values())


def _leaves(state: Any) -> list[Any]:
    leaves: list[Any] = []
    _shown(state, leaves)
    return leaves


def _shown(value: Any, leaves: list[Any]) -> Any:
    """Return what of a state is compared by ==; its tensors and arrays go to `leaves`."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return kind, value.requires_grad, value.dtype, tuple(value.shape)
    if isinstance(value, np.ndarray):
        leaves.append(value)
        return kind, str(value.dtype.descr), value.shape
    if isinstance(value, dict):
        pairs = [(_shown(key, leaves), _shown(item, leaves)) for key, item in value.items()]
        return kind, pairs, _shown(getattr(value, "_metadata", None), leaves)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return kind, [_shown(item, leaves) for item in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(_shown(item, leaves)) for item in value)
    if isinstance(value, np.generic):
        return kind, str(value.dtype.descr), value.tobytes()
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, complex):
        return kind, struct.pack("<dd", value.real, value.imag)
    return kind, value


def _storage(tensor: torch.Tensor) -> Any:
    memory = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(memory, 0, (memory.nbytes(),), (1,)).numpy()


def _layout(leaf: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Return address, shape, strides in bytes, and the size of an element."""
    if isinstance(leaf, torch.Tensor):
        strides = tuple(step * leaf.itemsize for step in leaf.stride())
        return leaf.data_ptr(), tuple(leaf.shape), strides, leaf.itemsize
    return leaf.__array_interface__["data"][0], leaf.shape, leaf.strides, leaf.itemsize


def _addresses(leaf: Any) -> Any:
    """Return the address of each byte, in the order of the elements."""
    address, shape, strides, itemsize = _layout(leaf)
    at = np.zeros((), np.int64)
    for extent, step in zip(shape, strides, strict=True):
        at = at[..., None] + np.arange(extent, dtype=np.int64) * step
    return (at[..., None] + np.arange(itemsize)).reshape(-1) + address


def _bytes(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return np.frombuffer(leaf.tobytes(), np.uint8)
    if leaf.is_conj() or leaf.is_neg():
        leaf = leaf.detach().resolve_conj().resolve_neg()
    if not leaf.numel():
        return np.empty(0, np.uint8)
    storage = _storage(leaf)
    if leaf.is_contiguous():
        begin = leaf.data_ptr() - storage.ctypes.data
        return storage[begin : begin + leaf.numel() * leaf.itemsize]
    return storage[_addresses(leaf) - storage.ctypes.data]


def _is_copied(leaf: Any) -> bool:
    """Whether save() is documented to save a copy, which shares memory with nothing."""
    if isinstance(leaf, torch.Tensor):
        return leaf.is_conj() or leaf.is_neg()
    flags, as_bytes = leaf.flags, leaf.dtype.kind not in "biufc" or leaf.dtype.byteorder == ">"
    as_bytes = as_bytes or leaf.dtype == np.complex128
    return (
        not (flags.writeable and flags.aligned)
        or (not flags.c_contiguous and any(step < 0 or step % leaf.itemsize for step in leaf.strides))
        or (as_bytes and not flags.c_contiguous)
    )


def _other_memory(found: list[Any], expected: list[Any]) -> str | None:
    """Say where tensors share memory, or lie in it, in another way."""
    numbers = [i for i, leaf in enumerate(expected) if leaf.nbytes and not _is_copied(leaf)]
    spans = {i: _span(expected[i]) for i in numbers}
    # Only what lies close together can share: large tensors are compared as a whole.
    groups: list[list[int]] = []
    reached = -1
    for i in sorted(numbers, key=lambda i: spans[i][0]):
        if spans[i][0] >= reached:
            groups.append([])
        groups[-1].append(i)
        reached = max(reached, spans[i][1])
    shared: set[int] = set()
    for group in groups:
        if len(group) > 1:
            ours, theirs = (_aliases([leaves[i] for i in group]) for leaves in (found, expected))
            if not all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                return f"tensors {group} do not share memory as they did"
            for i, mine in zip(group, theirs, strict=True):
                # The same view twice is one tensor.
                others = [
                    other
                    for j, other in zip(group, theirs, strict=True)
                    if _layout(expected[j]) != _layout(expected[i])
                ]
                if others and np.isin(mine, np.concatenate(others)).any():
                    shared.add(i)
    group_of = {i: number for number, group in enumerate(groups) for i in group}
    begin_end = sorted((*_span(leaf), group_of.get(i, -1 - i)) for i, leaf in enumerate(found) if leaf.nbytes)
    for (_, end, one), (begin, _, other) in itertools.pairwise(begin_end):
        if begin < end and one != other:
            return "tensors share memory that did not"
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        why = _other_strides(one, other, i in shared)
        if why:
            return f"tensor {i}: {why}"
    return None


def _span(leaf: Any) -> tuple[int, int]:
    address, shape, strides, itemsize = _layout(leaf)
    steps = [(extent - 1) * step for extent, step in zip(shape, strides, strict=True)]
    return address + sum(s for s in steps if s < 0), address + sum(s for s in steps if s > 0) + itemsize


def _aliases(leaves: list[Any]) -> list[Any]:
    """Number each byte of memory by its first occurrence in the leaves' elements."""
    each = [_addresses(leaf) for leaf in leaves]
    _, first, inverse = np.unique(np.concatenate(each), return_index=True, return_inverse=True)
    return list(np.split(first[inverse], np.cumsum([len(one) for one in each])[:-1]))


def _other_strides(found: Any, expected: Any, is_shared: bool) -> str | None:
    _, shape, ours, itemsize = _layout(found)
    theirs = _layout(expected)[2]
    contiguous, step = [], itemsize
    for extent in reversed(shape):
        contiguous.append(step)
        step *= max(extent, 1)
    kept = False
    if expected.nbytes and not _is_copied(expected):
        at = np.unique(_addresses(expected)) if expected.nbytes < 1 << 16 else None
        if at is None:
            kept = is_shared or math.prod(shape) * itemsize == _span(expected)[1] - _span(expected)[0]
        else:
            repeats = len(at) < math.prod(shape) * itemsize
            kept = is_shared or repeats or len(at) == at[-1] + 1 - at[0]
    wanted = theirs if kept else tuple(reversed(contiguous))
    if not expected.nbytes:
        return None
    same = all(a == b for a, b, extent in zip(ours, wanted, shape, strict=True) if extent > 1)
    return None if same else f"it has the strides {ours} in bytes, not {wanted}"


class _Maker:
    """One walk that makes a state."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = random.Random(f"state {seed}")
        self._bases = [self._plain(torch.uint8, (48 * self._rng.randint(1, 8),)) for _ in "ab"]
        self._array_base = np.frombuffer(bytearray(self._rng.randbytes(96)), np.uint8)
        self._made: list[Any] = []

    def state(self) -> dict[str, Any]:
        tree = self._node(self._rng.choice([0, 1, 2, 3]))
        state = {"seed": self._seed, "tree": tree}
        if self._rng.random() < 0.06:
            nbytes = self._rng.choice([1 << 20, (1 << 20) + 4, 3_000_004, 2 << 20])
            large = self._plain(torch.float32, (nbytes // 4,))
            state["large"] = large
            if self._rng.random() < 0.5:
                state["part"] = large[self._rng.randint(0, 99) : large.numel() - 7 : self._rng.choice([1, 2])]
        state.update(self._in_common())
        return state

    def _in_common(self) -> dict[str, Any]:
        """What other states have as well, or in part: for saves that write only what changed."""
        rng = random.Random(f"in common {self._seed}")
        if rng.random() < 0.5:
            return {}
        rows = torch.zeros(100_000, dtype=torch.int32)
        rows[rng.randrange(100_000)] = 1
        return {"frozen": torch.arange(70_000, dtype=torch.int32) + rng.randint(0, 1), "rows": rows}

    def _node(self, depth: int) -> Any:
        rng = self._rng
        if depth == 0:
            return self._leaf()
        count = rng.choice([0, 1, 2, 3, 3, 4])
        children = [self._node(rng.randint(0, depth - 1)) for _ in range(count)]
        kind = rng.randrange(5)
        if kind == 0:
            return children
        if kind == 1:
            return tuple(children)
        keys = rng.sample(["w", "b", 0, -7, True, None, ("t", 2), "", "~storage", "a.b", 2**70, 1.5], count)
        if len(set(map(repr, keys))) > len(set(keys)):  # 1 and True are one key
            keys = list(range(count))
        if kind == 2:
            ordered = collections.OrderedDict(zip(keys, children, strict=True))
            if rng.random() < 0.5:
                ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
            return ordered
        return dict(zip(keys, children, strict=True))

    def _leaf(self) -> Any:
        kinds: list[tuple[int, Callable[[], Any]]] = [
            (6, self._tensor),
            (5, self._view),
            (2, self._again),
            (2, self._strided),
            (1, self._parameter),
            (1, lambda: self._plain(torch.complex64, (3, 2)).conj()),
            (3, self._array),
            (4, self._value),
        ]
        make = self._rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        made = make()
        self._made.append(made)
        return made

    def _plain(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        data = bytearray(self._rng.randbytes(math.prod(shape) * dtype.itemsize))
        if dtype is torch.bool:
            data = bytearray(byte & 1 for byte in data)
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).view(shape)

    def _shape(self) -> tuple[int, ...]:
        return tuple(
            self._rng.choice([0, 1, 1, 2, 3, 5, 17]) for _ in range(self._rng.choice([0, 1, 1, 2, 3]))
        )

    def _tensor(self) -> Any:
        return self._plain(self._rng.choice(_DTYPES), self._shape())

    def _view(self) -> Any:
        base = self._rng.choice(self._bases).view(self._rng.choice(_VIEW_DTYPES))
        shape = [self._rng.randint(0, 4) for _ in range(self._rng.randint(0, 3))]
        room, stride = base.numel() - 1, []
        for extent in shape:
            stride.append(self._rng.randint(0, min(room // max(extent - 1, 1), 9)))
            room -= stride[-1] * max(extent - 1, 0)
        return base.as_strided(shape, stride, self._rng.randint(0, room))

    def _again(self) -> Any:
        return self._rng.choice(self._made) if self._made else None

    def _strided(self) -> Any:
        tensor = self._plain(self._rng.choice([torch.float32, torch.int8, torch.complex128]), (2, 3, 4, 5))
        return self._rng.choice(
            [
                lambda: tensor.to(memory_format=torch.channels_last),
                lambda: tensor.transpose(0, 3),
                lambda: tensor[:, ::2],
                lambda: tensor[1, 1:, 2],
                lambda: tensor[0, 0].expand(3, 4, 5),
            ]
        )()

    def _parameter(self) -> Any:
        tensor = self._plain(self._rng.choice([torch.float32, torch.bfloat16]), (2, 2))
        if self._rng.random() < 0.5:
            return tensor.requires_grad_(self._rng.random() < 0.5)
        return torch.nn.Parameter(tensor, requires_grad=self._rng.random() < 0.5)

    def _array(self) -> Any:
        rng = self._rng
        kind = rng.randrange(6)
        if kind == 0:  # in memory that other arrays have parts of
            begin = rng.randrange(0, 48, 4)
            return self._array_base[begin : begin + 4 * rng.randint(1, 12)].view(rng.choice(["<i4", "u1"]))
        dtype = _STRUCTURED if kind == 1 else np.dtype(rng.choice(_ARRAY_DTYPES))
        shape = tuple(rng.choice([0, 1, 2, 4]) for _ in range(rng.randint(0, 2)))
        data = bytearray(rng.randbytes(math.prod(shape) * dtype.itemsize))
        if dtype.kind in "?bUS":  # not every byte is a value of these
            data = bytearray(byte & 1 if dtype.kind == "b" else 0 for byte in data)
        array = np.frombuffer(data, dtype).reshape(shape) if data else np.zeros(shape, dtype)
        if kind == 2 and array.ndim:
            return array[::-1]
        if kind == 3:
            array.flags.writeable = False
        if kind == 4 and array.ndim == 2:
            return array.T
        return array

    def _value(self) -> Any:
        rng = self._rng
        values: list[Any] = [
            *(None, True, 0, -1, 2**64, -(2**200), 1.5, -0.0, math.nan, math.inf, 1e-320, 3 - 0j, "", "text"),
            *("\ud800\x00", "\u00e9", b"", b"\x00\xff", torch.bfloat16, torch.device("cpu")),
            *(torch.Size([2, 3]), {1, "a", None}, frozenset({(1, 2)}), np.float32(1.5), np.int64(-3)),
            *(np.str_("x"), np.bytes_(b"y"), np.dtype("<f4"), collections.Counter("aab")),
        ]
        return (
            rng.choice(values) if rng.random() < 0.9 else [rng.random() for _ in range(rng.randint(0, 300))]
        )


def seeds(rng: random.Random) -> Iterator[int]:
    """Numbers of states, none twice."""
    used: set[int] = set()
    while True:
        seed = rng.getrandbits(40)
        if seed not in used:
            used.add(seed)
            yield seed
