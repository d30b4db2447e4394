"""The base of StorageWriter and StorageReader: a directory, and an engine."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline._arguments import check_engine
from trunkline._core import Engine
from trunkline._errors import Unsupported
from trunkline._paths import absolute_path
from trunkline.dcp._stored import directory_argument, is_possible_checkpoint_id


@dataclass(frozen=True)
class CheckpointPath:
    """The directory of a checkpoint, as it was given and as an absolute path."""

    given: str
    path: Path  # absolute: may be used in another process, or after a change of the working directory


def checkpoint_path_of(directory: "str | os.PathLike[str]", argument: str) -> CheckpointPath:
    """Return the directory that an argument names. Raises TypeError or ValueError."""
    given = str(Path(directory_argument(directory, argument)))
    return CheckpointPath(given, Path(absolute_path(given, argument)))


class Endpoint:
    """The directory of a writer or reader, and the methods that both share."""

    def __init__(self, path: "str | os.PathLike[str] | None", engine: Engine | None) -> None:
        """Raise TypeError or ValueError for an invalid path; accesses nothing on disk."""
        super().__init__()
        self._path = None if path is None else checkpoint_path_of(path, "path")
        check_engine(engine)
        self._engine = engine

    @property
    def checkpoint_id(self) -> str | None:
        """The directory, as it was given; None if none was given yet."""
        path = self._current_path()
        return None if path is None else path.given

    @property
    def _directory(self) -> Path:
        path = self._current_path()
        if path is None:
            raise ValueError(
                f"{type(self).__name__} has no directory: pass one as path, or as checkpoint_id "
                "of the save or load"
            )
        return path.path

    def _current_path(self) -> CheckpointPath | None:
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether it is the path of a directory that exists or could be created, not a URL."""
        return is_possible_checkpoint_id(checkpoint_id)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to send to another process."""
        if self._engine is not None:
            raise Unsupported(
                None,
                "engine: an Engine cannot be sent to another process; with engine=None each uses its own",
                None,
            )
        return self.__dict__.copy()
