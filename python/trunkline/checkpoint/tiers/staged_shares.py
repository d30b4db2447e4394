"""The shares of a save that nodes have copied to a tier, until all are there and it becomes a checkpoint.

    TIER/
      trunkline-shares/          only while something is copied
        SAVE/                    named by the id of the save; made by the node that will commit the copy
          share-3-ab12cd34-0.safetensors    a shard of the share of node 3, as that node or another has it
          share-3.json           the shards of that share: written once all are durable and verified

A share with such a record is not copied again: what was copied before a crash is used afterwards.
"""

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trunkline._errors import system_errors
from trunkline._paths import names_in
from trunkline._replacing import replacing

FOLDER = "trunkline-shares"
_FORMAT = "trunkline share"
_VERSION = 1


class StagedShare(NamedTuple):
    """A share that is complete in a tier.

    node: which node of the save had written the shards that were copied, as an index: its own share or a copy
    of it. files: the paths of the copies, in the order of the shards of the share on that node.
    """

    node: int
    files: list[str]


class StagedShares:
    """What nodes have copied of one save to one tier."""

    def __init__(self, tier: str, save: str) -> None:
        """`save`: the id of the save."""
        self._all = f"{tier}/{FOLDER}"
        self.directory = f"{self._all}/{save}"
        self._save = save

    def exists(self) -> bool:
        """Whether the node that will commit the copy has begun with it."""
        return os.path.isdir(self.directory)  # noqa: PTH112

    def make(self) -> None:
        """Begin the copy, in an existing tier. Shares of it that are there stay."""
        for each in (self._all, self.directory):
            with system_errors(f"create {each}", each):
                Path(each).mkdir(exist_ok=True)

    def find(self, owner: int) -> StagedShare | None:
        """Return the share of a node if it is complete, and all its files are there."""
        path = self._record(owner)
        try:
            with system_errors(f"read {path}", path):
                about = json.loads(Path(path).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        is_ours = (
            isinstance(about, dict) and about.get("format") == _FORMAT and about.get("version") == _VERSION
        )
        if not is_ours or about.get("save") != self._save:
            return None
        names, node = about.get("files"), about.get("node")
        if not isinstance(names, list) or type(node) is not int or node < 0:
            return None
        files = [f"{self.directory}/{os.path.basename(str(name))}" for name in names]  # noqa: PTH119
        return StagedShare(node, files) if all(map(os.path.exists, files)) else None

    def new_files(self, owner: int, count: int) -> list[str]:
        """Return paths for the shards of a share, which nobody has used or will."""
        token = secrets.token_hex(4)
        return [f"{self.directory}/share-{owner}-{token}-{number}.safetensors" for number in range(count)]

    def add(self, owner: int, node: int, files: Sequence[str]) -> None:
        """Put a share on record, durably; its files are durable."""
        about = {
            "format": _FORMAT,
            "version": _VERSION,
            "save": self._save,
            "node": node,
            "files": [os.path.basename(each) for each in files],  # noqa: PTH119
        }
        with replacing(self._record(owner)) as file:
            file.write((json.dumps(about, indent=1) + "\n").encode())

    def take(self, shares: Sequence[StagedShare]) -> list[StagedShare]:
        """Give the folder another name, so that no node looks for it any more; return where its files are."""
        taken = f"{self.directory}-{secrets.token_hex(4)}"
        with system_errors(f"rename {self.directory}", self.directory):
            os.rename(self.directory, taken)  # noqa: PTH104
        self.directory = taken
        return [
            each._replace(files=[f"{taken}/{os.path.basename(file)}" for file in each.files])  # noqa: PTH119
            for each in shares
        ]

    def remove(self) -> None:
        """Remove what was copied of this save."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with suppress(OSError):
            os.rmdir(self._all)  # noqa: PTH106

    def remove_others(self) -> None:
        """Remove what was copied of saves that are not copied any more."""
        with suppress(FileNotFoundError):
            for name in names_in(self._all):
                if name != self._save:
                    shutil.rmtree(f"{self._all}/{name}", ignore_errors=True)

    def _record(self, owner: int) -> str:
        return f"{self.directory}/share-{owner}.json"
