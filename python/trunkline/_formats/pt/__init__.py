"""`.pt` files of torch: laid out for writing at the speed of the device, and loaded likewise."""

from trunkline._formats.pt.layout import lay_out, write_to
from trunkline._formats.pt.loader import load

__all__ = ["lay_out", "load", "write_to"]
