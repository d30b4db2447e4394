"""Builds the object of a plain `.pt` file without torch's unpickler, which takes much longer.

Most files contain only dicts, lists, tuples, numbers, strings, tensors and parameters. For those the opcodes
run here over the actual values. Anything else in a pickle ends this without effect, and torch decides about
it: only functions that this module names are called.
"""

import collections
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trunkline._formats.pt.pickle import Global, Machine, UnknownError, item_bytes

# The dtypes of storages that torch names by type; for untyped ones the tensors on them have the dtype.
_DTYPES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
_DTYPES_BY_NAME = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LEAVES = (torch.Tensor, torch.nn.Parameter, str, int, float, bool, type(None), bytes, torch.Size)

# Makes the storage of a key, given its size in bytes and the location where it was saved ("cuda:1").
MakeStorage = Callable[[str, int, str], torch.UntypedStorage]


class _Typed(NamedTuple):
    """A storage, and the dtype of the tensors on it; None if each has its own."""

    storage: torch.UntypedStorage
    dtype: torch.dtype | None


class _NotPlainError(Exception):
    pass


_UNFIT = (
    *(UnknownError, _NotPlainError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError),
    struct.error,
)


def build(data: bytes, make_storage: MakeStorage) -> tuple[bool, Any]:
    """Return True and the object of a pickle, or False if torch must load it.

    Raises the errors of `make_storage`.
    """
    builder = _Builder(data, make_storage)
    try:
        root = builder.build_root()
        _check_leaves(root)
    except _UNFIT:
        # Raised for values that are invalid for an opcode, and by torch for tensors larger than their
        # storage.
        return False, None
    return True, root


def _check_leaves(root: Any) -> None:
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind in _LEAVES:
            continue
        if kind not in (dict, collections.OrderedDict, list, tuple):
            raise _NotPlainError
        if id(value) in seen:
            continue
        seen.add(id(value))
        if kind in (list, tuple):
            pending.extend(value)
            continue
        pending.extend(value)
        pending.extend(value.values())
        if kind is collections.OrderedDict and vars(value):
            pending.append(vars(value))


class _Builder(Machine):
    def __init__(self, data: bytes, make_storage: MakeStorage) -> None:
        super().__init__(data)
        self._make_storage = make_storage
        self._typed: dict[tuple[str, str], _Typed] = {}
        self._made: dict[str, torch.UntypedStorage] = {}

    def build_root(self) -> Any:
        self.run_opcodes()
        return self._stack.pop()

    def push_dict(self) -> None:
        self.push({})

    def push_opaque(self) -> None:
        raise _NotPlainError

    def push_bytes(self, value: bytes) -> None:
        raise _NotPlainError

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise _NotPlainError
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, collections.OrderedDict):
            raise _NotPlainError
        target.update(zip(items[::2], items[1::2], strict=True))

    def build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not collections.OrderedDict or type(state) is not dict:
            raise _NotPlainError
        if any(type(name) is not str for name in state):
            raise _NotPlainError
        vars(target).update(state)

    def new_object(self) -> None:
        raise _NotPlainError

    def find_storage(self) -> None:
        identity = self._stack.pop()
        match identity:
            case ("storage", Global(name), str(key), str(location), int(numel)) if numel >= 0:
                kind = name.rpartition(".")[2]
            case _:
                raise _NotPlainError
        typed = self._typed.get((key, kind))
        if typed is None:
            nbytes = numel * item_bytes(kind)
            storage = self._made.get(key)
            if storage is None:
                storage = self._made[key] = self._make_storage(key, nbytes, location)
            if storage.nbytes() != nbytes:
                raise _NotPlainError
            typed = self._typed[key, kind] = _Typed(storage, _DTYPES.get(kind))
        self.push(typed)

    def reduce(self) -> None:
        arguments = self._stack.pop()
        function = self._stack[-1]
        if type(function) is not Global or type(arguments) is not tuple:
            raise _NotPlainError
        call: Callable[..., Any] = _FUNCTIONS.get(function.name, _not_plain)
        self._stack[-1] = call(*arguments)


def _not_plain(*_: Any) -> Any:
    raise _NotPlainError


def _ordered_dict() -> Any:
    return collections.OrderedDict()


def _tensor(
    typed: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, *more: Any
) -> torch.Tensor:
    if type(typed) is not _Typed or typed.dtype is None or more:
        raise _NotPlainError
    return _tensor_on(typed.storage, typed.dtype, offset, shape, stride, requires_grad, hooks)


def _tensor_of_dtype(
    typed: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, *more: Any
) -> torch.Tensor:
    if type(typed) is not _Typed or type(dtype) is not Global or more:
        raise _NotPlainError
    # Never by getattr: looking up some names of torch imports modules.
    found = _DTYPES_BY_NAME.get(dtype.name)
    if found is None:
        raise _NotPlainError
    return _tensor_on(typed.storage, found, offset, shape, stride, requires_grad, hooks)


def _tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
) -> torch.Tensor:
    _check_hooks(hooks)
    if type(requires_grad) is not bool or type(shape) is not tuple or type(stride) is not tuple:
        raise _NotPlainError
    # A tensor could be used as an integer, though its elements have not been read yet.
    if any(type(number) is not int for number in (offset, *shape, *stride)):
        raise _NotPlainError
    # Torch would enlarge a storage that is too small for the tensor, by bytes that are in no record.
    if offset < 0 or min(stride, default=0) < 0 or min(shape, default=0) < 0:
        raise _NotPlainError
    if 0 not in shape:
        last = offset + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.nbytes():
            raise _NotPlainError
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> torch.nn.Parameter:
    _check_hooks(hooks)
    if type(data) is not torch.Tensor or type(requires_grad) is not bool:
        raise _NotPlainError
    return torch.nn.Parameter(data, requires_grad)


def _size(extents: Any) -> torch.Size:
    if type(extents) is not tuple or any(type(extent) is not int for extent in extents):
        raise _NotPlainError
    return torch.Size(extents)


def _check_hooks(hooks: Any) -> None:
    if type(hooks) is not collections.OrderedDict or hooks or vars(hooks):
        raise _NotPlainError


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": _size,
}
