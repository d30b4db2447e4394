"""`.pt` files of torch: laid out for writing at the speed of the device, and loaded likewise."""

from trunkline.checkpoint._pt_layout import lay_out
from trunkline.checkpoint._pt_load import load

__all__ = ["lay_out", "load"]
