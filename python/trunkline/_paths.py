"""Paths as users pass them: what is accepted, and what they mean after a change of the directory."""

import errno
import os
import re
from typing import Any

from trunkline._errors import exception_of

# "s3://bucket", or "s3:/bucket", which pathlib makes of it; no scheme in use has a single letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(/?)")


def path_name(path: Any, argument: str = "path") -> str:
    """Return a path as str; `argument` is what the caller's user knows it by.

    Raises TypeError, and ValueError for a URL or a "~" that the caller forgot to expand.
    """
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{argument}: must be str, bytes or os.PathLike, not {type(path).__name__}") from None
    check_is_local(name, argument)
    return name


def check_is_local(name: str, argument: str) -> None:
    """Raise ValueError for a URL, and for "~" where there is no directory of that name.

    Otherwise they would be folders of these names in the working directory, where nobody looks for them.
    """
    first = name.partition("/")[0]
    url = _URL.match(name)
    if url and (url[1] or not os.path.isdir(first)):  # noqa: PTH112 - as the kernel takes it
        if first.lower() == "file:":
            instead = "pass the path without file://"
        else:
            instead = "use a path on a mounted filesystem, and copy the files from there or to it"
        raise ValueError(f"{argument}: {name} is a URL, and not the path of a file or directory; {instead}")
    # What is not a user's home stays as it is ("~backup.pt").
    if first.startswith("~") and not os.path.isdir(first) and os.path.expanduser(name) != name:  # noqa: PTH111, PTH112
        raise ValueError(
            f"{argument}: {name} begins with {first}, which only shells replace by the home directory; pass "
            f"os.path.expanduser({name!r}), or ./{name} for a directory of that name"
        )


def absolute_path(path: Any, argument: str = "path") -> str:
    """Return a path that means the same after a change of the working directory.

    For what is used after the call that it was given to: a save in the background of a relative path would
    end wherever the process is by then. Symbolic links and ".." stay as they are.
    """
    name = path_name(path, argument)
    if not name:
        raise exception_of("system", errno.ENOENT, f"{argument}: is an empty path", name)
    if name.startswith("/"):
        return name
    try:
        # Not a Path, which would drop a trailing slash.
        return f"{os.getcwd()}/{name}"  # noqa: PTH109
    except FileNotFoundError:
        raise exception_of(
            "system",
            errno.ENOENT,
            f"{argument}: {name} is relative, and the working directory of the process does not exist any "
            "more (ENOENT); pass an absolute path, or change to a directory that exists (os.chdir)",
            name,
        ) from None
