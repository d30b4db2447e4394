"""What DeepSpeed needs from its launcher, for a job of one process on the CPU."""

import json
import os
import socket
from pathlib import Path
from typing import Any


def begin() -> None:
    """Set the variables of the launcher, and make the process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.update(LOCAL_SIZE="1", CROSS_RANK="0", CROSS_SIZE="1")  # FastPersist asks for these
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")


def files_below(folder: str) -> list[str]:
    """The paths of all files below it."""
    return [str(each) for each in Path(folder).rglob("*") if each.is_file()]


def report(**results: Any) -> None:
    """Print what the test looks for."""
    print("RESULT " + json.dumps(results), flush=True)
