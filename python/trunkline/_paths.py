"""Paths as users pass them: which are accepted, and their absolute form."""

import errno
import os
import re
from collections.abc import Iterable
from typing import Any

from trunkline._errors import exception_of, system_errors

# "s3://bucket", or "s3:/bucket", which pathlib makes of it; no scheme in use has a single letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(/?)")


def path_name(path: Any, argument: str = "path") -> str:
    """Return a path as str; `argument`: its name in messages.

    Raises TypeError, and ValueError for a URL or a "~" that the caller forgot to expand.
    """
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{argument}: must be str, bytes or os.PathLike, not {type(path).__name__}") from None
    check_is_local(name, argument)
    return name


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of what a folder holds, in no order.

    Raises a trunkline.Error that names the folder: FileNotFoundError, NotADirectoryError, ...
    """
    with system_errors(f"list {os.fspath(folder)}", folder):
        return os.listdir(folder)  # noqa: PTH208 - quick, for many steps


def check_is_local(name: str, argument: str) -> None:
    """Raise ValueError for a URL, and for "~" where there is no directory of that name.

    Otherwise they would create folders with these names in the working directory, where users do not expect
    them.
    """
    first = name.partition("/")[0]
    url = _URL.match(name)
    if url and (url[1] or not os.path.isdir(first)):  # noqa: PTH112 - as the kernel takes it
        if first.lower() == "file:":
            instead = "pass the path without file://"
        else:
            instead = "use a path on a mounted filesystem, and copy the files from there or to it"
        raise ValueError(f"{argument}: {name} is a URL, not the path of a file or directory; {instead}")
    # Names that are not a user's home are accepted ("~backup.pt").
    if not first.startswith("~") or os.path.isdir(first):  # noqa: PTH112
        return
    if os.path.expanduser(name) != name:  # noqa: PTH111
        raise ValueError(
            f"{argument}: {name} begins with {first}, which only shells expand to the home directory; pass "
            f"os.path.expanduser({name!r}), or ./{name} for a directory of that name"
        )
    if first == "~":
        raise ValueError(
            f"{argument}: {name} begins with ~, which only shells expand to the home directory, and none is "
            f"known: HOME is not set, and the user (uid {os.getuid()}) is not in the password database. "
            f"Pass an absolute path, or ./{name} for a directory of that name"
        )


def about_missing_disks(volumes: Iterable[str], argument: str = "volumes") -> str | None:
    """Return a warning of directories that would be created with their parents; None if there are none.

    Such a parent was meant to be the mount point of a disk.
    """
    parents = {os.path.dirname(os.path.abspath(each)) for each in volumes}  # noqa: PTH100, PTH120
    missing = sorted(each for each in parents if not os.path.isdir(each))  # noqa: PTH112
    if not missing:
        return None
    verb = "does" if len(missing) == 1 else "do"
    return (
        f"{argument}: {', '.join(missing)} {verb} not exist, and saving creates directories; check the "
        "spelling, and that the disks are mounted: otherwise the bytes go to the disk of the system"
    )


def absolute_path(path: Any, argument: str = "path") -> str:
    """Return a path that means the same after a change of the working directory.

    For paths that are used after the call: a background save to a relative path would depend on the working
    directory at that time. Symbolic links and ".." are kept.
    """
    name = path_name(path, argument)
    if not name:
        raise exception_of("system", errno.ENOENT, f"{argument}: is an empty string; pass a path", name)
    if name.startswith("/"):
        return name
    try:
        # Not a Path, which would drop a trailing slash.
        return f"{os.getcwd()}/{name}"  # noqa: PTH109
    except FileNotFoundError:
        raise exception_of(
            "system",
            errno.ENOENT,
            f"{argument}: {name} is relative, but the working directory of the process no longer exists "
            "(ENOENT); pass an absolute path, or change to an existing directory (os.chdir)",
            name,
        ) from None


def file_size(path: "str | os.PathLike[str]") -> int | None:
    """Return the size of a file; None if there is none, or it cannot be seen."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - also a str
    except OSError:
        return None
