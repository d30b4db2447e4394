"""Reads the steps of one directory of checkpoints, and finds out why one cannot be read."""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trunkline._core import CheckpointManifest, CheckpointStore, Engine
from trunkline._errors import Corrupt, Error, Format, exception_of, reword
from trunkline._formats.checkpoint_names import step_name
from trunkline._torch_or_numpy import torch
from trunkline.checkpoint.directory import shards
from trunkline.checkpoint.directory.part import Wanted
from trunkline.checkpoint.directory.step_load import load_state
from trunkline.checkpoint.directory.step_source import StepSource


class StepReader:
    """Reads the steps of a directory; errors about a damaged one name the others."""

    def __init__(
        self,
        store: Callable[[], CheckpointStore],
        directory: str,
        engine: Engine | None,
        copies_of: Callable[[int], Sequence[str]] = lambda step: (),
    ) -> None:
        """`store`: returns that of `directory`, an absolute path. copies_of: returns where else a step is."""
        self._store = store
        self.directory = directory
        self._engine = engine
        self._copies_of = copies_of

    @property
    def store(self) -> CheckpointStore:
        """The store of the directory."""
        return self._store()

    def open_manifest(self, step: int) -> CheckpointManifest:
        """Read the manifest of a step."""
        with self._naming_other_steps(step):
            return self.store.open_manifest(step)

    def load(self, step: int, manifest: CheckpointManifest, into: Any, wanted: Wanted) -> Any:
        """Return the state of a step, whose manifest was read.

        Raises FileNotFoundError, NotADirectoryError for a missing file: see check_replaced().
        """
        where = f"{self.directory}, step {step}"

        def verify_first() -> None:
            self.verify(step)
            if not are_same(self.open_manifest(step), manifest):
                # The step that was verified is not the one to read.
                gone = manifest.shard_paths()[:1] or [where]
                raise exception_of("system", errno.ENOENT, f"{where} was replaced meanwhile", gone[0])

        with self._naming_other_steps(step):
            return load_state(manifest, where, into, wanted, self._engine, verify_first)

    def open_tensors(self, step: int, device: torch.device, verify: bool) -> StepSource:
        """Open a step to read single tensors of it."""
        return StepSource(
            f"{self.directory}/{step_name(step)}",
            self.open_manifest(step),
            device=device,
            engine=self._engine,
            verify=verify,
        )

    def check_replaced(
        self, step: int, manifest: CheckpointManifest | None, path: str, why: str, any_step: bool
    ) -> None:
        """After a file of `step` was not found: return if another process changed the step, to read again.

        any_step: the last step is read, which may be another one by now.

        Raises Corrupt if the step has not changed. FileNotFoundError tells callers that there is nothing to
        continue from, so it is raised only if the whole step is gone, and no other one will do.
        """
        try:
            now = self.open_manifest(step)
        except FileNotFoundError:
            if not any_step:
                raise
            return  # another process removed it, since there is a later one
        if manifest is not None and are_same(now, manifest):
            raise self._lacks_shard(step, manifest, path, why)

    def verify(self, asked: int | None) -> None:
        """Compare every byte of a step (None: the last) with its checksum."""
        while True:
            chosen = self.store.latest() if asked is None else asked
            if chosen is None:
                raise self.nothing_yet()
            manifest = None
            missing: dict[str, Any] | None = None
            try:
                manifest = self.open_manifest(chosen)
                found = self.store.verify(chosen, engine=self._engine)["mismatches"]
                missing = next((each for each in found if each["kind"] == "missing"), None)
            except FileNotFoundError as gone:
                missing = {"path": gone.filename, "message": str(gone)}
            if missing is None:
                break
            self.check_replaced(chosen, manifest, missing["path"], missing["message"], asked is None)
        if found:
            with self._naming_other_steps(chosen):
                raise _damage(found)

    def nothing_yet(self) -> Exception:
        """Make the error for a directory without checkpoints."""
        why = f"{self.directory} has no checkpoint yet"
        if not Path(self.directory).exists():
            why += ": the directory does not exist (is the path mistyped?)"
        elif aside := sorted(Path(self.directory).glob("aside-*")):
            why += f": an earlier run was set aside in {aside[-1]}; open that directory to load it"
        return exception_of("system", errno.ENOENT, why, self.directory)

    def _lacks_shard(self, step: int, manifest: CheckpointManifest, path: str, why: str) -> Corrupt:
        """Make the error for a missing shard of a committed step."""
        owner = self.store.why_gone(path, step)
        why += f": {owner}" if owner else "; mount its disk if it is not mounted"
        why += self._other_steps(step)
        error = Corrupt(None, f"step {step} of {self.directory} lacks a shard: {why}", path)
        paths = manifest.shard_paths()
        error.tensor = shards.first_tensor(manifest, paths.index(path)) if path in paths else None
        return error

    def _other_steps(self, step: int) -> str:
        """Return a text that names the other steps, for errors about a damaged one."""
        copies = "".join(
            f"; {each} has a copy of step {step}: Checkpointer({each!r}).load({step}) loads it"
            for each in self._copies_of(step)
        )
        others = [str(each) for each in self.store.steps() if each != step]
        if len(others) > 6:
            others[3:-3] = ["..."]
        if not others:
            return copies or "; there is no other step"
        named = f"step {others[0]}" if len(others) == 1 else f"steps {', '.join(others)}"
        return f"{copies}; {named} of this directory, not verified here, can be loaded with load(step)"

    @contextmanager
    def _naming_other_steps(self, step: int) -> Iterator[None]:
        try:
            yield
        except (Corrupt, Format) as error:
            others = ""
            with suppress(Error):
                others = self._other_steps(step)
            if others not in str(error):
                reword(error, f"{error}{others}")
            raise


def _damage(found: "list[dict[str, Any]]") -> Any:
    """Make the error for what verifying has found.

    A file that cannot be read may be intact: Corrupt is raised only for a file that is not.
    """
    first = next((each for each in found if each["kind"] != "unread"), found[0])
    message = first["message"] + (f"; and {len(found) - 1} more" if len(found) > 1 else "")
    error: Any
    if first["kind"] == "unread":
        error = exception_of("system", first["errno"] or errno.EIO, message, first["path"])
    else:
        error = Corrupt(None, message, first["path"])
    error.tensor, error.chunk = next(iter(first["tensors"]), None), first["chunk"]
    return error


def are_same(one: CheckpointManifest, other: CheckpointManifest) -> bool:
    """Whether two manifests of a step are of the same save."""
    # The number of a commit is reused once that checkpoint is deleted; names of shards are not.
    return one.commit == other.commit and one.shard_paths() == other.shard_paths()
