"""YAML as nodes that know their lines, with the spellings of keys that Hydra accepts."""

from dataclasses import dataclass
from typing import Any

from trunkline._errors import Unsupported
from trunkline.workload._spec_error import SpecError

MISSING_YAML = "workload files require the package PyYAML: pip install pyyaml"


@dataclass
class Node:
    """A value of a YAML document: a dict or list of nodes, or a scalar."""

    value: Any
    line: int
    override: str = ""  # the KEY=VALUE of --set that it is from


def parse_yaml(text: str, source: str) -> Node:
    """Return the document as a mapping of nodes.

    Keys such as "dataset.num_files_train", "+dataset.format" and "++workload.reader.batch_size" are put where
    they belong, and a document below the single key "workload" is unwrapped. Raises SpecError.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        import errno

        raise Unsupported(errno.EOPNOTSUPP, MISSING_YAML) from error
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        document = Node({}, 1) if root is None else _node(loader, root, source, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        raise SpecError(source, line, "", f"not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise SpecError(source, None, "", f"not valid YAML: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(document.value, dict):
        raise SpecError(source, document.line, "", "must be a mapping of sections such as dataset and reader")
    return _unwrapped(document)


def insert(root: Node, key: str, node: Node, source: str) -> None:
    """Put a node below `root`, by a key that may name a path. Raises SpecError if another value is there."""
    *parents, last = key.lstrip("+").removeprefix("workload.").split(".")
    place = root
    for parent in parents:
        place = place.value.setdefault(parent, Node({}, node.line))
        if not isinstance(place.value, dict):
            raise SpecError(source, node.line, key, f"{parent} is a value, not a section")
    present = place.value.get(last)
    if present is not None and isinstance(present.value, dict) and isinstance(node.value, dict):
        for name, each in node.value.items():
            insert(present, name, each, source)
    elif present is not None:
        raise SpecError(source, node.line, key, f"is duplicated; it is first in line {present.line}")
    else:
        place.value[last] = node


def _unwrapped(document: Node) -> Node:
    inner = document.value.get("workload")
    if inner is None or not isinstance(inner.value, dict) or "dataset" in document.value:
        return document
    rest = {key: node for key, node in document.value.items() if key != "workload"}
    return Node({**inner.value, **rest}, inner.line)


_DEEPEST = 20  # nestings; public files have 4


def _node(loader: Any, node: Any, source: str, depth: int) -> Node:
    import yaml

    line = node.start_mark.line + 1
    if depth > _DEEPEST:
        raise SpecError(source, line, "", f"is nested more than {_DEEPEST} deep")
    if isinstance(node, yaml.SequenceNode):
        return Node([_node(loader, each, source, depth + 1) for each in node.value], line)
    if not isinstance(node, yaml.MappingNode):
        try:
            return Node(loader.construct_object(node), line)
        except ValueError as error:  # a date that does not exist, a number of thousands of digits
            raise SpecError(source, line, "", f"not a valid value: {str(node.value)[:40]}") from error
    found = Node({}, line)
    for key_node, value in node.value:
        each = _node(loader, value, source, depth + 1)
        insert(found, str(key_node.value), Node(each.value, key_node.start_mark.line + 1), source)
    return found
