"""A nested training state as a JSON skeleton and named tensors, and back; nothing is pickled.

The skeleton has a node for each value. _leaves.py says what leaves look like; lists are JSON arrays; the rest
are objects whose keys say what they are. Dicts are lists, since JSON has no order of keys and no keys but
strings:

    {"dict": [KEY, NODE, KEY, NODE, ...]}
    {"OrderedDict": [...], "_metadata": NODE}    the latter if it has such an attribute
    {"Counter": [...]}
    {"tuple": [NODE, ...]}
    {"tensor": NAME, "dtype": "BF16", "shape": [2, 3], "parameter": true, "requires_grad": false}
                                                 the last two where they are not false and "parameter"
    {"ndarray": NAME, "dtype": "<f4", "shape": [2, 3]}

A tensor is stored in the form that stored_as() of _tensors.py says; an array as the tensor of the same dtype,
or as its bytes where safetensors has none.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from trunkline._errors import Unsupported
from trunkline.checkpoint._leaves import (
    MAX_DEPTH,
    NUMPY_AS_TORCH,
    Json,
    NoLeaf,
    encode,
    encode_key,
    encode_numpy_dtype,
    shown_key,
)
from trunkline.checkpoint._restore import restore, restore_into
from trunkline.checkpoint._tensors import dtype_name, dtype_named, objection, to_stored

__all__ = ["dtype_name", "dtype_named", "flatten", "restore", "restore_into"]

_MAX_NAME = 400
_SIMPLE = (int, float, str)  # what long lists are of: always encoded, so that no place needs to be known
_HINT = "; save such objects in a .pt file (trunkline.save), or put their state_dict() into the state"


def flatten(state: Any) -> tuple[Json, dict[str, torch.Tensor]]:
    """Split a state into its skeleton, which json.dumps takes as it is, and its tensors by name.

    The state may hold None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict (with the
    `_metadata` of a state_dict()), Counter, set, frozenset, torch.Size, torch.dtype, torch.device, dense
    tensors and Parameters of the CPU or a CUDA GPU, arrays, scalars and dtypes of numpy; each type itself and
    none derived from it. Keys and elements of sets are values without tensors, or tuples of such.

    The tensors share the memory of the state's, but for arrays of numpy that are read-only or not contiguous
    and for lazily conjugated tensors, which are copied; they need not be contiguous. A tensor that occurs
    several times with the same memory, shape and strides is there once. What torch keeps beside the elements
    (gradients, hooks, Python attributes) is not part of the state. The state must not change meanwhile.

    Raises Unsupported, which names the place ("state['model'][3]"), for anything else and for cycles.
    """
    flattener = _Flattener()
    try:
        skeleton = flattener.node(state)
    except RecursionError:
        raise Unsupported(None, f"{flattener.place()} is nested too deeply{_HINT}") from None
    return skeleton, flattener.tensors


class _Flattener:
    """One walk over a state."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # by what tensors of the same memory have in common
        self._clashes: dict[str, int] = {}
        self._path: list[tuple[str, str]] = []  # as in Python, and as in a name
        self._open: set[int] = set()  # the containers that are being walked over

    def place(self) -> str:
        """Where the walk is."""
        return "state" + "".join(shown for shown, _ in self._path)

    def node(self, value: Any) -> Json:
        """Return the node of a value."""
        container = _CONTAINERS.get(type(value))
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
            raise Unsupported(None, f"{self.place()} {why}{_HINT}") from None

    def pairs(self, value: Mapping[Any, Any]) -> list[Json]:
        """Return keys and nodes, in turn."""
        nodes: list[Json] = []
        for key, item in value.items():
            shown = shown_key(key)
            with self._at(f"[{shown}]", key if type(key) is str else shown):
                try:
                    nodes.append(encode_key(key))
                except NoLeaf as why:
                    raise Unsupported(None, f"{self.place()}: the key {why}{_HINT}") from None
                nodes.append(self.node(item))
        return nodes

    def items(self, value: list[Any] | tuple[Any, ...]) -> list[Json]:
        """Return the nodes of all items."""
        nodes: list[Json] = []
        for index, item in enumerate(value):
            if type(item) in _SIMPLE:
                nodes.append(encode(item))
                continue
            with self._at(f"[{index}]", str(index)):
                nodes.append(self.node(item))
        return nodes

    def ordered(self, value: "collections.OrderedDict[Any, Any]") -> Json:
        """Return the node of an OrderedDict."""
        node = {"OrderedDict": self.pairs(value)}
        attributes = vars(value)
        if attributes.keys() - {"_metadata"}:
            raise Unsupported(None, f"{self.place()} has attributes of its own, {list(attributes)}{_HINT}")
        if attributes:
            with self._at("._metadata", "_metadata"):
                node["_metadata"] = self.node(attributes["_metadata"])
        return node

    def counter(self, value: "collections.Counter[Any]") -> Json:
        """Return the node of a Counter."""
        if vars(value):
            raise Unsupported(None, f"{self.place()} has attributes of its own, {list(vars(value))}{_HINT}")
        return {"Counter": self.pairs(value)}

    @contextmanager
    def _at(self, shown: str, name: str) -> Iterator[None]:
        self._path.append((shown, name))
        yield
        self._path.pop()  # not after an exception: it says where it was raised

    @contextmanager
    def _entered(self, value: Any) -> Iterator[None]:
        if id(value) in self._open:
            raise Unsupported(None, f"{self.place()} is an object that it is itself part of (a cycle)")
        if len(self._open) >= MAX_DEPTH:
            raise Unsupported(None, f"{self.place()} is nested more than {MAX_DEPTH} deep{_HINT}")
        self._open.add(id(value))
        yield
        self._open.discard(id(value))

    def _tensor(self, tensor: torch.Tensor) -> Json:
        why = objection(tensor)
        if why is not None:
            raise Unsupported(None, f"{self.place()} {why}{_HINT}")
        node: dict[str, Json] = {
            "tensor": self._keep(to_stored(tensor), str(tensor.dtype)),
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
        }
        parameter = isinstance(tensor, torch.nn.Parameter)
        if parameter:
            node["parameter"] = True
        if tensor.requires_grad is not parameter:
            node["requires_grad"] = tensor.requires_grad
        return node

    def _array(self, array: "numpy.ndarray[Any, Any]") -> Json:
        try:
            dtype = encode_numpy_dtype(array.dtype)
        except NoLeaf as why:
            raise Unsupported(None, f"{self.place()} {why}{_HINT}") from None
        shape = list(array.shape)
        if not (array.flags.c_contiguous and array.flags.writeable and array.flags.aligned):
            array = array.copy(order="C")
        if type(dtype) is not str or dtype not in NUMPY_AS_TORCH:
            array = array.reshape(-1).view(numpy.uint8)
        return {"ndarray": self._keep(torch.from_numpy(array), str(dtype)), "dtype": dtype, "shape": shape}

    def _keep(self, tensor: torch.Tensor, dtype: str) -> str:
        """Return the name under which the tensor is stored."""
        if tensor.numel() == 0:
            return self._store(tensor)
        # Of an extent of 1 the stride says nothing.
        strides = tuple(
            0 if extent == 1 else stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        memory = (tensor.data_ptr(), tuple(tensor.shape), strides, dtype)
        if memory not in self._names:
            self._names[memory] = self._store(tensor)
        return self._names[memory]

    def _store(self, tensor: torch.Tensor) -> str:
        name = wanted = _readable(".".join(name for _, name in self._path)) or "tensor"
        while name in self.tensors or name == "__metadata__":
            self._clashes[wanted] = self._clashes.get(wanted, 1) + 1
            name = f"{wanted}~{self._clashes[wanted]}"
        self.tensors[name] = tensor
        return name


_CONTAINERS: dict[type, Callable[[_Flattener, Any], Json]] = {
    dict: lambda walk, value: {"dict": walk.pairs(value)},
    list: lambda walk, value: walk.items(value),
    tuple: lambda walk, value: {"tuple": walk.items(value)},
    collections.OrderedDict: lambda walk, value: walk.ordered(value),
    collections.Counter: lambda walk, value: walk.counter(value),
}


def _readable(name: str) -> str:
    """Return a name of bounded length that UTF-8 can encode, with nothing in it that terminals obey."""
    return "".join(c if c.isprintable() else "_" for c in name[:_MAX_NAME])
