"""`trunkline checkpoint ls`, `show` and `verify` for the directory of a node (Checkpointer with local=True).

A node has its share of each step, and copies of those of others; what other nodes have, it only knows by
what was agreed when the step was saved.
"""

import errno
from typing import Any

from trunkline._cli_errors import described
from trunkline._core import CheckpointManifest, CheckpointStore
from trunkline._errors import Corrupt, Error, Format, exception_of
from trunkline._paths import file_size
from trunkline._progress import progress_to
from trunkline.checkpoint.nodes.agreement import Entry
from trunkline.checkpoint.nodes.copies import keepers_of
from trunkline.checkpoint.nodes.node_directory import NodeDirectory, share_of
from trunkline.checkpoint.tiers.listing import committed_in, id_of
from trunkline.checkpoint.tiers.tier import missing_tier


class NodeShares:
    """What one node has."""

    def __init__(self, directory: str) -> None:
        """Read it. Raises Corrupt, Error."""
        self._node = NodeDirectory(directory)
        inventory = self._node.inventory()
        self._committed = inventory.committed
        self._in_place_of = dict(inventory.in_place_of)
        self._saves = [each for each in inventory.prepared if each.base is None]

    def listed(self) -> dict[str, Any]:
        """Return the document of `ls`."""
        found = [self._listed(each) for each in self._saves]
        for number, error in sorted(self._node.damaged.items()):
            found.append({"step": None, "entry": number, "error": described(error)})
        lost = self._node.lost_save()
        tiers = [_steps_in(directory, seen=bool(id_)) for directory, id_ in self._store.tiers()]
        return {
            "node": self._node.id,
            "lost": None if lost is None else lost.step,
            "checkpoints": sorted(found, key=lambda each: int(each["entry"])),
            **({"tiers": tiers} if tiers else {}),
        }

    def shown(self, step: int | None) -> dict[str, Any]:
        """Return the document of `show`."""
        last = max((each.number for each in self._saves), default=0)
        damaged = max(self._node.damaged, default=0)
        if step is None and damaged > last:
            raise self._node.damaged[damaged]
        entry = self._find(step)
        manifest = self._store.open_manifest(entry.number)
        whole = share_of(self._store, entry.number)["whole"]
        return {
            **self._about(entry),
            **_described(manifest, whole),
            "shares": [
                {"node": owner, "kept_by": [entry.nodes[node] for node in keepers]}
                for owner, keepers in zip(entry.nodes, keepers_of(entry), strict=True)
            ],
            "shards": [
                {"path": path, "bytes": nbytes}
                for path, nbytes in zip(manifest.shard_paths(), manifest.shard_bytes(), strict=True)
            ],
            "tensors": [
                {"name": name, "dtype": dtype, "shape": shape, "bytes": nbytes}
                for name, dtype, shape, nbytes in whole["tensors"]
            ],
        }

    def verified(self, step: int | None, every: bool) -> list[dict[str, Any]]:
        """Return the results of `verify`: of a step (None: the last that the node has), or of every one."""
        lost = self._node.lost_save()
        is_lost = lost is not None and (every or step in (None, lost.step))
        found = [each for each in self._saves if every or step in (None, each.step)]
        if not found and not every and not is_lost:
            self._find(step)  # says what there is
        results = [self._verified(each) for each in (found if every else found[-1:])]
        if every or step is None:
            for number, error in sorted(self._node.damaged.items()):
                results.append({"step": None, "entry": number, "ok": False, "error": described(error)})
        if lost is not None and is_lost:
            gone = described(self._node.lost_error(lost))
            results.append({"step": lost.step, "entry": lost.number, "ok": False, "error": gone})
        return results

    def _verified(self, entry: Entry) -> dict[str, Any]:
        with progress_to(f"verifying step {entry.step}") as show:
            found = self._store.verify(entry.number, progress=show)
        about = {"step": entry.step, "entry": entry.number, "ok": not found["mismatches"]}
        return {**about, "bytes": found["bytes"], "mismatches": found["mismatches"]}

    @property
    def _store(self) -> CheckpointStore:
        return self._node.store

    def _find(self, step: int | None) -> Entry:
        found = [each for each in self._saves if step in (None, each.step)]
        if not found:
            what = "no share of any step" if step is None else f"no share of step {step}"
            steps = ", ".join(str(each.step) for each in self._saves)
            raise exception_of(
                "system",
                errno.ENOENT,
                f"{self._node.directory} has {what}{f'; it has those of {steps}' if steps else ''}",
                self._node.directory,
            )
        return found[-1]

    def _listed(self, entry: Entry) -> dict[str, Any]:
        about = self._about(entry)
        try:
            manifest = self._store.open_manifest(entry.number)
            whole = share_of(self._store, entry.number)["whole"]
        except (Corrupt, Format) as error:  # since it was read
            return {**about, "error": described(error)}
        return {**about, **_described(manifest, whole)}

    def _about(self, entry: Entry) -> dict[str, Any]:
        return {
            "step": entry.step,
            "entry": entry.number,
            "nodes": list(entry.nodes),
            "copies": len(keepers_of(entry)[0]),
            "is_committed": entry.id in self._committed,
            "in_place_of": self._in_place_of.get(entry.id),
            "metrics": dict(entry.metrics),
        }


def _steps_in(tier: str, *, seen: bool) -> dict[str, Any]:
    """Return the steps in a tier. seen: by this node, so that it must be there."""
    try:
        if seen and not id_of(tier):
            raise missing_tier(tier)
        return {"directory": tier, "steps": sorted(each.step for each in committed_in(tier))}
    except Error as error:
        return {"directory": tier, "error": described(error)}


def _described(manifest: CheckpointManifest, whole: dict[str, Any]) -> dict[str, Any]:
    sizes = manifest.shard_bytes()
    return {
        "time": manifest.time,
        "world_size": manifest.world_size,
        "bytes": sum(nbytes for *_, nbytes in whole["tensors"]),
        "bytes_here": sum(sizes),
        "is_complete": list(map(file_size, manifest.shard_paths())) == sizes,
    }
