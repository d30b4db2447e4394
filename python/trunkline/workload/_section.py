"""A section of a workload file: typed access to its keys, which remembers those that nothing asked for."""

import difflib
import math
from collections.abc import Iterator
from typing import Any, NoReturn

from trunkline.workload._spec_error import SpecError
from trunkline.workload._yaml import Node

_ALIKE = 0.85  # batchsize and batch_size are, num_files_eval and num_files_train are not
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


class Section:
    """One section, such as `dataset`. Every method that returns a value raises SpecError if it is not valid.

    Methods accept several spellings of a key, of which the file may have one.
    """

    def __init__(self, source: str, name: str, node: Node, parent: "Section | None" = None) -> None:
        """`name`: the path of the section, empty for the document."""
        self._parent = parent
        self._source = source
        self._name = name
        self._line = node.line
        if node.value is None:
            node = Node({}, node.line)
        if not isinstance(node.value, dict):
            problem = "must be a section with keys below it"
            if node.override:
                raise SpecError(f"overrides: {node.override}", None, "", problem)
            raise SpecError(source, node.line, name, problem)
        self._nodes: dict[str, Node] = node.value
        self._known: set[str] = set()
        self._sections: dict[str, Section] = {}

    def has(self, *keys: str) -> bool:
        """Whether one of the spellings is there, and is not null."""
        return any(key in self._nodes and self._nodes[key].value is not None for key in keys)

    def holds(self, key: str, word: str) -> bool:
        """Whether the value is that word. It does not count as asked for."""
        return key in self._nodes and str(self._nodes[key].value).lower() == word

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise SpecError about a key."""
        node = self._nodes.get(key)
        if node is not None and node.override:
            raise SpecError(f"overrides: {node.override}", None, "", problem)
        raise SpecError(self._source, node.line if node else self._line, self.path(key), problem)

    def path(self, key: str) -> str:
        """The key with the sections that it is in."""
        return f"{self._name}.{key}" if self._name else key

    def section(self, key: str) -> "Section":
        """The section of this name, empty if it is missing."""
        if key not in self._sections:
            node = self._nodes.get(key) or Node({}, self._line)
            self._sections[key] = Section(self._source, self.path(key), node, self)
        return self._sections[key]

    def value(self, *keys: str) -> Any:
        """The scalar as YAML reads it, None if it is missing or null."""
        self._known.update(keys)
        present = [key for key in keys if self.has(key)]
        if len(present) > 1:
            self.fail(present[1], f"is the same as {present[0]}, which is given too; keep one of them")
        if not present:
            return None
        found = self._nodes[present[0]].value
        if isinstance(found, dict | list):
            self.fail(present[0], "must be a single value")
        if isinstance(found, str) and "${" in found:
            self.fail(present[0], f"references such as {found} are not supported; write the value")
        return found

    def number(
        self, *keys: str, default: float | None = None, least: float = 0.0, most: float = math.inf
    ) -> float:
        """A finite number from `least` to `most`. Without a default, the key is required."""
        value = self.value(*keys)
        if value is None:
            return float(self._required(keys, default, "a number"))
        key = self._given(keys)
        try:
            number = float(value.replace("_", "") if isinstance(value, str) else value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            self.fail(key, f"must be a number, not {value!r:.80}")
        if number < least:
            self.fail(key, f"must be at least {least:g}, not {number:g}")
        if number > most:
            self.fail(key, f"must be at most {most:g}, not {number:g}")
        return number

    def integer(self, *keys: str, default: int | None = None, least: int = 0) -> int:
        """A whole number >= `least`. Without a default, the key is required."""
        number = self.number(*keys, default=default, least=least)
        if number != int(number) or abs(number) >= 2**53:
            self.fail(self._given(keys), f"must be a whole number, not {number!r}")
        return int(number)

    def text(self, *keys: str, default: str | None = None) -> str:
        """A string. Without a default, the key is required."""
        value = self.value(*keys)
        if value is None:
            return str(self._required(keys, default, "a name"))
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.value(key)
        if value is None:
            return default
        word = str(value).lower()
        if word not in _TRUE + _FALSE:
            self.fail(key, f"must be true or false, not {value!r}")
        return word in _TRUE

    def choice(self, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """One of several words. YAML reads `off` as false, which counts as "off"."""
        value = self.value(key)
        if value is None:
            return str(self._required((key,), default, f"one of {', '.join(choices)}"))
        word = "off" if value is False else str(value).lower()
        if word not in choices:
            self.fail(key, f"must be one of {', '.join(choices)}, not {value!r}")
        return word

    def sections(self, key: str) -> "list[Section]":
        """The elements of a list of mappings, empty if it is missing."""
        self._known.add(key)
        node = self._nodes.get(key)
        if node is None or node.value is None:
            return []
        if not isinstance(node.value, list):
            self.fail(key, "must be a list")
        elements = [
            Section(self._source, f"{self.path(key)}[{number}]", each)
            for number, each in enumerate(node.value)
        ]
        self._sections.update({f"{key}[{number}]": each for number, each in enumerate(elements)})
        return elements

    def integers(self, key: str) -> list[int]:
        """The whole numbers of a list, all >= 0; empty if it is missing."""
        self._known.add(key)
        node = self._nodes.get(key)
        if node is None or node.value is None:
            return []
        values: list[Any] = [each.value for each in node.value] if isinstance(node.value, list) else [None]
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in values):
            self.fail(key, "must be a list of whole numbers")
        return values

    def is_section(self, key: str) -> bool:
        """Whether the key has keys below it."""
        return key in self._nodes and isinstance(self._nodes[key].value, dict)

    def unknown(self) -> "Iterator[tuple[str, int]]":
        """(path, line) of each value that was not asked for."""
        for key, node in self._nodes.items():
            if key not in self._known and key not in self._sections:
                yield from _leaves(self.path(key), node)
        for section in self._sections.values():
            yield from section.unknown()

    def _given(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if self.has(key)), keys[0])

    def _required(self, keys: tuple[str, ...], default: Any, wanted: str) -> Any:
        if default is None:
            also = f" (or {', '.join(keys[1:])})" if len(keys) > 1 else ""
            raise SpecError(
                self._source,
                self._line if self._nodes else None,
                self.path(keys[0]),
                f"is missing{also}; {self._misspelled(keys[0]) or f'write {wanted}'}",
            )
        return default

    def suggestion(self, path: str) -> str | None:
        """The key that was asked for and is most like a path that was not; None if none is."""
        return next(iter(difflib.get_close_matches(path, self._known_paths(), 1, _ALIKE)), None)

    def _known_paths(self) -> list[str]:
        inner = [each for section in self._sections.values() for each in section._known_paths()]
        return [self.path(key) for key in self._known] + inner

    def _misspelled(self, key: str) -> str | None:
        """What may be meant by a key, or its section, that is missing."""
        section, wanted = self, key
        if not self._nodes and self._parent is not None:
            section, wanted = self._parent, self._name.rpartition(".")[2]
        others = [each for each in section._nodes if each not in section._known | section._sections.keys()]
        for found in difflib.get_close_matches(wanted, others, 1, _ALIKE):
            line, present = section._nodes[found].line, section.path(found)
            return f"line {line} has {present}: did you mean {section.path(wanted)}?"
        return None


def _leaves(path: str, node: Node) -> Iterator[tuple[str, int]]:
    if isinstance(node.value, dict) and node.value:
        for key, each in node.value.items():
            yield from _leaves(f"{path}.{key}", each)
    else:
        yield path, node.line
