"""Emulated training jobs, checkpoints and inference: how fast storage must be for accelerators not to wait.

    trunkline workload list
    trunkline workload generate unet3d_h100 --directories /mnt/a /mnt/b --scale 100GB
    trunkline workload run unet3d_h100 --directories /mnt/a /mnt/b
    trunkline workload run llama3-8b --directories /mnt/a /mnt/b --scale 10GB

The same in Python: `load` reads the workload files of DLIO and MLPerf Storage, which requires PyYAML;
`generate` and `run` do what the commands do. `totals_of` says what follows from a workload: bytes, steps, and
the bandwidth that is needed.
"""

from trunkline.workload._builtin import builtin_names, load
from trunkline.workload._compare import compare
from trunkline.workload._generate import generate
from trunkline.workload._plan import CheckpointBudget, plan
from trunkline.workload._report import write_report
from trunkline.workload._run import run
from trunkline.workload._spec import Workload
from trunkline.workload._storage import Disk, Server
from trunkline.workload._totals import Totals, scaled, totals_of

__all__ = [
    "CheckpointBudget",
    "Disk",
    "Server",
    "Totals",
    "Workload",
    "builtin_names",
    "compare",
    "generate",
    "load",
    "plan",
    "run",
    "scaled",
    "totals_of",
    "write_report",
]

for _public in (
    CheckpointBudget,
    Disk,
    Server,
    Totals,
    Workload,
    builtin_names,
    compare,
    generate,
    load,
    plan,
    run,
    scaled,
    totals_of,
    write_report,
):
    _public.__module__ = "trunkline.workload"
