"""What the native readers need of an index. Not for users."""

from typing import TYPE_CHECKING

from trunkline._core import SampleTable

if TYPE_CHECKING:
    from trunkline.data._index import Index


def table_of(index: "Index") -> SampleTable:
    """Return the table of an index as the native readers take it; its arrays are not copied."""
    return SampleTable(
        path_blob=index._path_blob,
        path_ends=index._path_ends,
        first_samples=index._first_samples,
        sizes=index._sizes,
        mtimes_ns=index._mtimes_ns,
        inodes=index._inodes,
        offsets=index._offsets,
        lengths=index._lengths,
        ranges_per_sample=index._ranges_per_sample,
        record_bytes=index._record_bytes if index._offsets is None else 0,
        stride_bytes=index._stride_bytes if index._offsets is None else 0,
        first_offsets=index._first_offsets,
    )


def has_tfrecord_framing(index: "Index") -> bool:
    """Whether samples are stored with the lengths and checksums of TFRecord, which readers verify."""
    return index._framing == "tfrecord"
