"""Says what is wrong with the arguments of a call to a function of `_core`: nanobind lists signatures."""

import ast
import difflib
import inspect
import re
from collections.abc import Sequence
from typing import Any

from trunkline._parsing import parsed


def explain(function: Any, message: str, positional: int, names: Sequence[str]) -> str | None:
    """Return a better message for a call that raised `message`; None if there is none.

    The call had so many positional arguments (that of a method, its object), and the named ones.
    """
    if not message.startswith(f"{function.__name__}(): incompatible function arguments"):
        return None  # raised within the call
    if len(function.__nb_signature__) != 1:
        return None
    signature = _signature_of(function.__nb_signature__[0][0])
    called = function.__qualname__.removesuffix(".__init__")
    for name in names:
        if name not in signature.parameters:
            close = difflib.get_close_matches(name, signature.parameters.keys() - {"self"}, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            return f"{called}(): unexpected keyword argument '{name}'{hint}"
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(names))
    except TypeError as error:
        return f"{called}(): {error}"
    return None  # an argument has a wrong type


def _signature_of(text: str) -> inspect.Signature:
    """Read "def open(path: Path, mode: Mode = 'r') -> File"; a default may be a number after a backslash."""
    source = re.sub(r"\\\d+", "None", text) + ": ..."
    function = parsed(lambda: ast.parse(source)).body[0]
    assert isinstance(function, ast.FunctionDef)
    found = function.args
    positional = [*found.posonlyargs, *found.args]
    first_default = len(positional) - len(found.defaults)
    parameters = [
        _parameter(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD, index >= first_default)
        for index, argument in enumerate(positional)
    ]
    parameters += [
        _parameter(argument, inspect.Parameter.KEYWORD_ONLY, default is not None)
        for argument, default in zip(found.kwonlyargs, found.kw_defaults, strict=True)
    ]
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, kind: Any, has_default: bool) -> inspect.Parameter:
    default = None if has_default else inspect.Parameter.empty
    return inspect.Parameter(argument.arg, kind, default=default)
