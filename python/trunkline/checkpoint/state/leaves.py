"""Encodes leaves, values of a state that contain no others, as JSON, and restores them exactly.

Values that JSON has are stored as they are. Everything else is an object, whose keys say what it is:

    {"int": "-0x1f"}            beyond 64 bits      {"float": "7ff8000000000000"}    not finite: IEEE 754 bits
    {"str": BASE64}             with surrogates     {"complex": [1.0, -0.0]}
    {"bytes": BASE64}                               {"dtype": "BF16"}, {"device": "cuda:0"}, {"size": [2, 3]}
    {"numpy.dtype": "<f4"}                          {"numpy.scalar": BASE64, "dtype": "<f4"}
    {"numpy.str_": str}, {"numpy.bytes_": BASE64}
    {"tuple": [...]}, {"set": [...]}, {"frozenset": [...]}                 of these values

Strings with surrogates are in UTF-8 with the surrogates encoded too (CPython's "surrogatepass"). A dtype of
numpy is as numpy.lib.format describes it, lists and tuples of its fields in the notation above.
"""

import base64
import json
import re
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy

from trunkline._tensor_io.tensors import dtype_name, dtype_named
from trunkline._torch_or_numpy import torch

# None, bool, int, float, str, list or dict, as json.loads returns it.
Json: TypeAlias = Any

# Nested containers. Each takes two levels of JSON, so that parsers with a limit of 100 can read the skeleton.
MAX_DEPTH = 48

# Arrays with these dtypes are stored as tensors of the same dtype; others as their bytes.
NUMPY_AS_TORCH: dict[str, torch.dtype] = {
    numpy.dtype(name).str: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64"),
    )
}

_INT64 = range(-(2**63), 2**63)
_HEX_INT = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_HEX_FLOAT = re.compile(r"[0-9a-f]{16}")
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUVMm][0-9]+(\[[0-9]*[A-Za-z]+\])?")
# The scalar types of numpy whose values are their bytes.
_NUMPY_BYTES = "biufcMmV"


class NoLeaf(Exception):
    """The value cannot be stored; str() says why and completes a sentence: "it ..."."""


class BadLeaf(Exception):
    """The JSON was not made by encode(); str() says why."""


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _encode_int(value: int) -> Json:
    return value if value in _INT64 else {"int": hex(value)}


def _encode_float(value: float) -> Json:
    if value - value == 0:
        return value
    return {"float": struct.pack(">d", value).hex()}


def _encode_str(value: str) -> Json:
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"str": _base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _encode_set(tag: str, values: set[Any] | frozenset[Any]) -> Json:
    return {tag: sorted((encode_key(value) for value in values), key=json.dumps)}


def _encode_descr(descr: Any) -> Json:
    if type(descr) is list:
        return [_encode_descr(value) for value in descr]
    if type(descr) is tuple:
        return {"tuple": [_encode_descr(value) for value in descr]}
    return encode(descr)


def encode_numpy_dtype(dtype: "numpy.dtype[Any]") -> Json:
    """Return the JSON of a dtype of numpy. Raises NoLeaf for one that numpy's own files cannot hold."""
    if dtype.hasobject:
        raise NoLeaf(f"has the numpy dtype {dtype}, whose elements are objects")
    descr = None if dtype.metadata else numpy.lib.format.dtype_to_descr(dtype)
    encoded = _encode_descr(descr)
    try:
        same = bool(decode_numpy_dtype(encoded) == dtype)
    except BadLeaf:
        same = False
    if not same:
        raise NoLeaf(f"has the numpy dtype {dtype!r}, which cannot be stored")
    return encoded


def _encode_numpy_scalar(value: "numpy.generic[Any]") -> Json:
    if type(value) is numpy.str_:
        return {"numpy.str_": _encode_str("".join(value))}  # str() drops zeros at the end
    if type(value) is numpy.bytes_:
        return {"numpy.bytes_": _base64(bytes(value))}
    encoded = {"numpy.scalar": _base64(value.tobytes()), "dtype": encode_numpy_dtype(value.dtype)}
    if value.dtype.kind not in _NUMPY_BYTES or type(decode(encoded)).__name__ != type(value).__name__:
        raise NoLeaf(f"is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored")
    return encoded


_ENCODERS: dict[type, Callable[[Any], Json]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    complex: lambda value: {"complex": [_encode_float(value.real), _encode_float(value.imag)]},
    str: _encode_str,
    bytes: lambda value: {"bytes": _base64(value)},
    torch.dtype: lambda value: {"dtype": dtype_name(value)},
    torch.device: lambda value: {"device": str(value)},
    torch.Size: lambda value: {"size": [int(extent) for extent in value]},
    set: lambda value: _encode_set("set", value),
    frozenset: lambda value: _encode_set("frozenset", value),
}


def encode(value: Any) -> Json:
    """Return the JSON of a value that holds no list, dict or tensor. Raises NoLeaf for any other."""
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if isinstance(value, numpy.generic):
        return _encode_numpy_scalar(value)
    if isinstance(value, numpy.dtype):
        return {"numpy.dtype": encode_numpy_dtype(value)}
    raise NoLeaf(f"is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved")


def encode_key(value: Any) -> Json:
    """Return the JSON of a key of a dict or an element of a set: a leaf or tuple of these. Raises NoLeaf."""
    if type(value) is tuple:
        return {"tuple": [encode_key(item) for item in value]}
    if isinstance(value, numpy.void):
        raise NoLeaf("is a numpy.void, whose hash is not that of its contents")
    return encode(value)


def _text(value: Json) -> str:
    if type(value) is not str:
        raise BadLeaf("it must hold a string here")
    return value


def _array(value: Json) -> list[Json]:
    if type(value) is not list:
        raise BadLeaf("it must hold an array here")
    return value


