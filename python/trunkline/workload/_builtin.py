"""Workloads that come with the package."""

import difflib
from pathlib import Path

from trunkline._paths import path_name
from trunkline.workload._parse import parse_file, parse_text
from trunkline.workload._spec import Workload

_FOLDER = Path(__file__).parent / "builtin"


def builtin_names() -> list[str]:
    """Return the names of all built-in workloads, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def builtin_description(name: str) -> str:
    """Return the comment that a built-in workload begins with."""
    lines = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment)


def name_of_kind(name: str, kind: str | None) -> str:
    """Return the name of a built-in workload for a kind of accelerator, such as "b200"; None: name itself.

    name: of the workload, with or without another kind: "unet3d", "unet3d_h100". Raises ValueError if there
    is none, or several and no kind to choose by.
    """
    names = builtin_names()
    if kind is None and (name in names or not _kinds_of(name)):
        return name
    if kind is None:
        kinds = ", ".join(_kinds_of(name))
        raise ValueError(f"{name} is built in for {kinds}; choose one with --accelerator-kind")
    family = name.rpartition("_")[0] if name in names and name.rpartition("_")[0] else name
    for each in (family, name):
        if kind in _kinds_of(each):
            return f"{each}_{kind}"
    if _kinds_of(family):
        kinds = ", ".join(_kinds_of(family))
        raise ValueError(f"--accelerator-kind: {family} is not built in for {kind}; it is for {kinds}")
    raise ValueError(
        f"--accelerator-kind: {name} has no variants for kinds of accelerators; those that have, such as "
        "unet3d_h100, are in `trunkline workload list`"
    )


def _kinds_of(family: str) -> list[str]:
    """Return the kinds of accelerators that a workload is built in for. All have a digit: h100, v5p."""
    names = [name for name in builtin_names() if name.startswith(f"{family}_")]
    kinds = [name.removeprefix(f"{family}_") for name in names]
    return [kind for kind in kinds if any(each.isdigit() for each in kind)]


def _meant(name: str, names: list[str]) -> list[str]:
    """Return the workloads whose name, with or without the kind of accelerator, is nearly this one."""
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    families = {each.rpartition("_")[0] for each in names}
    of_family = difflib.get_close_matches(name, families - {""}, n=1, cutoff=0.8)
    kinds = [each for each in names if of_family and each.startswith(f"{of_family[0]}_")]
    return nearest or kinds


def _check_overrides(overrides: object) -> None:
    expected = 'overrides: must be a list of KEY=VALUE, such as ["train.epochs=1"]'
    if not isinstance(overrides, list | tuple):
        raise TypeError(f"{expected}, not {type(overrides).__name__}; put it into a list")
    for each in overrides:
        if not isinstance(each, str):
            raise TypeError(f"{expected}, and {each!r} is not a str")


def load(name_or_file: str, overrides: "tuple[str, ...] | list[str]" = ()) -> Workload:
    """Return the built-in workload of that name, or the one in the file.

    overrides: KEY=VALUE pairs that replace keys of the file, such as "reader.batch_size=4".
    Raises ValueError with the line and the key if it is not valid, TypeError for other overrides,
    OSError if there is no such file.
    """
    _check_overrides(overrides)
    if not isinstance(name_or_file, str):
        name_or_file = path_name(name_or_file, "name_or_file")
    if name_or_file in builtin_names():
        text = (_FOLDER / f"{name_or_file}.yaml").read_text(encoding="utf-8")
        return parse_text(text, name_or_file, overrides)
    if "/" not in name_or_file and not Path(name_or_file).exists():
        names = builtin_names()
        meant = _meant(name_or_file, names)
        known = f". Did you mean {' or '.join(meant)}?" if meant else f"; there are {', '.join(names)}"
        raise ValueError(f"{name_or_file}: no such file, and no such built-in workload{known}")
    return parse_file(name_or_file, overrides)
