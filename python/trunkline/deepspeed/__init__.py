"""DeepSpeed's interface for asynchronous I/O (its ops async_io, gds and pin_memory) on Trunkline's engine.

    import trunkline.deepspeed
    trunkline.deepspeed.install()       # or TRUNKLINE_DEEPSPEED=1 in the environment

makes DeepSpeed use it: ZeRO-Infinity, ZeRO-Inference, FastFileWriter, ds_io. Nothing is compiled. The names
are DeepSpeed's, so that the module can stand in for the compiled one.
"""

from trunkline.deepspeed._functions import aio_read, aio_write, deepspeed_memcpy
from trunkline.deepspeed._handle import aio_handle, gds_handle
from trunkline.deepspeed._install import install, uninstall
from trunkline.deepspeed._pinned import pin_handle

__all__ = [
    "aio_handle",
    "aio_read",
    "aio_write",
    "deepspeed_memcpy",
    "gds_handle",
    "install",
    "pin_handle",
    "uninstall",
]
