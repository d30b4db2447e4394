"""Restores a state from the skeleton that flatten() of tree.py made."""

import collections
import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy

from trunkline._core import GcPause
from trunkline._errors import Format
from trunkline._modes import makes_ordinary_tensors
from trunkline._tensor_io.arrays import is_dtype_of_torch, no_such_dtype
from trunkline._tensor_io.tensors import dtype_named, from_stored, is_ordinary, objection, stored_as
from trunkline._torch_or_numpy import HAS_TORCH, torch
from trunkline.checkpoint.state.leaves import (
    MAX_DEPTH,
    NUMPY_AS_TORCH,
    BadLeaf,
    Json,
    decode,
    decode_key,
    decode_numpy_dtype,
    shown_key,
)
from trunkline.checkpoint.state.storages import Storages, View, restrided, stride_fields, view_in
from trunkline.checkpoint.state.targets import METADATA, Targets, Use, path_text
from trunkline.checkpoint.state.views import Strided

_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
_PLAIN_FIELDS = {"tensor", "dtype", "shape"}  # of most tensors
_BAD_SHAPE = 'its "shape" is not an array of non-negative integers'
_NOTHING: Any = object()  # stands for: nothing to load into


@makes_ordinary_tensors
def restore(skeleton: Json, tensors: Mapping[str, torch.Tensor], whole: Json | None = None) -> Any:
    """Return the state that flatten() split; its tensors share the memory of `tensors`.

    whole: the skeleton of the whole state, if `skeleton` is a part of it: some of the views that share memory
    may be missing there.

    `skeleton`: as json.loads returns it. `tensors`: exactly those that the skeleton names, dense, with the
    dtypes and shapes that flatten() returned, and contiguous if the state holds arrays of numpy, views of
    shared memory or tensors of dtypes that safetensors lacks. A tensor that the skeleton names twice becomes
    one tensor. Tensors that were saved as views of the same memory share memory again; they, and tensors that
    are not contiguous, have the strides with which they were saved. Raises Format for any invalid input.
    """
    walk = _Restoring(tensors, skeleton if whole is None else whole)
    with GcPause():
        state = _run(walk, skeleton, _NOTHING)
    unused = [name for name in tensors if name not in walk.named]
    if unused:
        raise Format(None, f"the skeleton of the state does not name the tensors {_listed(unused)}")
    return state


def restore_into(
    skeleton: Json, into: Any, whole: Json | None = None
) -> tuple[Any, dict[str, torch.Tensor], Callable[[], None]]:
    """Return the state with the tensors of `into`, the targets to read each tensor into, and finish().

    whole: as for restore().

    `into` is a state of the same structure (any kind of dict matches any other, a list matches a tuple), with
    tensors of the same shapes and dtypes at the same places. The returned state holds these same tensors and
    arrays, and everything else as it was saved. The targets, by name, are contiguous, in the form that
    flatten() returned: memory of `into` if possible. Once they are filled, call finish(): it copies to the
    tensors of `into` that are not contiguous, or share memory in a different way than the saved ones. Nothing
    but tensors and arrays of `into` changes.

    Raises ValueError, which names the place, if `into` lacks something or has more, or has a tensor that is
    of another shape or dtype, read-only, on a device other than the CPU and CUDA GPUs, or that shares memory
    within itself or with another one although the stored ones do not. Raises Format for an invalid skeleton.
    """
    walk = _Restoring(None, skeleton)
    with GcPause(), _bad_skeleton():
        state = _run(walk, skeleton, into)
        targets = Targets(walk.uses, None if whole is None else lambda: _stored_views(whole))

    def finish() -> None:
        with _bad_skeleton():
            targets.finish()

    return state, targets.by_name, finish


@contextmanager
def _bad_skeleton() -> Iterator[None]:
    try:
        yield
    except BadLeaf as why:
        raise Format(None, f"invalid skeleton of a state: {why}") from None


def _run(walk: "_Restoring", skeleton: Json, into: Any) -> Any:
    try:
        return walk.node(skeleton, into)
    except BadLeaf as why:
        raise Format(None, f"invalid skeleton of a state, at {walk.place()}: {why}") from None
    except RecursionError:
        where = f"invalid skeleton of a state, at {walk.place()}"
        raise Format(None, f"{where}: it is nested too deeply") from None


