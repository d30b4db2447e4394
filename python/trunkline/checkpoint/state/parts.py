"""Parts of a state: which of a skeleton are loaded, and which tensors these need."""

from collections.abc import Iterator
from typing import Any

from trunkline._formats.selection import Selection, child_name
from trunkline.checkpoint.state.leaves import Json, decode_key, shown_key

_DICTS = ("dict", "OrderedDict", "Counter")
_NOTHING: Any = object()  # stands for a part of which nothing is selected


def selected_part(skeleton: Json, selection: Selection, path: str) -> Json:
    """Return a skeleton with only what is selected; raises ValueError for a key that selects nothing.

    Dicts have only the keys under which something is selected. Lists and tuples keep their length, with None
    in place of items of which nothing is selected.
    """
    found = _selected(skeleton, "", selection)
    selection.check(path, (name for name, _ in leaves(skeleton)))
    if found is not _NOTHING:
        return found
    kind = _dict_kind(skeleton)
    return {kind: []} if kind else None


def part_for(skeleton: Json, into: Any) -> Json:
    """Return a skeleton with only the keys that a dict `into` has; all of it if it has none of them."""
    kind = _dict_kind(skeleton)
    if not kind or not isinstance(into, dict):
        return skeleton
    pairs = [(key, node) for key, node in _pairs(skeleton[kind]) if _decoded(key) in into]
    return {**skeleton, kind: [each for pair in pairs for each in pair]} if pairs else skeleton


def leaves(skeleton: Json, name: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the name and node of each value that is not a container, in order."""
    pending = [(name, skeleton)]
    while pending:
        name, node = pending.pop()
        children = _children(node)
        if children is None:
            yield name, node
        else:
            pending.extend(reversed([(child_name(name, key), child) for key, child in children]))


def tensor_names(skeleton: Json) -> set[str]:
    """Return the names of the stored tensors that a skeleton refers to."""
    found: set[str] = set()
    pending = [skeleton]
    while pending:
        node = pending.pop()
        children = _children(node)
        if children is not None:
            pending.extend(child for _, child in children)
            if isinstance(node, dict) and "_metadata" in node:
                pending.append(node["_metadata"])
        elif isinstance(node, dict):
            found.update(str(node[tag]) for tag in ("tensor", "ndarray") if tag in node)
    return found


def _dict_kind(node: Json) -> str:
    return next((kind for kind in _DICTS if kind in node), "") if isinstance(node, dict) else ""


def _pairs(nodes: list[Json]) -> Iterator[tuple[Json, Json]]:
    return zip(nodes[::2], nodes[1::2], strict=False)


def _decoded(key: Json) -> Any:
    return key if type(key) is str else decode_key(key)


def _name_of(key: Json) -> str:
    decoded = _decoded(key)
    return str(decoded) if type(decoded) in (str, int) else shown_key(decoded)


def _children(node: Json) -> list[tuple[Any, Json]] | None:
    """Return the parts of a container; None for any other node."""
    if kind := _dict_kind(node):
        return [(_name_of(key), child) for key, child in _pairs(node[kind])]
    items = node.get("tuple") if isinstance(node, dict) and "tuple" in node else node
    return list(enumerate(items)) if isinstance(items, list) else None


def _selected(node: Json, name: str, selection: Selection) -> Json:
    if selection.covers(name):
        return node
    children = _children(node)
    if children is None:
        return node if selection.selects(name) else _NOTHING
    parts = [_selected(child, child_name(name, key), selection) for key, child in children]
    if all(part is _NOTHING for part in parts):
        return _NOTHING
    if kind := _dict_kind(node):
        pairs = zip(node[kind][::2], parts, strict=True)
        return {**node, kind: [each for key, part in pairs if part is not _NOTHING for each in (key, part)]}
    items = [None if part is _NOTHING else part for part in parts]
    return {"tuple": items} if isinstance(node, dict) else items
