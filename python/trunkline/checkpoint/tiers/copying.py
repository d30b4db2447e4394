"""Copies one step to another directory of checkpoints, and verifies the copy before it becomes a checkpoint.

1. The tier's directory is locked, and that of the step made (CheckpointStore.begin).
2. Every shard is copied under a name that no manifest knows. What is read is compared with the checksums of
   its chunks.
3. Every copy is made durable, read back, and compared with the same checksums.
4. The manifest is committed, with the number of the commit that it has in the directory of the run; then
   older copies are removed.

A copy that is cut off leaves files that no manifest names. The next process that copies to the tier removes
them, and so does one that opens the tier.
"""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trunkline._core import CheckpointManifest, CheckpointSave, CheckpointStore, Engine
from trunkline._tensor_io.flag import Flag
from trunkline.checkpoint.lock_wait import retry_while_locked
from trunkline.checkpoint.tiers.shard_copier import Shard, ShardCopier, mode_of


def make_private(directory: str, original: str) -> None:
    """Let nobody list a new directory of copies who may not list that of the originals."""
    path = Path(directory)
    mode = stat.S_IMODE(path.stat().st_mode)
    private = mode & ~(0o777 & ~mode_of(original))  # setgid stays
    if private != mode:
        path.chmod(private)


class StepCopy:
    """One copy of one step, which run() makes once."""

    def __init__(
        self,
        manifest: CheckpointManifest,
        tier: CheckpointStore,
        *,
        run_directory: str,
        bytes_per_second: int | None,
        engine: Engine | None,
        stop: Flag,
        is_saving: Callable[[], bool],
    ) -> None:
        """`manifest`: of the step; `run_directory`: that has it. The others: as for ShardCopier."""
        self._manifest = manifest
        self._tier = tier
        self._run_directory = run_directory
        self._copier = ShardCopier(
            manifest,
            manifest.step,
            tier.directory,
            bytes_per_second=bytes_per_second,
            engine=engine,
            stop=stop,
            is_saving=is_saving,
        )
        self._total = 2 * sum(manifest.shard_bytes())

    def progress(self) -> tuple[int, int]:
        """Return the bytes written to the tier, or read back from it, and how many these will be."""
        return self._copier.done, self._total

    def run(self, before_commit: Callable[[], None], keep: int | None) -> list[OSError]:
        """Make the copy, and remove all but the last `keep` copies; return what could not be removed.

        before_commit: called once the tier's directory has its descriptor.

        Raises DamagedOriginalError, also if the step was removed meanwhile; Cancelled; the errors of the
        tier.
        """
        save = retry_while_locked(self._begin)
        try:
            before_commit()
            replaced = next((path for path in save.placement["replaced"] if os.path.exists(path)), "")  # noqa: PTH110
            self._copier.copy(self._shards(save), replaced)
            save.commit_copy(self._manifest)
        except BaseException:
            with suppress(OSError):
                save.abandon()
            raise
        return remove_old_copies(save, keep)

    def _begin(self) -> CheckpointSave:
        volumes = max(1, len(self._tier.volumes))
        shards = len(self._manifest.shard_bytes())
        is_new = not Path(self._tier.directory).exists()
        save: CheckpointSave = self._tier.begin(
            self._manifest.step, [len(range(volume, shards, volumes)) for volume in range(volumes)]
        )
        if is_new:
            make_private(self._tier.directory, self._run_directory)
        return save

    def _shards(self, save: CheckpointSave) -> list[Shard]:
        manifest = self._manifest
        copies = [each["path"] for each in save.placement["shards"]]
        return [
            Shard(index, path, copies[index], nbytes, manifest.shard_checksums(index))
            for index, (path, nbytes) in enumerate(
                zip(manifest.shard_paths(), manifest.shard_bytes(), strict=True)
            )
        ]


def remove_old_copies(save: CheckpointSave, keep: int | None) -> list[OSError]:
    """Remove all but the last `keep` copies, and end the save; return what could not be removed."""
    try:
        problems: list[OSError] = save.retain(keep)["problems"]
    except OSError as error:
        problems = [error]
    finally:
        save.release()
    return problems
