"""Processes that were started without standard streams: nothing that is printed ends up in a file."""

import json
import subprocess
import sys
from pathlib import Path

# Saves with descriptors 0 to 2 closed, and reports what has their numbers while the files are being written.
PROGRAM = """
import json, os, sys
import torch
import trunkline as tl

folder = sys.argv[1]
report = os.open(folder + "/report", os.O_WRONLY | os.O_CREAT, 0o600)
for stream in range(3):
    os.close(stream)
faults = tl.Faults()
with tl.Engine("threads", faults=faults) as engine:
    tensors = {"a": torch.arange(100_000)}
    faults.hold("write", 0, 2**62)
    checkpoints = tl.Checkpointer(folder + "/run", engine=engine, process_group=False)
    paths = [f"{folder}/file.{kind}" for kind in ("pt", "safetensors")]
    handles = [tl.save_async(tensors, path, engine=engine) for path in paths]
    handles.append(checkpoints.save(1, tensors))
    for handle in handles:
        handle.wait_staged()
    opened = {}
    for stream in range(3):
        try:
            opened[stream] = os.readlink(f"/proc/self/fd/{stream}")
        except OSError:
            pass
    faults.release()
    for handle in handles:
        handle.wait()
    checkpoints.wait()
    whole = [tl.load(path)["a"].equal(tensors["a"]) for path in paths]
    whole.append(checkpoints.load(1)["a"].equal(tensors["a"]))
os.write(report, json.dumps([opened, whole]).encode())
"""


def test_files_do_not_get_the_numbers_of_standard_streams(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], check=True, timeout=200)
    opened, whole = json.loads((tmp_path / "report").read_text())
    assert whole == [True] * 3
    assert not [target for target in opened.values() if target.startswith(str(tmp_path))]
