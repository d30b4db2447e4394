"""Plain data as JSON, exactly: each function accepts only the type it is named after, or raises Refusal."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

_MAX_DEPTH = 100
_LIMIT = 1 << 63  # of numbers: readers in other languages use 64 bits


class Refusal(Exception):
    """A value is not valid; the message begins with its name."""


def dumps(value: dict[str, Any]) -> str:
    """Return JSON in ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def loads(text: bytes) -> object:
    """Parse JSON as dumps() writes it: no duplicated keys, no infinities."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise Refusal("the JSON has an object with a duplicated key")
        return made

    def no_constant(name: str) -> object:
        raise Refusal(f"the JSON contains {name}, which is not a number")

    try:
        return json.loads(text.decode("ascii"), object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"it is not valid JSON: {error}") from None


def encode(value: object, what: str, depth: int = 0) -> Any:
    """Return plain data (None, bool, int, float, str, list, tuple, dict with str keys) as tagged JSON."""
    if depth > _MAX_DEPTH:
        raise Refusal(f"{what} is nested deeper than {_MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int) and kind is int and -_LIMIT <= value < _LIMIT:
        return value
    if isinstance(value, float) and kind is float and math.isfinite(value):
        return {"float": value.hex()}
    if isinstance(value, list) and kind is list:
        return [encode(element, f"{what}[{i}]", depth + 1) for i, element in enumerate(value)]
    if isinstance(value, tuple) and kind is tuple:
        return {"tuple": [encode(element, f"{what}[{i}]", depth + 1) for i, element in enumerate(value)]}
    if isinstance(value, dict) and kind is dict:
        return {
            "dict": {
                text(key, f"a key of {what}"): encode(element, f"{what}[{key!r}]", depth + 1)
                for key, element in value.items()
            }
        }
    raise Refusal(f"{what} is {value!r} of type {kind.__name__}")


def decode(value: object, what: str, depth: int = 0) -> Any:
    """Return the data that encode() encoded."""
    if depth > _MAX_DEPTH:
        raise Refusal(f"{what}: is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, list):
        return [decode(element, what, depth + 1) for element in value]
    if not isinstance(value, dict):
        if isinstance(value, float):
            raise Refusal(f"{what}: holds a number with a fraction or an exponent")
        if isinstance(value, int) and not -_LIMIT <= value < _LIMIT:
            raise Refusal(f"{what}: holds a number of more than 64 bits")
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "tuple":
            return tuple(decode(element, what, depth + 1) for element in array(inner, what))
        if tag == "dict":
            return {key: decode(element, what, depth + 1) for key, element in mapping(inner, what).items()}
        if tag == "float":
            return _float(text(inner, what), what)
    raise Refusal(f"{what}: holds an object that is neither a tuple, a dict nor a float")


def _float(digits: str, what: str) -> float:
    try:
        number = float.fromhex(digits)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number.hex() != digits:
        raise Refusal(f"{what}: {digits!r} is not a number in the form that encode() writes")
    return number


def record(value: object, what: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return the value, an object with exactly these keys."""
    made = mapping(value, what)
    if made.keys() != set(keys):
        raise Refusal(f"{what}: must be an object with the keys {', '.join(keys)}")
    return made


def mapping(value: object, what: str) -> dict[str, Any]:
    """Return the value, an object."""
    if not isinstance(value, dict):
        raise Refusal(f"{what}: must be an object")
    return value


def array(value: object, what: str, length: int | None = None) -> list[Any]:
    """Return the value, an array (of this length)."""
    if not isinstance(value, list) or length not in (None, len(value)):
        raise Refusal(f"{what}: must be an array" + ("" if length is None else f" of {length}"))
    return value


def text(value: object, what: str) -> str:
    """Return the value, a string."""
    if type(value) is not str:
        raise Refusal(f"{what}: must be a string, not {value!r}")
    return value


def optional_text(value: object, what: str) -> str | None:
    """Return the value, a string or null."""
    return None if value is None else text(value, what)


def boolean(value: object, what: str) -> bool:
    """Return the value, a boolean."""
    if type(value) is not bool:
        raise Refusal(f"{what}: must be true or false")
    return value


def count(value: object, what: str) -> int:
    """Return the value, a non-negative integer."""
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise Refusal(f"{what}: must be an integer from 0 to 2^63 - 1")
    return value


def extents(value: object, what: str) -> list[int]:
    """Return the value, an array of offsets or sizes, one for each dimension."""
    elements: Iterable[object] = array(value, what)
    return [count(element, what) for element in elements]
