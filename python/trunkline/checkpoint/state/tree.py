"""Converts a nested training state to a JSON skeleton and named tensors; nothing is pickled.

The skeleton has a node for each value. leaves.py describes leaves; lists are JSON arrays; other values are
objects whose keys say what they are. Dicts are stored as lists, since keys in JSON are strings and unordered:

    {"dict": [KEY, NODE, KEY, NODE, ...]}
    {"OrderedDict": [...], "_metadata": NODE}    the latter if it has such an attribute
    {"Counter": [...]}
    {"tuple": [NODE, ...]}
    {"tensor": NAME, "dtype": "BF16", "shape": [2, 3], "parameter": true, "requires_grad": false}
                                                 the last two only if not false and as "parameter",
                                                 respectively
    {"ndarray": NAME, "dtype": "<f4", "shape": [2, 3]}

A tensor is stored in the form of stored_as() of _tensor_io/tensors.py; an array as a tensor of the same
dtype, or as its bytes if safetensors lacks the dtype. Two forms of tensors and arrays need a reader that
supports VIEWS:

    {..., "stride": [1, 2]}                      stored in C order; has these strides in memory
    {..., "stride": [3, 1], "offset": 8, "storage": 64}
                                                 a view of memory that several tensors share: 64 bytes, from
                                                 byte 8 on; NAME holds the bytes of all views of NAME

Strides are in elements of the tensor (in bytes, for an array that is stored as bytes). If NAME has fewer
bytes than "storage" says, it holds the bytes that are part of some view, in the order of the memory.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy

from trunkline._core import GcPause
from trunkline._errors import Unsupported
from trunkline._tensor_io.tensors import (
    as_stored,
    dtype_name,
    dtype_named,
    has_own_advice,
    is_ordinary,
    objection,
    objection_in_any_file,
    plain,
)
from trunkline._torch_or_numpy import torch
from trunkline.checkpoint.state.conversions import conversion
from trunkline.checkpoint.state.leaves import (
    MAX_DEPTH,
    NUMPY_AS_TORCH,
    Json,
    NoLeaf,
    encode,
    encode_key,
    encode_numpy_dtype,
    shown_key,
)
from trunkline.checkpoint.state.restore import restore, restore_into
from trunkline.checkpoint.state.views import Shared, find_shared, significant_strides, strided

__all__ = [
    "VIEWS",
    "dtype_name",
    "dtype_named",
    "flatten",
    "flatten_with_features",
    "restore",
    "restore_into",
]

# The feature that a reader must support for a skeleton with strides (docs/formats/checkpoint.md).
VIEWS = "views"

_MAX_NAME = 400
_SIMPLE = (int, float, str)  # elements of long lists, which need no path: encoding them never fails
_HINT = "; save it in a separate .pt file (trunkline.save)"
_CONVERT_ARRAY = "; convert it to a list, or to an array of numbers or strings"
_CONVERT_KEY = "; use a string, a number, or a tuple of these as the key"


def flatten(state: Any) -> tuple[Json, dict[str, torch.Tensor]]:
    """Split a state into its skeleton, which json.dumps accepts, and its tensors by name.

    The state may hold None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict (with the
    `_metadata` of a state_dict()), Counter, set, frozenset, torch.Size, torch.dtype, torch.device, dense
    tensors and Parameters of the CPU or a CUDA GPU, arrays, scalars and dtypes of numpy; but no subclasses of
    these types. Keys and elements of sets are values without tensors, or tuples of these.

    The tensors share the memory of the state's and need not be contiguous; copied are read-only arrays of
    numpy, lazily conjugated tensors, and memory that tensors share only in part. Memory that several tensors
    of the state share, as a whole or in part, is stored once: under the name of a tensor that is all of it,
    or else as NAME~storage, flat. What torch keeps beside the elements (gradients, hooks, Python attributes)
    is not part of the state. The state must not change meanwhile.

    Raises Unsupported, which names the place ("state['model'][3]"), for anything else and for cycles.
    """
    skeleton, tensors, _ = flatten_with_features(state)
    return skeleton, tensors


def flatten_with_features(state: Any) -> tuple[Json, dict[str, torch.Tensor], list[str]]:
    """Return what flatten() does, and the features that a reader must support beyond format version 1."""
    flattener = _Flattener()
    with GcPause():
        try:
            skeleton = flattener.node(state)
        except RecursionError:
            raise Unsupported(None, f"{flattener.place()} is nested too deeply{_HINT}") from None
        tensors = flattener.stored()
    return skeleton, tensors, [VIEWS] if flattener.has_strides else []


@dataclass(slots=True)
class _Found:
    """A tensor of the state, or several that are the same view of the same memory."""

    tensor: torch.Tensor  # strided, without subclass
    name: str  # preferred; another one if that is taken
    nodes: list[dict[str, Json]]  # its nodes, whose field `tag` will hold the name
    tag: str


def _advice(tensor: torch.Tensor) -> str:
    """Return what to do about a tensor that cannot be saved, if its objection() does not say so."""
    if tensor.is_meta and not has_own_advice(tensor):
        return "; load or initialize it on another device first"
    return "" if objection_in_any_file(tensor) or has_own_advice(tensor) else _HINT


class _Flattener:
    """One traversal of a state."""

    def __init__(self) -> None:
        self._found: dict[Any, _Found] = {}  # by a key that the same views of the same memory share
        self._names: set[str] = set()
        self.has_strides = False
        self._clashes: dict[str, int] = {}
        # As in Python, and as in a name; None for a key of a dict that is used as its name.
        self._path: list[tuple[str | None, str]] = []
        self._open: set[int] = set()  # ids of the containers that are being traversed

    def place(self) -> str:
        """Return the current place, for messages."""
        return "state" + "".join(
            f"[{shown_key(name)}]" if shown is None else shown for shown, name in self._path
        )

    def node(self, value: Any) -> Json:
        """Return the node of a value."""
        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        container = _CONTAINERS.get(kind)
        if container is not None:
            with self._entered(value):
                return container(self, value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) is numpy.ndarray:
            return self._array(value)
        try:
            return encode(value)
        except NoLeaf as why:
            # A .pt file is not suggested: one with a Path or a Namespace could not be loaded with
            # weights_only.
            raise Unsupported(None, f"{self.place()} {why}; {conversion(value)}") from None

    def pairs(self, value: Mapping[Any, Any]) -> list[Json]:
        """Return keys and nodes, alternating."""
        nodes: list[Json] = []
        for key, item in value.items():
            if type(key) is str:
                self._path.append((None, key))
            else:
                shown = shown_key(key)
                self._path.append((f"[{shown}]", shown))
            try:
                nodes.append(encode_key(key))
            except NoLeaf as why:
                raise Unsupported(None, f"{self.place()}: the key {why}{_CONVERT_KEY}") from None
            nodes.append(self.node(item))
            self._path.pop()  # not after an exception: the message needs the path
        return nodes

    def items(self, value: list[Any] | tuple[Any, ...]) -> list[Json]:
        """Return the nodes of all items."""
        nodes: list[Json] = []
        for index, item in enumerate(value):
            if type(item) in _SIMPLE:
                nodes.append(encode(item))
                continue
            self._path.append((f"[{index}]", str(index)))
            nodes.append(self.node(item))
            self._path.pop()
        return nodes

    def ordered(self, value: "collections.OrderedDict[Any, Any]") -> Json:
        """Return the node of an OrderedDict."""
        node = {"OrderedDict": self.pairs(value)}
        attributes = vars(value)
        if attributes.keys() - {"_metadata"}:
            raise Unsupported(None, f"{self.place()} has extra attributes, {list(attributes)}{_HINT}")
        if attributes:
            with self._at("._metadata", "_metadata"):
                node["_metadata"] = self.node(attributes["_metadata"])
        return node

    def counter(self, value: "collections.Counter[Any]") -> Json:
        """Return the node of a Counter."""
        if vars(value):
            raise Unsupported(None, f"{self.place()} has extra attributes, {list(vars(value))}{_HINT}")
        return {"Counter": self.pairs(value)}

    @contextmanager
    def _at(self, shown: str, name: str) -> Iterator[None]:
        self._path.append((shown, name))
        yield
        self._path.pop()  # not after an exception: the message needs the path

    @contextmanager
    def _entered(self, value: Any) -> Iterator[None]:
        if id(value) in self._open:
            raise Unsupported(None, f"{self.place()} contains itself (a cycle); remove that reference")
        if len(self._open) >= MAX_DEPTH:
            raise Unsupported(None, f"{self.place()} is nested more than {MAX_DEPTH} deep{_HINT}")
        self._open.add(id(value))
        yield
        self._open.discard(id(value))

    def _tensor(self, tensor: torch.Tensor) -> Json:
        ordinary = is_ordinary(tensor)
        why = None if ordinary else objection(tensor)
        if why is not None:
            raise Unsupported(None, f"{self.place()} {why}{_advice(tensor)}")
        node: dict[str, Json] = {
            "tensor": "",
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
        }
        parameter = type(tensor) is torch.nn.Parameter  # else torch.Tensor: subclasses were rejected
        if parameter:
            node["parameter"] = True
        if tensor.requires_grad is not parameter:
            node["requires_grad"] = tensor.requires_grad
        self._keep("tensor", node, tensor.detach() if ordinary else plain(tensor))
        return node

    def _array(self, array: "numpy.ndarray[Any, Any]") -> Json:
        try:
            dtype = encode_numpy_dtype(array.dtype)
        except NoLeaf as why:
            raise Unsupported(None, f"{self.place()} {why}{_CONVERT_ARRAY}") from None
        node = {"ndarray": "", "dtype": dtype, "shape": list(array.shape)}
        as_bytes = type(dtype) is not str or dtype not in NUMPY_AS_TORCH
        if array.flags.c_contiguous:  # the stride of an extent of 1 has no meaning, and may be negative
            array = array.reshape(-1).reshape(array.shape)
        strides = all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
        if not (array.flags.writeable and array.flags.aligned and strides) or (
            as_bytes and not array.flags.c_contiguous
        ):
            array = array.copy(order="C")
        if as_bytes:
            array = array.reshape(-1).view(numpy.uint8)
        self._keep("ndarray", node, torch.from_numpy(array))
        return node

    def _keep(self, tag: str, node: dict[str, Json], tensor: torch.Tensor) -> None:
        """Remember a tensor, and keep it alive, so that no other can have its address."""
        strides = None if tensor.is_contiguous() else significant_strides(tensor)
        shape = tensor.shape
        memory: tuple[Any, ...] = (tensor.data_ptr(), shape, strides, tensor.dtype, tag)
        if 0 in shape:
            memory = (len(self._found),)
        found = self._found.get(memory)
        if found is None:
            path = self._path
            wanted = path[0][1] if len(path) == 1 else ".".join([name for _, name in path])
            name = _readable(wanted) or "tensor"
            self._found[memory] = _Found(tensor, name, [node], tag)
        else:
            found.nodes.append(node)

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the tensors to store, by name, and write the names into the nodes."""
        found = list(self._found.values())
        shared_of: dict[int, tuple[Shared, int]] = {}
        indices = [index for index, each in enumerate(found) if each.tensor.numel()]
        for shared in find_shared([found[index].tensor for index in indices]):
            for member, offset in zip(shared.members, shared.offsets, strict=True):
                shared_of[indices[member]] = shared, offset
        tensors: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}  # of shared memory, by id
        for index, each in enumerate(found):
            if index not in shared_of:
                name = self._name(each.name)
                tensors[name] = as_stored(each.tensor)
                self._describe(each, name, None, 0)
                continue
            shared, offset = shared_of[index]
            whole = None if shared.whole is None else indices[shared.whole]
            if id(shared) not in names:
                if shared.stored is not None:
                    name, stored = self._name(f"{each.name[: _MAX_NAME - 8]}~storage"), shared.stored
                else:
                    assert whole is not None
                    name, stored = self._name(found[whole].name), as_stored(found[whole].tensor)
                names[id(shared)], tensors[name] = name, stored
            self._describe(each, names[id(shared)], None if whole == index else shared, offset)
        return tensors

    def _describe(self, found: _Found, name: str, shared: Shared | None, offset: int) -> None:
        extra: dict[str, Json] = {}
        if shared is not None:
            extra = {
                "stride": list(found.tensor.stride()),
                "offset": offset,
                "storage": shared.memory_bytes,
            }
        elif not found.tensor.is_contiguous() and strided(found.tensor).is_dense():
            extra = {"stride": list(found.tensor.stride())}
        self.has_strides |= bool(extra)
        for node in found.nodes:
            node[found.tag] = name
            node.update(extra)

    def _name(self, wanted: str) -> str:
        name = wanted
        while name in self._names or name == "__metadata__":
            self._clashes[wanted] = self._clashes.get(wanted, 1) + 1
            name = f"{wanted}~{self._clashes[wanted]}"
        self._names.add(name)
        return name


_CONTAINERS: dict[type, Callable[[_Flattener, Any], Json]] = {
    dict: lambda walk, value: {"dict": walk.pairs(value)},
    list: lambda walk, value: walk.items(value),
    tuple: lambda walk, value: {"tuple": walk.items(value)},
    collections.OrderedDict: lambda walk, value: walk.ordered(value),
    collections.Counter: lambda walk, value: walk.counter(value),
}


def _readable(name: str) -> str:
    """Return a name of bounded length that UTF-8 can encode, without control characters."""
    if name.isprintable():
        return name[:_MAX_NAME]
    return "".join(c if c.isprintable() else "_" for c in name[:_MAX_NAME])
