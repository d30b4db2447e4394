"""Names in the directory of a node, of a Checkpointer with local=True."""

import os

RECORD = "trunkline-node.json"
SAVES = "saves"


def is_node_directory(path: str) -> bool:
    """Whether a directory is that of a node."""
    return os.path.exists(os.path.join(path, RECORD))  # noqa: PTH110, PTH118 - it may be any argument
