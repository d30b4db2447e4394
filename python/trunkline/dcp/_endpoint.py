"""What StorageWriter and StorageReader have in common: a directory, and an engine."""

import os
from pathlib import Path
from typing import Any

from trunkline._core import Engine
from trunkline._errors import Unsupported
from trunkline.checkpoint._arguments import check_engine
from trunkline.checkpoint._transfer import absolute_path
from trunkline.dcp._stored import directory_argument, is_possible_checkpoint_id


class Endpoint:
    """The directory of a writer or reader, and what is asked of both about it."""

    def __init__(self, path: "str | os.PathLike[str] | None", engine: Engine | None) -> None:
        """Raise TypeError or ValueError for what names no directory; touches nothing."""
        super().__init__()
        self._given: str | None = None
        self._located: Path | None = None
        self._move_to(path, "path")
        check_engine(engine)
        self._engine = engine

    @property
    def checkpoint_id(self) -> str | None:
        """The directory, as it was given; None where none was yet."""
        return self._given

    @property
    def _directory(self) -> Path:
        if self._located is None:
            raise ValueError(
                f"{type(self).__name__} has no directory: pass one as path, or as checkpoint_id "
                "of the save or load"
            )
        return self._located

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether it is the path of a directory that is there or could be made, not a URL."""
        return is_possible_checkpoint_id(checkpoint_id)

    def _move_to(
        self, checkpoint_id: "str | os.PathLike[str] | None", argument: str = "checkpoint_id"
    ) -> None:
        if checkpoint_id is not None:
            self._given = str(Path(directory_argument(checkpoint_id, argument)))
            # Used later, and maybe in another process: after a change of the working directory.
            self._located = Path(absolute_path(self._given, argument))

    def __getstate__(self) -> dict[str, Any]:
        """What goes to another process."""
        if self._engine is not None:
            raise Unsupported(
                None,
                "engine: an engine does not go to another process; with engine=None each uses its own",
                None,
            )
        return self.__dict__.copy()
