"""Storage for torch.distributed.checkpoint: sharded, checksummed, crash-safe; it pickles nothing itself.

    import torch.distributed.checkpoint as dcp
    import trunkline as tl

    dcp.save(state_dict, storage_writer=tl.dcp.StorageWriter("checkpoints/step-1000"))
    dcp.load(state_dict, storage_reader=tl.dcp.StorageReader("checkpoints/step-1000"))

Use both only through torch.distributed.checkpoint. Checkpointer does so for the steps of a run. The format on
disk is described in docs/formats/dcp.md.
"""

from trunkline.dcp._checkpointer import Checkpointer
from trunkline.dcp._reader import StorageReader
from trunkline.dcp._torch_save import to_torch_save
from trunkline.dcp._writer import StorageWriter

__all__ = ["Checkpointer", "StorageReader", "StorageWriter", "to_torch_save"]
