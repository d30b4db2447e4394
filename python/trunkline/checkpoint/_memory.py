"""Memory that is loaded into."""

import torch

from trunkline import _core

# From here on a tensor has pages of its own, into which direct I/O reads without a copy, and which are freed
# with it; the small ones are torch's.
OWN_PAGES_BYTES = 1 << 20


def empty_bytes(nbytes: int) -> torch.Tensor:
    """Make a tensor of `nbytes` uint8 that nobody has touched yet."""
    if is_fresh(nbytes):
        return torch.frombuffer(_core.aligned_empty(nbytes), dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8)


def is_fresh(nbytes: int) -> bool:
    """Whether empty_bytes(nbytes) is `fresh` to FileImage.add_target."""
    return nbytes >= OWN_PAGES_BYTES
