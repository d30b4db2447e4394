"""Where in a state a stored tensor is, for messages."""

from collections.abc import Iterable

from trunkline.checkpoint.state.leaves import Json, decode_key, shown_key

_DICTS = ("dict", "OrderedDict", "Counter")


def place_of_tensor(skeleton: Json, name: str) -> str | None:
    """Return the first place of the tensor stored as `name`: "state['model'][0]"; None if there is none.

    `skeleton`: as flatten() makes it. Several places may share the memory of one stored tensor.
    """
    pending: list[tuple[str, Json]] = [("state", skeleton)]
    while pending:
        place, node = pending.pop()
        if isinstance(node, dict) and name in (node.get("tensor"), node.get("ndarray")):
            return place
        pending.extend(reversed(list(_children(place, node))))
    return None


def _children(place: str, node: Json) -> Iterable[tuple[str, Json]]:
    if isinstance(node, dict):
        for tag in _DICTS:
            pairs = node.get(tag, [])
            for key, child in zip(pairs[::2], pairs[1::2], strict=True):
                yield f"{place}[{shown_key(decode_key(key))}]", child
        if "_metadata" in node:
            yield f"{place}._metadata", node["_metadata"]
    items = node.get("tuple", []) if isinstance(node, dict) else node if isinstance(node, list) else []
    for index, child in enumerate(items):
        yield f"{place}[{index}]", child
