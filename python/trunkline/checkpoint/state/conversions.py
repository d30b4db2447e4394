"""For error messages: what to save instead of an object that a state cannot hold."""

import argparse
import collections
import dataclasses
import datetime
import enum
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from trunkline._torch_or_numpy import torch

_ANY = "save what it consists of: dicts, lists, numbers, strings, tensors or arrays"


def _has_state_dict(value: Any) -> bool:
    return callable(getattr(type(value), "state_dict", None))  # of the type: modules may invent attributes


def _is_of(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


# The first match wins: an IntEnum is also an int, a namedtuple a tuple, and a mapping may have state_dict().
_ADVICE: list[tuple[Callable[[Any], bool], str]] = [
    (_is_of(type), "save its name"),
    (_is_of(enum.Enum), "save its name or its value (e.name, e.value)"),
    (_has_state_dict, "save its state_dict()"),
    (dataclasses.is_dataclass, "save dataclasses.asdict(...) of it"),
    (_is_of(pathlib.PurePath), "save str(path)"),
    (_is_of(argparse.Namespace), "save vars(args)"),
    (_is_of(datetime.date, datetime.time), "save its isoformat()"),
    (_is_of(torch.Generator), "save its get_state()"),
    (_is_of(numpy.random.Generator), "save its bit_generator.state"),
    (lambda value: isinstance(value, tuple) and hasattr(value, "_asdict"), "save its _asdict()"),
    (_is_of(Mapping), "save dict(...) of it"),
    (_is_of(list, collections.deque), "save list(...) of it"),
    (_is_of(tuple), "save tuple(...) of it"),
    (_is_of(bytearray), "save bytes(...) of it"),
    (_is_of(str), "save str(...) of it"),
    (_is_of(int), "save int(...) of it"),
    (_is_of(float), "save float(...) of it"),
]


def conversion(value: Any) -> str:
    """Return what to do about a value that a state cannot hold."""
    if type(value) in (set, frozenset) or isinstance(value, numpy.generic):
        return _ANY  # an element of it cannot be saved; or it is a numpy.float64, which is also a float
    return next((advice for fits, advice in _ADVICE if fits(value)), _ANY)
