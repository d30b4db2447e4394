"""Names in the directory of a node, of a Checkpointer with local=True."""

import os

RECORD = "trunkline-node.json"
LOCK = "trunkline-node.lock"
SAVES = "saves"

ALL_NODES = "--all-nodes"  # the option for a command that one process on each node runs together


def is_node_directory(path: str) -> bool:
    """Whether a directory is that of a node, also if it has lost its record."""
    names = (RECORD, LOCK)
    return any(os.path.exists(os.path.join(path, name)) for name in names)  # noqa: PTH110, PTH118 - any argument
