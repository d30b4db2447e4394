"""Determines what the pickle of a `.pt` file would do, without running any of it.

An abstract machine runs the opcodes over values that represent tensors and storages. It reports which
storages the pickle refers to, under which names, and whether it is *plain*: a plain pickle only builds
tensors from storages, so nothing reads a tensor's elements while it runs, and they can be read afterwards.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

# Bytes of an element, by the name under which torch pickles the type of a storage.
_ITEM_BYTES = {
    "UntypedStorage": 1,
    "DoubleStorage": 8,
    "FloatStorage": 4,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "LongStorage": 8,
    "IntStorage": 4,
    "ShortStorage": 2,
    "CharStorage": 1,
    "ByteStorage": 1,
    "BoolStorage": 1,
    "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8,
    "QUInt8Storage": 1,
    "QInt8Storage": 1,
    "QInt32Storage": 4,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
}
_FROM_STORAGE = {
    f"torch._utils.{name}" for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
}
_FROM_TENSOR = {f"torch._utils.{name}" for name in ("_rebuild_parameter", "_rebuild_parameter_with_state")}
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
_TENSOR_TYPES = {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"}
# Functions that only accept numbers and strings.
_OF_CONSTANTS = {
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.complex",
    "builtins.set",
    "torch.Size",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch.device",
    "torch.serialization._get_layout",
}

# Limits for the time that a hostile pickle can take: of names, and of arguments to check (a shape has at most
# 64 numbers).
_MAX_NAME = 1000
_MAX_CONSTANTS = 64


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by its full name."""

    name: str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage: the record `data/KEY`, of `nbytes`."""

    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor or parameter on a storage."""

    storage: StorageRef


class Mapping:
    """A dict or OrderedDict."""

    def __init__(self) -> None:
        """Make it empty."""
        self.items: list[tuple[Any, Any]] = []


class Opaque:
    """Anything else."""


class Scan(NamedTuple):
    """The result of a scan: storages in order of first use, `plain` (see the module), and the value."""

    storages: list[StorageRef]
    plain: bool
    root: Any

    def names(self) -> dict[str, str]:
        """Return, by the storage's key, the first path to a tensor on it, such as `model.0.weight`."""
        found: dict[str, str] = {}
        seen: set[int] = set()
        pending: list[tuple[str, Any]] = [("", self.root)]
        while pending:
            name, value = pending.pop()
            if isinstance(value, (TensorRef, StorageRef)):
                key = value.storage.key if isinstance(value, TensorRef) else value.key
                found.setdefault(key, name)
            elif (
                isinstance(value, (Mapping, list, tuple)) and id(value) not in seen and len(name) < _MAX_NAME
            ):
                seen.add(id(value))
                children = value.items if isinstance(value, Mapping) else list(enumerate(value))
                pending.extend(
                    (f"{name}.{key}" if name else str(key), child)
                    for key, child in reversed(children)
                    if isinstance(key, (str, int))
                )
        return found


def item_bytes(kind: str) -> int:
    """Return the bytes of an element in a storage that torch pickles as type `kind`; raises KeyError."""
    return _ITEM_BYTES[kind]


class UnknownError(Exception):
    """The pickle contains opcodes that torch.save never writes; torch decides about it."""


# What Machine raises for a pickle that scan() cannot scan.
NOT_SCANNED = (UnknownError, IndexError, KeyError, struct.error, UnicodeDecodeError)


def scan(data: bytes) -> Scan | None:
    """Scan a pickle, without running it; None if it uses unknown opcodes, or is truncated."""
    try:
        return Machine(data).run()
    except NOT_SCANNED:
        return None