class _Restoring:
    """One traversal of a skeleton, alongside a state to load into unless `tensors` are given."""

    def __init__(self, tensors: Mapping[str, torch.Tensor] | None, skeleton: Json) -> None:
        self.named: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {}
        self.uses: dict[str, list[Use]] = {}
        self.views: dict[str, list[Strided]] = {}
        self.storages = Storages(lambda: _views_in(skeleton))
        self._tensors = tensors
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self._path: list[Any] = []  # keys of dicts, indices, METADATA

    def place(self) -> str:
        """Return the current place, for messages."""
        return path_text(self._path)

    def node(self, node: Json, into: Any) -> Any:
        """Return the value of a node. Raises BadLeaf."""
        if len(self._path) > MAX_DEPTH:
            raise BadLeaf("it is nested too deeply")
        if type(node) is list:
            return self._items(node, into)
        if type(node) is dict:
            if "tensor" in node:
                return self._tensor(node, into) if HAS_TORCH else self._tensor_as_array(node, into)
            for tag in _DICTS:
                if tag in node:
                    return self._dict(tag, node, into)
            if "tuple" in node:
                _check_fields(node, "tuple")
                return tuple(self._items(node["tuple"], into))
            if "ndarray" in node:
                return self._array(node, into)
        value = decode(node)
        if isinstance(into, (torch.Tensor, numpy.ndarray, dict, list)):
            raise self._mismatch(f"a {type(into).__name__}", f"a {type(value).__name__}")
        return value

    def _mismatch(self, found: str, expected: str) -> ValueError:
        return ValueError(f"into: {self.place()} is {found}, but the checkpoint has {expected} there")

    def _child(self, key: Any, node: Json, into: Any) -> Any:
        self._path.append(key)
        value = self.node(node, into)
        self._path.pop()
        return value

    def _items(self, nodes: Json, into: Any) -> list[Any]:
        if type(nodes) is not list:
            raise BadLeaf("it must hold an array here")
        if into is not _NOTHING:
            if not isinstance(into, (list, tuple)):
                raise self._mismatch(f"a {type(into).__name__}", f"a list or tuple of {len(nodes)}")
            if len(into) != len(nodes):
                raise self._mismatch(f"of {len(into)} items", f"{len(nodes)}")
        return [
            self._child(index, node, _NOTHING if into is _NOTHING else into[index])
            for index, node in enumerate(nodes)
        ]

    def _dict(self, tag: str, node: dict[str, Json], into: Any) -> Any:
        _check_fields(node, tag, *(["_metadata"] if tag == "OrderedDict" and len(node) == 2 else []))
        nodes = node[tag]
        if type(nodes) is not list or len(nodes) % 2 != 0:
            raise BadLeaf("it must hold an array of keys and values here")
        keys = [key if type(key) is str else decode_key(key) for key in nodes[::2]]
        if into is not _NOTHING:
            self._check_keys(keys, into)
        # Not Counter(pairs), which would count the pairs.
        value = _DICTS[tag]()
        for key, item in zip(keys, nodes[1::2], strict=True):
            value[key] = self._child(key, item, _NOTHING if into is _NOTHING else into[key])
        if len(value) != len(keys):
            raise BadLeaf("a key is duplicated")
        if "_metadata" in node:
            vars(value)["_metadata"] = self._child(METADATA, node["_metadata"], _NOTHING)
        return value

    def _check_keys(self, keys: list[Any], into: Any) -> None:
        if not isinstance(into, dict):
            raise self._mismatch(f"a {type(into).__name__}", f"a dict of {len(keys)} keys")
        missing = [key for key in keys if key not in into]
        known = set(keys)
        unexpected = [key for key in into if key not in known]
        misspelled = _misspelled(unexpected, missing)
        if misspelled is not None:
            key, meant = misspelled
            raise ValueError(
                f"into: {self.place()} has the key {shown_key(key)}, which the checkpoint lacks; did you "
                f"mean {shown_key(meant)}?"
            )
        if missing:
            raise ValueError(
                f"into: {self.place()} lacks the {_keys(missing)} of the checkpoint"
                f"{_about_compiled([*missing, *into]) or _WHOLE}"
            )
        if unexpected:
            raise ValueError(
                f"into: {self.place()} has the {_keys(unexpected)}, which the checkpoint lacks; remove "
                f"{'it' if len(unexpected) == 1 else 'them'}"
            )

    def _name(
        self, node: dict[str, Json], tag: str, stored: tuple[torch.dtype, tuple[int, ...]] | None
    ) -> str:
        """Return the name of a tensor; `stored`: its stored dtype and shape, None for a view of memory."""
        name = node[tag]
        if type(name) is not str:
            raise BadLeaf("the name of a tensor is not a string")
        if stored is None:
            self.named.setdefault(name, None)
            return name
        known = self.named.get(name)
        if known is not None and known != stored:
            raise BadLeaf(f"the tensor {name!r} has a different dtype or shape elsewhere")
        self.named[name] = stored
        return name

    def _take(self, name: str, stored: tuple[torch.dtype, tuple[int, ...]] | None) -> torch.Tensor:
        """Return one of the tensors to restore from."""
        tensor = (self._tensors or {}).get(name)
        if tensor is None:
            raise BadLeaf(f"the tensor {name!r} is missing")
        if not isinstance(tensor, torch.Tensor) or not (is_ordinary(tensor) or objection(tensor) is None):
            raise BadLeaf(f"the tensor {name!r} is not a dense tensor of the CPU or a CUDA GPU")
        if stored is None:
            if not tensor.is_contiguous():
                raise BadLeaf(f"the tensor {name!r} is not contiguous")
            return tensor
        if tensor.dtype is not stored[0] or tensor.shape != stored[1]:
            raise BadLeaf(
                f"the tensor {name!r} is {_described(tensor.dtype, tensor.shape)}, not {_described(*stored)}"
            )
        return tensor

    def _tensor(self, node: dict[str, Json], into: Any) -> torch.Tensor:
        extra: list[str] = []
        if node.keys() != _PLAIN_FIELDS:
            extra = [field for field in ("parameter", "requires_grad") if field in node]
            _check_fields(node, "tensor", "dtype", "shape", *extra, *stride_fields(node))
        if type(node["dtype"]) is not str or any(type(node[field]) is not bool for field in extra):
            raise BadLeaf("a field of a tensor has the wrong type")
        try:
            dtype = dtype_named(node["dtype"])
        except ValueError as error:
            if is_dtype_of_torch(node["dtype"]):
                raise no_such_dtype(self.place(), node["dtype"], None) from None
            raise BadLeaf(str(error)) from None
        parameter: bool = node.get("parameter", False)
        requires_grad: bool = node.get("requires_grad", parameter)
        if requires_grad and HAS_TORCH and not (dtype.is_floating_point or dtype.is_complex):
            raise BadLeaf(f"a tensor of {dtype} cannot require gradients")
        shape = _shape_of(node)
        view = view_in(node, shape, dtype.itemsize)
        stored = None if view is not None and view.storage is not None else stored_as(dtype, shape)
        name = self._name(node, "tensor", stored)
        if into is not _NOTHING:
            return self._tensor_of(into, name, view, dtype, shape)
        if stored is not None and stored[0] is dtype and view is None and not (parameter or requires_grad):
            taken = self._restored(name, stored, view, dtype)  # the same tensor each time
            if not taken.requires_grad:
                return taken
        made = (name, dtype, view, shape, parameter, requires_grad)
        if made not in self._made:
            tensor = self._restored(name, stored, view, dtype)
            if parameter:
                self._made[made] = torch.nn.Parameter(tensor, requires_grad)
            else:
                self._made[made] = tensor.detach().requires_grad_(requires_grad)
        return self._made[made]

    def _tensor_as_array(self, node: dict[str, Json], into: Any) -> Any:
        """Return what _tensor() does as a plain array: torch, which saved it, is not installed here."""
        if type(into) is numpy.ndarray:
            self._tensor(node, torch.from_numpy(into))
            return into
        return self._tensor(node, into).numpy()

    def _restored(
        self,
        name: str,
        stored: tuple[torch.dtype, tuple[int, ...]] | None,
        view: View | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        taken = self._take(name, stored)
        if stored is None:
            assert view is not None
            return self.storages.view(name, taken, view, dtype)
        tensor = _from_stored(taken, dtype, name)
        if view is None:
            return tensor
        if ("strided", name, view) not in self._made:
            self._made["strided", name, view] = restrided(tensor, view)
        return self._made["strided", name, view]

    def _tensor_of(
        self, into: Any, name: str, view: View | None, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if not isinstance(into, torch.Tensor):
            raise self._mismatch(f"a {type(into).__name__}", f"a tensor of {_described(dtype, shape)}")
        ordinary = is_ordinary(into)
        why = None if ordinary else objection(into)
        if why is not None:
            raise ValueError(f"into: {self.place()} {why}")
        if into.dtype is not dtype or into.shape != shape:
            raise self._mismatch(_described(into.dtype, into.shape), _described(dtype, shape))
        if not ordinary and (into.is_conj() or into.is_neg() or torch._is_zerotensor(into)):
            raise ValueError(
                f"into: {self.place()} is a lazy conjugate, negative or zero, which cannot be written to; "
                "load without `into`, then copy"
            )
        target = into.detach() if into.requires_grad else into
        self.uses.setdefault(name, []).append(Use(tuple(self._path), target, view))
        return into

    def _array(self, node: dict[str, Json], into: Any) -> Any:
        _check_fields(node, "ndarray", "dtype", "shape", *stride_fields(node))
        dtype = decode_numpy_dtype(node["dtype"])
        shape = _shape_of(node)
        as_torch = NUMPY_AS_TORCH.get(dtype.str) if not dtype.fields and not dtype.subdtype else None
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        as_stored = (as_torch, shape) if as_torch is not None else (torch.uint8, (count,))
        view = view_in(node, as_stored[1], as_stored[0].itemsize)
        stored = None if view is not None and view.storage is not None else as_stored
        name = self._name(node, "ndarray", stored)
        if into is not _NOTHING:
            return self._array_of(into, name, view, dtype, shape)
        tensor = self._restored(name, stored, view, as_stored[0])
        if view is None and not tensor.is_contiguous():
            raise BadLeaf(f"the tensor {name!r} is not contiguous")
        return self._as_array(name, tensor, dtype, shape if as_torch is None else None)

    def _as_array(
        self, name: str, tensor: torch.Tensor, dtype: "numpy.dtype[Any]", shape: tuple[int, ...] | None
    ) -> Any:
        """Return the array of a tensor; `shape`: that of an array which is stored as bytes."""
        try:
            array = tensor.cpu().numpy()
            return array if shape is None else array.view(dtype).reshape(shape)
        except (ValueError, TypeError) as error:  # more dimensions or elements than numpy bears
            raise BadLeaf(f"the array {name!r}: {error}") from None

    def _array_of(
        self, into: Any, name: str, view: View | None, dtype: "numpy.dtype[Any]", shape: tuple[int, ...]
    ) -> Any:
        if type(into) is not numpy.ndarray:
            raise self._mismatch(f"a {type(into).__name__}", f"an array of {dtype}, {list(shape)}")
        if into.dtype != dtype or into.shape != shape:
            raise self._mismatch(f"{into.dtype}, {list(into.shape)}", f"{dtype}, {list(shape)}")
        why = _unfillable(into)
        if why is not None:
            raise ValueError(
                f"into: {self.place()} {why}; load into a contiguous array (numpy.empty), or without `into`, "
                "and copy the values"
            )
        # Strides of one element or none may be negative, as after [::-1], which torch refuses.
        forwards: Any = (*(slice(None, None, -1 if step < 0 else 1) for step in into.strides), ...)
        ahead = into[forwards]
        if dtype.str in NUMPY_AS_TORCH and not dtype.fields:
            target = torch.from_numpy(ahead)
        else:
            target = torch.from_numpy(ahead.reshape(-1).view(numpy.uint8))
        self.uses.setdefault(name, []).append(Use(tuple(self._path), target, view))
        return into


def _unfillable(array: "numpy.ndarray[Any, Any]") -> str | None:
    """Return why bytes cannot be read into an array; None if they can."""
    if not array.flags.writeable:
        return "is a read-only array"
    if not array.flags.aligned:
        return "is an array whose elements are not aligned in memory"
    if any(step < 0 and extent > 1 for step, extent in zip(array.strides, array.shape, strict=True)):
        return "is an array with a negative stride (a reversed view)"
    return None if array.flags.c_contiguous else "is an array that is not contiguous in C order"


def _views_in(skeleton: Json) -> dict[str, list[Strided]]:
    """Return the views of shared memory in a skeleton, by the name of the memory."""
    walk = _Collecting(None, skeleton)
    _run(walk, skeleton, _NOTHING)
    return walk.views


def _stored_views(skeleton: Json) -> dict[str, list[Strided]]:
    """Return the same for memory of which only the bytes of views are stored, not all of it."""
    walk = _Collecting(None, skeleton)
    _run(walk, skeleton, _NOTHING)
    return {name: views for name, views in walk.views.items() if walk.named[name] is None}


class _Collecting(_Restoring):
    """A traversal that makes no tensors and no arrays."""

    def node(self, node: Json, into: Any) -> Any:
        """Return nothing of use. Accepts whole tensors of dtypes that this process lacks."""
        if type(node) is dict and "stride" not in node and is_dtype_of_torch(node.get("dtype")):
            self.named[str(node.get("tensor"))] = (torch.uint8, ())
            return None
        return super().node(node, into)

    def _as_array(
        self, name: str, tensor: torch.Tensor, dtype: "numpy.dtype[Any]", shape: tuple[int, ...] | None
    ) -> Any:
        return None

    def _restored(
        self,
        name: str,
        stored: tuple[torch.dtype, tuple[int, ...]] | None,
        view: View | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if view is not None and stored is None:
            self.views.setdefault(name, []).append(view.at)
        return torch.empty(0, dtype=dtype)


_WHOLE = "; it must have all of them: pass keys= as well to load only a part"


def _misspelled(unexpected: list[Any], missing: list[Any]) -> tuple[str, str] | None:
    """Return a key that the checkpoint lacks, and one that it has instead; None if no two are alike."""
    names = [key for key in missing if isinstance(key, str)]
    for key in unexpected:
        if isinstance(key, str) and not _about_compiled([key, *names]):
            for meant in difflib.get_close_matches(key, names, n=1, cutoff=0.75):
                return key, meant
    return None


def _about_compiled(keys: list[Any]) -> str:
    """Return what to do if only one of the states is that of a model wrapped by torch.compile."""
    if not any(isinstance(key, str) and "_orig_mod." in key for key in keys):
        return ""
    return (
        "; torch.compile adds _orig_mod. to the keys of a model: pass the state_dict of a compiled model if "
        "one was saved, or save and load that of the model inside (compiled._orig_mod)"
    )


def _from_stored(stored: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if stored.dtype is not dtype and not stored.is_contiguous():
        raise BadLeaf(f"the tensor {name!r} is not contiguous")
    return from_stored(stored, dtype)


def _check_fields(node: dict[str, Json], *fields: str) -> None:
    if len(node) != len(fields) or any(field not in node for field in fields):
        raise BadLeaf(f"it has the keys {_listed(list(node))}, not {_listed(list(fields))}")


def _shape_of(node: dict[str, Json]) -> tuple[int, ...]:
    shape = node["shape"]
    if type(shape) is not list:
        raise BadLeaf(_BAD_SHAPE)
    for extent in shape:
        if type(extent) is not int or not 0 <= extent < 2**63:
            raise BadLeaf(_BAD_SHAPE)
    return tuple(shape)


def _described(dtype: torch.dtype, shape: Any) -> str:
    return f"{dtype}, {list(shape)}"


def _keys(keys: list[Any]) -> str:
    return f"key{'s' if len(keys) > 1 else ''} {_listed(keys)}"


def _listed(values: list[Any]) -> str:
    shown = ", ".join(shown_key(value) for value in values[:5])
    return shown if len(values) <= 5 else f"{shown}, ... ({len(values)})"
