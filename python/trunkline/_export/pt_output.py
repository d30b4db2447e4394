"""Lays out .pt files of stored tensors, as torch.save would write them."""

from collections.abc import Sequence

import torch

from trunkline._errors import Error
from trunkline._export.lazy_state import LazyState
from trunkline._export.output import Output, Placed, Sum
from trunkline._formats.pt.layout import archive_of


def pt_output(state: LazyState, path: str) -> Output:
    """Lay out the file of a state, some of whose storages are placeholders, with the CRC-32 of each.

    Raises the errors of torch.save for objects that cannot be pickled.
    """
    archive, storages = archive_of(state.value, path)
    placed = [Placed(offset, len(data), data) for offset, data in archive.pieces()]
    sums: list[Sum] = []
    places: list[tuple[int, int]] = []
    for storage, (offset, nbytes, first, second) in zip(storages, archive.payloads(), strict=True):
        if nbytes == 0:
            continue
        stored = state.content_of(storage.data_ptr(), nbytes)
        if stored is not None and stored.end > stored.stored.nbytes:
            raise Error(
                None, f"cannot export {state.source}: a storage is larger than its tensor; report this"
            )
        content = stored or torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        placed.append(Placed(offset, nbytes, content))
        sums.append(Sum("crc32", offset, offset + nbytes))
        places.append((first, second))
    placed.sort(key=lambda each: each.offset)

    def fields(values: Sequence[int]) -> list[tuple[int, bytes]]:
        return [
            (place, value.to_bytes(4, "little"))
            for value, both in zip(values, places, strict=True)
            for place in both
        ]

    return Output(archive.nbytes, placed, sums, fields)
