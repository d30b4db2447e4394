"""Mutates inputs of the parsers in Python by what they consist of: JSON values, fields of archives, opcodes.

An input is split once, when it is added; a mutation then only joins its pieces. Half of the mutations change
one place, so that most of an input stays valid.
"""

import pickletools
import random
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

INTERESTING = (
    *(0, 1, 2, 3, 4, 8, 64, 255, 256, 4095, 4096),
    *(0xFFFF, 0xFFFFFFFF, 1 << 32, 1 << 63, (1 << 64) - 1),
)
_INTEGERS_OF = {
    width: [(value % (1 << 8 * width)).to_bytes(width, "little") for value in INTERESTING]
    for width in (1, 2, 4, 8)
}
_INTEGERS = [value for values in _INTEGERS_OF.values() for value in values]
_BYTES = [bytes([value]) for value in range(256)]
_MAX_TOKENS = 4096  # of one kind


class Split(NamedTuple):
    """What an input consists of."""

    spans: list[tuple[int, int, str]]  # begin, end and kind: can be replaced by any token of the kind
    items: list[tuple[int, int]]  # can be removed, or repeated


Splitter = Callable[[bytes], Split]

JSON_TOKENS = [
    *(str(value).encode() for value in (*INTERESTING, -1, 1 << 80, 1.5, -0.0, "1e999", "NaN", "-Infinity")),
    *(b'""', b'"x"', b'"../x"', b'"\\u0000"', b'"\\ud800"', b'"/"', b'"."'),
    *(b"null", b"true", b"false", b"[]", b"{}", b"[[]]", b"[0]", b'{"a":1,"a":2}', b"[" * 60 + b"]" * 60),
]
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+', re.DOTALL)


def split_json(data: bytes) -> Split:
    """Spans are values and keys; items are elements and members, with the comma after them."""
    spans: list[tuple[int, int, str]] = []
    items: list[tuple[int, int]] = []
    open_containers: list[tuple[int, int]] = []  # where each begins, and its current item
    item = 0
    for match in _JSON_TOKEN.finditer(data):
        token = match[0]
        if token in b"[{":
            open_containers.append((match.start(), item))
            item = match.end()
        elif token in b"]}":
            if not open_containers:
                continue
            if item < match.start():
                items.append((item, match.start()))
            begin, item = open_containers.pop()
            spans.append((begin, match.end(), "value"))
        elif token == b",":
            items.append((item, match.end()))
            item = match.end()
        elif token != b":":
            spans.append((*match.span(), "value"))
    return Split(spans, items)


# Of each record of a zip archive: its signature, and the widths of the fields after it.
_ZIP_RECORDS = {
    b"PK\3\4": (2, 2, 2, 2, 2, 4, 4, 4, 2, 2),
    b"PK\1\2": (2, 2, 2, 2, 2, 2, 4, 4, 4, 2, 2, 2, 2, 2, 4, 4),
    b"PK\5\6": (2, 2, 2, 2, 4, 4, 2),
    b"PK\6\6": (8, 2, 2, 4, 4, 8, 8, 8, 8),
    b"PK\6\7": (4, 8, 4),
    b"PK\7\10": (4, 4, 4),
}
_ZIP_SIGNATURE = re.compile(b"|".join(map(re.escape, _ZIP_RECORDS)))


def split_zip(data: bytes) -> Split:
    """Spans are the fields of the records, by their widths, and the names; items are whole records."""
    spans: list[tuple[int, int, str]] = []
    starts = [match.start() for match in _ZIP_SIGNATURE.finditer(data)]
    for start in starts:
        spans.append((start, start + 4, "signature"))
        at = start + 4
        for width in _ZIP_RECORDS[data[start:at]]:
            if at + width <= len(data):
                spans.append((at, at + width, str(width)))
            at += width
        if data[start : start + 4] in (b"PK\3\4", b"PK\1\2") and at <= len(data):
            (name_bytes,) = struct.unpack_from("<H", data, start + (26 if data[start + 2] == 3 else 28))
            if at + name_bytes <= len(data):
                spans.append((at, at + name_bytes, f"name of {name_bytes}"))
    return Split(spans, _parts(starts, len(data)))


