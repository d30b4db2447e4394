"""Names in a directory of checkpoints, as src/checkpoint/names.cpp makes and recognizes them."""

import os
import re
from collections.abc import Callable
from contextlib import suppress

DESCRIPTOR = "trunkline-checkpoints.json"
_MAX_NUMBER = 2**63 - 1
# Another spelling of a number ("step-12", "step-000000012") is not the directory of a step.
_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})")
_LIKE_STEP = re.compile(r"step[-_]?([0-9]{1,19})")
_MANIFEST = re.compile(r"manifest-([0-9]{10}|[1-9][0-9]{10,18})")
_SHARD = re.compile(
    r"shard-([0-9]{5}|[1-9][0-9]{5,19})-of-([0-9]{5}|[1-9][0-9]{5,19})-[0-9a-f]{16}\.safetensors"
)


def step_of(name: str) -> int | None:
    """Return the step whose directory has this name; None for any other."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and int(found[1]) <= _MAX_NUMBER else None


def step_name(step: int) -> str:
    """Return the name of the directory of a step."""
    return f"step-{step:08}"


def is_manifest(name: str) -> bool:
    """Whether the manifest of a step may have this name."""
    return commit_of(name) is not None


def commit_of(name: str) -> int | None:
    """Return the number of the commit whose manifest has this name; None for any other."""
    found = _MANIFEST.fullmatch(name)
    return int(found[1]) if found and 0 < int(found[1]) <= _MAX_NUMBER else None


def is_shard(name: str) -> bool:
    """Whether a shard may have this name."""
    found = _SHARD.fullmatch(name)
    return found is not None and all(int(number) < 2**64 for number in found.groups())


def dangling_steps(directory: str) -> dict[str, str]:
    """Return the steps that are dangling symbolic links, and their targets.

    Reads no file, and raises nothing.
    """
    found: dict[str, str] = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_symlink() and _STEP.fullmatch(entry.name):
                with suppress(OSError):
                    if not os.path.exists(entry.path):  # noqa: PTH110 - a str
                        found[entry.name] = os.readlink(entry.path)  # noqa: PTH115
    return found


def misnamed_steps(directory: str, is_manifest: Callable[[str], bool] = is_manifest) -> dict[str, str]:
    """Return folders that hold a step under an unusual name, and the name that they should have.

    `is_manifest`: whether a folder with a file of this name holds a step.

    Omits those beside a folder with the right name. Reads no file, and raises nothing.
    """
    found: dict[str, str] = {}
    with suppress(OSError):
        for name in os.listdir(directory):  # noqa: PTH208 - quick, for many steps
            like = _LIKE_STEP.fullmatch(name)
            if like is None or _STEP.fullmatch(name) or int(like[1]) > _MAX_NUMBER:
                continue
            right = step_name(int(like[1]))
            folder = os.path.join(directory, name)  # noqa: PTH118
            with suppress(OSError):
                holds_step = any(is_manifest(each) for each in os.listdir(folder))  # noqa: PTH208
                if holds_step and not os.path.lexists(os.path.join(directory, right)):  # noqa: PTH118
                    found[name] = right
    return found


def ignored_steps(directory: str, is_manifest: Callable[[str], bool] = is_manifest) -> dict[str, str]:
    """Return folders that look like steps but do not count: their names, and what to do.

    `is_manifest`: as for misnamed_steps().
    """
    found = {
        name: f"rename it to {right} to make it count"
        for name, right in misnamed_steps(directory, is_manifest).items()
    }
    for name, target in dangling_steps(directory).items():
        found[name] = (
            f"it is a symbolic link to {target}, which does not exist; mount that disk before you continue "
            "from an older step, or remove the link"
        )
    return dict(sorted(found.items()))
