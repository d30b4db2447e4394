"""Which tensors and values of a file are loaded: the argument `keys`."""

import collections
import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

Keys: TypeAlias = str | Iterable[str] | Callable[[str], bool]

# What has parts with names; others, such as torch.Size, are values.
_CONTAINERS = (dict, collections.OrderedDict, list, tuple)
_NOTHING: Any = object()  # stands for a part of which nothing is selected
_MAX_SHOWN = 5
_WRONG = "keys: must be a name, a list of names, or a function of a name that returns a bool"


class Selection:
    """Selects by names. The name of a part of a nesting is its keys and indices, joined by dots.

    A string selects what has this name, and everything below it: "model.layers.1" selects
    "model.layers.1.weight", and not "model.layers.10.weight". A function decides about each tensor and value.
    """

    def __init__(self, keys: Keys) -> None:
        """Raises TypeError for other types, ValueError if no key is given."""
        self._decide: Callable[[str], bool] | None = None
        self._keys: dict[str, bool] = {}  # whether each has selected anything
        if callable(keys):
            self._decide = keys
            return
        if isinstance(keys, bytes | bytearray) or not isinstance(keys, Iterable):
            raise TypeError(f"{_WRONG}, not {type(keys).__name__}")
        names = [keys] if isinstance(keys, str) else list(keys)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"{_WRONG}; the list has a {type(name).__name__}")
            if not name.strip("."):
                raise ValueError(f"keys: {name!r} names nothing; leave keys out to load everything")
        if not names:
            raise ValueError("keys: the list is empty; leave keys out to load everything")
        self._keys = dict.fromkeys((name.removesuffix(".") for name in names), False)

    def covers(self, name: str) -> bool:
        """Whether a string selects everything of this name and below it."""
        end = len(name)
        found = False
        while self._keys:
            if name[:end] in self._keys:
                self._keys[name[:end]] = found = True
            end = name.rfind(".", 0, end)
            if end < 0:
                break
        return found

    def selects(self, name: str) -> bool:
        """Whether the tensor or value of this name is selected."""
        return self.covers(name) if self._decide is None else bool(self._decide(name))

    def check(self, path: str, names: Iterable[str]) -> None:
        """Raise ValueError if a key has selected nothing. `names`: of all tensors and values, for hints."""
        missing = [key for key, has_selected in self._keys.items() if not has_selected]
        if not missing:
            return
        known = list(dict.fromkeys(_with_parents(names)))
        shown = ", ".join(map(repr, missing[:_MAX_SHOWN])) + (", ..." if len(missing) > _MAX_SHOWN else "")
        near = difflib.get_close_matches(missing[0], known, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else _listed(known)
        raise ValueError(f"keys: {path} has nothing named {shown}; {hint}")


def _with_parents(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        at = name.find(".")
        while at >= 0:
            yield name[:at]
            at = name.find(".", at + 1)
        yield name


def _listed(names: list[str]) -> str:
    top = [name for name in names if "." not in name] or names
    more = ", ..." if len(top) > _MAX_SHOWN else ""
    return f"it has {', '.join(map(repr, top[:_MAX_SHOWN]))}{more}" if top else "it is empty"


def child_name(parent: str, key: Any) -> str:
    """Return the name of a part, by that of the container and its key or index."""
    return f"{parent}.{key}" if parent else str(key)


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name of each value of a nesting that is not a container, and the value.

    A nesting is as .pt files hold it: containers may contain themselves, and are then visited once.
    """
    pending = [(name, value)]
    opened: set[int] = set()
    while pending:
        name, value = pending.pop()
        if type(value) not in _CONTAINERS:
            yield name, value
        elif id(value) not in opened:
            opened.add(id(value))
            pending.extend(reversed([(child_name(name, key), child) for key, child in _children(value)]))


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


def selected(value: Any, selection: Selection, path: str) -> Any:
    """Return a nesting with only what is selected; raises ValueError for a key that selects nothing.

    Dicts have only the keys under which something is selected. Lists and tuples keep their length, with None
    in place of items of which nothing is selected.
    """
    found = _selected(value, "", selection, set())
    selection.check(path, (name for name, _ in leaves_of(value)))
    if found is not _NOTHING:
        return found
    return type(value)() if type(value) in _CONTAINERS else None


def _selected(value: Any, name: str, selection: Selection, opened: set[int]) -> Any:
    if selection.covers(name):
        return value
    if type(value) not in _CONTAINERS:
        return value if selection.selects(name) else _NOTHING
    if id(value) in opened:  # it contains itself
        return _NOTHING
    opened.add(id(value))
    parts = [
        (key, _selected(child, child_name(name, key), selection, opened)) for key, child in _children(value)
    ]
    opened.discard(id(value))
    if all(part is _NOTHING for _, part in parts):
        return _NOTHING
    if isinstance(value, dict):
        kept = type(value)()
        kept.update((key, part) for key, part in parts if part is not _NOTHING)
        if hasattr(value, "__dict__"):  # the _metadata of a module's state_dict
            vars(kept).update(vars(value))
        return kept
    return type(value)(None if part is _NOTHING else part for _, part in parts)