def zip_tokens() -> dict[str, list[bytes]]:
    """Return values for the fields of a zip archive."""
    tokens = {str(width): values for width, values in _INTEGERS_OF.items()}
    return tokens | {"signature": list(_ZIP_RECORDS)}


def split_pickle(data: bytes) -> Split:
    """Spans and items are the opcodes with their arguments."""
    starts: list[int] = []
    with suppress(Exception):  # pickletools raises anything for a damaged pickle
        starts.extend(at for _, _, at in pickletools.genops(data) if at is not None)
    items = _parts(starts, len(data))
    return Split([(begin, end, "opcode") for begin, end in items], items)


def _parts(starts: list[int], end: int) -> list[tuple[int, int]]:
    """Return from where to where each part is; the last one ends at `end`."""
    return list(zip(starts, [*starts, end][1:], strict=True))


class Mutator:
    """Makes mutations of a growing set of inputs."""

    def __init__(
        self, split: Splitter, tokens: dict[str, list[bytes]], rng: random.Random, max_bytes: int = 4096
    ) -> None:
        """`tokens`: by kind, what spans can be replaced by, besides the spans of all inputs."""
        self.split = split
        self._tokens = {kind: list(values) for kind, values in tokens.items()}
        self._known = {kind: set(values) for kind, values in tokens.items()}
        self._random = rng.random
        self._max_bytes = max_bytes
        self._inputs: list[tuple[bytes, Split]] = []

    def add(self, data: bytes) -> None:
        """Add an input to mutate."""
        split = self.split(data)
        self._inputs.append((data, split))
        for begin, end, kind in split.spans:
            known = self._known.setdefault(kind, set())
            token = data[begin:end]
            if token not in known and len(known) < _MAX_TOKENS:
                known.add(token)
                self._tokens.setdefault(kind, []).append(token)

    def mutation(self) -> bytes:
        """Return a mutation of one of the inputs."""
        draw = self._random
        data, split = self._inputs[int(draw() * len(self._inputs))]
        if draw() < 0.5:
            begin, end, piece = self._edit(data, split)
            return (data[:begin] + piece + data[end:])[: self._max_bytes]
        edits = sorted(self._edit(data, split) for _ in range(2 + int(draw() * 3)))
        pieces = []
        at = 0
        for begin, end, piece in edits:
            if begin >= at:
                pieces += (data[at:begin], piece)
                at = end
        pieces.append(data[at:])
        return b"".join(pieces)[: self._max_bytes]

    def _edit(self, data: bytes, split: Split) -> tuple[int, int, bytes]:
        """Return what to replace, and by what."""
        draw = self._random
        spans, items = split
        if spans and draw() < 0.6:
            begin, end, kind = spans[int(draw() * len(spans))]
            tokens = self._tokens[kind]
            return begin, end, tokens[int(draw() * len(tokens))]
        if items and draw() < 0.4:
            begin, end = items[int(draw() * len(items))]
            if draw() < 0.5:
                return begin, end, b""
            to = items[int(draw() * len(items))][0]
            return to, to, data[begin:end]
        return self._edit_of_bytes(data)

    def _edit_of_bytes(self, data: bytes) -> tuple[int, int, bytes]:
        draw = self._random
        at = int(draw() * (len(data) + 1))
        kind = int(draw() * 5)
        if kind == 0 and at < len(data):
            return at, at + 1, _BYTES[data[at] ^ 1 << int(draw() * 8)]
        if kind == 1:
            value = _INTEGERS[int(draw() * len(_INTEGERS))]
            return at, min(at + len(value), len(data)), value
        if kind == 2:
            return at, min(at + 1 + int(draw() * 16), len(data)), b""
        if kind == 3:
            begin = int(draw() * (len(data) + 1))
            return at, at, data[begin : begin + 1 + int(draw() * 64)]
        return at, len(data), b""
