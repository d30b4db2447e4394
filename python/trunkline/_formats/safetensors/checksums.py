"""The checksums in the metadata of a safetensors file: docs/formats/safetensors-checksums.md."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trunkline._core import crc32c
from trunkline._errors import Corrupt

KEY = "trunkline.crc32c"
CHUNK_BYTES = 1 << 20
# The reference implementation pads headers to a multiple of 8, so its headers end in fewer spaces.
MIN_PADDING = 8

_MARKER = f'"{KEY}":"'.encode()
_DIGITS = 8
_FIXED = re.compile(r"(?P<fields>(?P<chunk>[0-9]{13}) (?P<head>[0-9]{9}) )(?P<check>[0-9a-f]{8}) ")
_FIXED_CHARACTERS = 13 + 1 + 9 + 1 + 8 + 1
_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True)
class Sums:
    """The expected checksums of a file's data: a CRC-32C for each `chunk_bytes`."""

    chunk_bytes: int
    values: list[int]


def chunk_count(data_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return how many chunks the data section has."""
    return -(-data_bytes // chunk_bytes)


def placeholder(data_bytes: int) -> str:
    """Return a text of the same length as the entry of a file with `data_bytes`."""
    return "0" * (_FIXED_CHARACTERS + _DIGITS * (1 + chunk_count(data_bytes)))


def fill_in(head: bytearray) -> int:
    """Replace the placeholder by the entry's text, in which the data's checksums are still zeros.

    `head` is the file up to its data, padded. Returns the offset of the first of the data's checksums.
    """
    begin = head.index(_MARKER) + len(_MARKER)
    fields = f"{CHUNK_BYTES:013d} {len(head):09d} "
    fixed = f"{fields}{crc32c(fields.encode()):08x} ".encode()
    head[begin : begin + len(fixed)] = fixed
    sums_begin = begin + len(fixed)
    head[sums_begin : sums_begin + _DIGITS] = b"%08x" % crc32c(head)
    return sums_begin + _DIGITS


def find(metadata: Mapping[str, str], head: bytes, data_bytes: int, path: str) -> Sums | None:
    """Return the checksums that were written with this file; None if there are none.

    A file that another program made from one of ours, keeping the metadata, has none. Raises Corrupt if the
    header or the entry itself was changed in place.
    """
    text = metadata.get(KEY)
    if text is None:
        if any(_belongs(value, head) for value in metadata.values()):
            raise _damaged(path, "the name of its checksums was changed")
        return None
    fixed = _parse(text)
    if fixed is None or not _HEX.fullmatch(text, _FIXED_CHARACTERS) or int(fixed["chunk"]) == 0:
        raise _damaged(path, f'"{KEY}" in its metadata is damaged')
    if not _belongs(text, head):
        return None
    chunk_bytes = int(fixed["chunk"])
    digits = text[_FIXED_CHARACTERS:]
    if len(digits) != _DIGITS * (1 + chunk_count(data_bytes, chunk_bytes)):
        raise _damaged(path, f'"{KEY}" in its metadata is damaged')
    blank = head.replace(
        _MARKER + text.encode(), _MARKER + text[:_FIXED_CHARACTERS].encode() + b"0" * len(digits)
    )
    if crc32c(blank) != int(digits[:_DIGITS], 16):
        raise _damaged(path, "its header does not match its checksum")
    values = [int(digits[at : at + _DIGITS], 16) for at in range(_DIGITS, len(digits), _DIGITS)]
    return Sums(chunk_bytes, values)


def _parse(text: str) -> re.Match[str] | None:
    fixed = _FIXED.match(text)
    if fixed is None or crc32c(fixed["fields"].encode()) != int(fixed["check"], 16):
        return None
    return fixed


def _belongs(text: str, head: bytes) -> bool:
    """Whether the entry was made for a header of that size; headers of other programs have less padding."""
    fixed = _parse(text)
    return fixed is not None and int(fixed["head"]) == len(head) and head.endswith(b" " * MIN_PADDING)


def _damaged(path: str, why: str) -> Corrupt:
    return Corrupt(
        None,
        f"{path} is corrupt: {why}; restore it from a copy, or load the remaining data with verify=False",
        path,
    )
