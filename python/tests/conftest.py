"""Engines on every backend, and scripts in processes of their own."""

import functools
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl
from trunkline._core import CheckpointSave, CheckpointStore

# A developer's own tunings change no test, nor the processes that tests start.
os.environ["TRUNKLINE_TUNING"] = "off"
os.environ.pop("TRUNKLINE_ROUTING_TRACE", None)

# In the background of a shell script, Ctrl-C is ignored; the processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))  # modules that tests share, also with processes they start
# Of torch and NumPy, also in processes that tests start. Their threads divide small tensors at many times the
# cost of computing alone, all the more beside the tests of another process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_IMPORTS_TORCH = re.compile(r"^\s*(import|from) (.*, )?torch\b", re.MULTILINE)

BACKENDS = ["io_uring", "libaio", "threads", "memory"]

# Runs a script in a separate process, with arguments; returns what it printed. Fails unless it exits with 0.
RunScript = Callable[..., str]


def make_engine(backend: str, **options: object) -> tl.Engine:
    """An engine on `backend`; skips the test where this machine refuses it."""
    try:
        return tl.Engine(backend, **options)  # type: ignore[arg-type]
    except tl.Unsupported as error:
        pytest.skip(f"{backend} is refused here: {error}")


@pytest.fixture(autouse=True, scope="session")
def _cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Packs of tests go into a directory of their own, also those of processes that tests start."""
    os.environ["TRUNKLINE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _no_unfinished_copies() -> Iterator[None]:
    """What a test leaves behind of copies to tiers must not decide the exit status of pytest."""
    yield
    drain = sys.modules.get("trunkline.checkpoint.tiers.drain")
    if drain is not None:
        drain._unfinished.clear()


@pytest.fixture
def faults() -> tl.Faults:
    """What a test lets go wrong, or holds, in an engine that it makes."""
    return tl.Faults()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend's name; skips those that this machine refuses."""
    name = str(request.param)
    make_engine(name).close()
    return name


@pytest.fixture
def new_engine(backend: str) -> Callable[..., tl.Engine]:
    """Make engines on each backend, with options as those of Engine."""
    return functools.partial(make_engine, backend)


@pytest.fixture
def engine(backend: str) -> Iterator[tl.Engine]:
    """A small engine on each backend: small blocks, so that short tests make many transfers."""
    with make_engine(backend, block_bytes="64KiB", queue_depth=4) as made:
        yield made


@pytest.fixture
def run_script(tmp_path: Path) -> RunScript:
    """Run Python code in a separate process, in a temporary directory.

    If it imports torch, that is imported already; with `fresh` it begins as a new interpreter all the same.
    """
    import support_warm  # found only since the path is set above

    def run(code: str, *arguments: str, expect: int = 0, fresh: bool = False) -> str:
        command = ["-c", textwrap.dedent(code), *arguments]
        if _IMPORTS_TORCH.search(code) and not fresh:
            result = support_warm.run(command, cwd=tmp_path)
        else:
            result = subprocess.run(
                [sys.executable, "-X", "faulthandler", *command],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        assert result.returncode == expect, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        assert result.stderr == "" or expect != 0, result.stderr
        return result.stdout

    return run


def crc32c(data: bytes) -> int:
    """CRC-32C by its definition, bit by bit in a table."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    value = 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


class CheckpointWriter:
    """Writes checkpoints into a store with plain Python: chunks of 4 KiB, one tensor a shard."""

    chunk_bytes = 4096

    def write(
        self, store: CheckpointStore, step: int, shards: int = 2, nbytes: int = 10_000
    ) -> tuple[CheckpointSave, dict[str, Any]]:
        """Begin a save and write its shards; the save, and the manifest to commit."""
        save = store.begin(step, [shards] * max(1, len(store.volumes)))
        placement = save.placement
        manifest: dict[str, Any] = {
            "step": step,
            "chunk_bytes": self.chunk_bytes,
            "world_size": 1,
            "volumes": placement["volumes"],
            "shards": [],
            "tensors": [],
            "state": {"step": step, "big": 2**70, "order": {"z": 1, "a": 2}},
        }
        for index, shard in enumerate(placement["shards"]):
            name = f"layer.{index}.weight"
            header = json.dumps({name: {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
            head = struct.pack("<Q", len(header)) + header.encode()
            contents = head + random.Random(1000 * step + index).randbytes(nbytes)
            Path(shard["path"]).write_bytes(contents)
            chunks = [
                contents[at : at + self.chunk_bytes] for at in range(0, len(contents), self.chunk_bytes)
            ]
            manifest["shards"].append(
                {
                    "volume": shard["volume"],
                    "file": shard["file"],
                    "bytes": len(contents),
                    "crc32c": "".join(f"{crc32c(chunk):08x}" for chunk in chunks),
                }
            )
            manifest["tensors"].append(
                {"name": name, "dtype": "U8", "shape": [nbytes], "pieces": [[index, len(head), nbytes]]}
            )
        return save, manifest

    def save(self, store: CheckpointStore, step: int, keep: int | None = None) -> int:
        """A whole save; the number of its commit."""
        save, manifest = self.write(store, step)
        commit = save.commit(manifest)
        assert save.retain(keep)["problems"] == []
        save.release()
        return commit


@pytest.fixture
def checkpoint_writer() -> CheckpointWriter:
    return CheckpointWriter()