class Machine:
    """Runs the opcodes that torch's weights_only unpickler supports; pickletools documents them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, StorageRef] = {}
        self._plain = True

    def run(self) -> Scan:
        self.run_opcodes()
        return Scan(list(self._storages.values()), self._plain, self._stack.pop())

    def run_opcodes(self) -> None:
        data = self._data
        steps = _STEPS
        while True:
            opcode = data[self._at]
            self._at += 1
            if opcode == _STOP:
                return
            step = steps.get(opcode)
            if step is None:
                raise UnknownError
            step(self)

    def take(self, nbytes: int) -> bytes:
        begin = self._at
        self._at += nbytes
        if self._at > len(self._data):
            raise UnknownError
        return self._data[begin : self._at]

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return value

    def line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise UnknownError
        text = self._data[self._at : end].decode()
        self._at = end + 1
        return text

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_dict(self) -> None:
        self.push(Mapping())

    def push_opaque(self) -> None:
        self.push(Opaque())

    def push_bytes(self, value: bytes) -> None:
        self.push(value)

    def pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marked.pop()
        return items

    def mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def pop_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise UnknownError
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def find(self) -> None:
        module, name = self.line(), self.line()
        # Python 2's name, which protocol 2 keeps.
        self.push(Global(f"{'builtins' if module == '__builtin__' else module}.{name}"))

    def find_storage(self) -> None:
        identity = self._stack.pop()
        match identity:
            case ("storage" | b"storage", Global(name), str(key), str() | bytes(), int(numel)) if numel >= 0:
                item_bytes = _ITEM_BYTES[name.rpartition(".")[2]]
            case _:
                raise UnknownError
        self.push(self._storages.setdefault(key, StorageRef(key, numel * item_bytes)))
        if self._storages[key].nbytes != numel * item_bytes:
            raise UnknownError

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        else:
            self._plain = False

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Mapping):
            target.items.extend(zip(items[::2], items[1::2], strict=False))
        else:
            self._plain = False

    def set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self.set_items([key, value])

    def build(self) -> None:
        self._stack.pop()
        # An OrderedDict's attributes, as the _metadata of a module's state_dict.
        if not isinstance(self._stack[-1], Mapping):
            self._plain = False

    def new_object(self) -> None:
        self._stack.pop()
        self._stack[-1] = Opaque()
        self._plain = False

    def reduce(self) -> None:
        arguments = self._stack.pop()
        self._stack[-1] = self._call(self._stack[-1], arguments)

    def _call(self, function: Any, arguments: Any) -> Any:
        name = function.name if isinstance(function, Global) else ""
        match arguments:
            case () if name == "collections.OrderedDict":
                return Mapping()
            case (StorageRef() as storage, *rest) if name in _FROM_STORAGE and _is_constant(rest):
                return TensorRef(storage)
            case (TensorRef() as tensor, *rest) if name in _FROM_TENSOR and _is_constant(rest):
                return tensor
            case (Global() as inner, Global(kind), tuple(inner_arguments), state) if (
                name == _WITH_ATTRIBUTES
                and kind in _TENSOR_TYPES
                and inner.name != _WITH_ATTRIBUTES
                and _is_constant(state)
            ):
                return self._call(inner, inner_arguments)
            case tuple() if name in _OF_CONSTANTS and _is_constant(arguments):
                return Opaque()
        self._plain = False
        return Opaque()


def _is_constant(value: Any, depth: int = 3) -> bool:
    """Whether the value contains no tensor; False if that takes long to determine."""
    if isinstance(value, (list, tuple)):
        return (
            depth > 0
            and len(value) <= _MAX_CONSTANTS
            and all(_is_constant(item, depth - 1) for item in value)
        )
    if isinstance(value, Mapping):
        return _is_constant(value.items, depth)
    return value is None or isinstance(value, (int, float, str, bytes, Global))


_STOP = ord(".")
_U8, _U16, _U32, _I32 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<i"))
_F64 = struct.Struct(">d")
_Step = Callable[[Machine], None]
_STEPS: dict[int, _Step] = {
    ord(opcode): step
    for opcode, step in {
        "\x80": lambda m: m.number(_U8),
        "(": Machine.mark,
        "t": lambda m: m.push(tuple(m.pop_mark())),
        "\x85": lambda m: m.pop_tuple(1),
        "\x86": lambda m: m.pop_tuple(2),
        "\x87": lambda m: m.pop_tuple(3),
        ")": lambda m: m.push(()),
        "]": lambda m: m.push([]),
        "}": lambda m: m.push_dict(),
        "\x8f": lambda m: m.push_opaque(),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(m.number(_I32)),
        "K": lambda m: m.push(m.number(_U8)),
        "M": lambda m: m.push(m.number(_U16)),
        "G": lambda m: m.push(m.number(_F64)),
        "\x8a": lambda m: m.push(int.from_bytes(m.take(m.number(_U8)), "little", signed=True)),
        "X": lambda m: m.push(str(m.take(m.number(_U32)), "utf-8", "surrogatepass")),
        "U": lambda m: m.push_bytes(m.take(m.number(_U8))),
        "q": lambda m: m.put(m.number(_U8)),
        "r": lambda m: m.put(m.number(_U32)),
        "h": lambda m: m.get(m.number(_U8)),
        "j": lambda m: m.get(m.number(_U32)),
        "a": lambda m: m.append([m._stack.pop()]),
        "e": lambda m: m.append(m.pop_mark()),
        "s": lambda m: m.set_item(),
        "u": lambda m: m.set_items(m.pop_mark()),
        "b": lambda m: m.build(),
        "\x81": lambda m: m.new_object(),
        "R": lambda m: m.reduce(),
        "c": Machine.find,
        "Q": lambda m: m.find_storage(),
    }.items()
}