def _decode_base64(value: Json) -> bytes:
    return base64.b64decode(_text(value).encode("ascii"), validate=True)


def _decode_int(value: Json) -> int:
    if not _HEX_INT.fullmatch(_text(value)) or int(value, 16) in _INT64:
        raise BadLeaf("it is not an integer beyond 64 bits in hexadecimal digits")
    return int(value, 16)


def _decode_float(value: Json) -> float:
    if not _HEX_FLOAT.fullmatch(_text(value)):
        raise BadLeaf("it is not a float of 16 hexadecimal digits")
    number: float = struct.unpack(">d", bytes.fromhex(value))[0]
    return number


def _decode_complex(value: Json) -> complex:
    parts = [decode(part) for part in _array(value)]
    if len(parts) != 2 or any(type(part) is not float for part in parts):
        raise BadLeaf("it is not a pair of floats")
    return complex(*parts)


def _decode_size(value: Json) -> torch.Size:
    extents = _array(value)
    if any(type(extent) is not int for extent in extents):
        raise BadLeaf("its elements must be integers")
    return torch.Size(extents)


def _decode_descr(value: Json) -> Any:
    if type(value) is list:
        return [_decode_descr(item) for item in value]
    if type(value) is dict and list(value) == ["tuple"]:
        return tuple(_decode_descr(item) for item in _array(value["tuple"]))
    descr = decode(value)
    if type(descr) not in (str, int):
        raise BadLeaf("it does not describe a numpy dtype")
    return descr


def decode_numpy_dtype(value: Json) -> "numpy.dtype[Any]":
    """Return the dtype of numpy that encode_numpy_dtype described. Raises BadLeaf."""
    descr = _decode_descr(value)
    if type(descr) is str and not _NUMPY_DTYPE.fullmatch(descr):
        raise BadLeaf(f"{descr!r} is not a numpy dtype")
    try:
        dtype: numpy.dtype[Any] = numpy.lib.format.descr_to_dtype(descr)
        plain = dtype.itemsize > 0 and not dtype.hasobject
        canonical = plain and numpy.lib.format.dtype_to_descr(dtype) == descr
    except Exception as error:  # numpy may raise anything for a hostile description
        raise BadLeaf(f"{descr!r} is not a numpy dtype ({error})") from None
    if not canonical:
        raise BadLeaf(f"{descr!r} is not the form in which numpy describes this dtype")
    return dtype


def _decode_numpy_scalar(value: Json, described: Json) -> Any:
    data, dtype = _decode_base64(value), decode_numpy_dtype(described)
    if (
        dtype.kind not in _NUMPY_BYTES
        or dtype.subdtype is not None
        or len(data) != dtype.itemsize
        or not data
    ):
        raise BadLeaf("it is not a scalar of its dtype")
    # A copy: a scalar of structured dtype would keep and show the bytes that it was made from.
    return numpy.ndarray((), dtype, bytearray(data))[()]


def _decode_elements(value: Json) -> list[Any]:
    elements = [decode_key(element) for element in _array(value)]
    if len(set(elements)) != len(elements):
        raise BadLeaf("an element is duplicated")
    return elements


_DECODERS: dict[str, Callable[[Json], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "str": lambda value: _decode_base64(value).decode("utf-8", "surrogatepass"),
    "complex": _decode_complex,
    "bytes": _decode_base64,
    "dtype": lambda value: dtype_named(_text(value)),
    "device": lambda value: torch.device(_text(value)),
    "size": _decode_size,
    "set": lambda value: set(_decode_elements(value)),
    "frozenset": lambda value: frozenset(_decode_elements(value)),
    "numpy.dtype": decode_numpy_dtype,
    "numpy.str_": lambda value: numpy.str_(_decode_str_node(value)),
    "numpy.bytes_": lambda value: numpy.bytes_(_decode_base64(value)),
}


def _decode_str_node(value: Json) -> str:
    return _text(decode(value))


def decode(value: Json) -> Any:
    """Return the value that encode() encoded. Raises BadLeaf for any other JSON."""
    if type(value) is float and value - value != 0:
        raise BadLeaf("it is a number that is not finite")
    if type(value) is int and value not in _INT64:
        raise BadLeaf("it is an integer beyond 64 bits")
    if value is None or type(value) in (bool, int, float, str):
        return value
    try:
        if type(value) is dict and value.keys() == {"numpy.scalar", "dtype"}:
            return _decode_numpy_scalar(value["numpy.scalar"], value["dtype"])
        if type(value) is dict and len(value) == 1:
            [(tag, payload)] = value.items()
            if tag in _DECODERS:
                return _DECODERS[tag](payload)
    except RecursionError:
        raise
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # of base64, UTF-8, torch, numpy
        raise BadLeaf(f"it is not a {' '.join(map(repr, value))} ({error})") from None
    raise BadLeaf(f"it is not a value that a state can hold: {_shown(value)}")


def decode_key(value: Json) -> Any:
    """Return the value that encode_key() encoded. Raises BadLeaf."""
    if type(value) is dict and list(value) == ["tuple"]:
        return tuple(decode_key(item) for item in _array(value["tuple"]))
    decoded = decode(value)
    try:
        hash(decoded)
    except TypeError:
        raise BadLeaf("it is not a key: it cannot be hashed") from None
    return decoded


def shown_key(key: Any) -> str:
    """Return the key as error messages show it."""
    try:
        text = repr(key)
    except ValueError:  # an int of thousands of digits
        text = f"<{type(key).__name__}>"
    return text if len(text) <= 400 else text[:400] + "..."


def _shown(value: Json) -> str:
    text = repr(value) if type(value) is not dict else "an object of " + repr(list(value)[:4])
    return text if len(text) < 60 else text[:57] + "..."
