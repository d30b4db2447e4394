"""Which nodes keep the bytes that a node saves: the copies of its share. Pure functions."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from trunkline.checkpoint.nodes.agreement import Entry

KeptBy = tuple[tuple[int, ...], ...]  # of each node's share: the nodes that keep it, as indexes


class Share(NamedTuple):
    """A share of a save: the node whose it is, and all nodes that were to keep it, that one first."""

    owner: str
    nodes: tuple[str, ...]


def place_copies(domains: Sequence[str], copies: int) -> KeptBy:
    """Return which nodes keep each share, `copies` of them if there are so many. domains: that of each node.

    Every node keeps equally many shares. No two nodes that keep the same one are in the same domain, provided
    that no domain has more than 1/`copies` of the nodes.
    """
    count = len(domains)
    copies = min(copies, count)
    in_order = sorted(range(count), key=lambda node: (domains[node], node))
    place_of = {node: place for place, node in enumerate(in_order)}
    # A step over the largest domain leaves any domain; none may lead round to where it began.
    step = min(max(Counter(domains).values(), default=1), count // max(1, copies))
    return tuple(
        tuple(in_order[(place_of[node] + number * step) % count] for number in range(copies))
        for node in range(count)
    )


def about_copies(domains: Sequence[str], copies: int) -> str | None:
    """Return what is wrong with the copies of so many nodes; None if each share gets as many as asked for."""
    if len(domains) < copies:
        return f"there are only {len(domains)} nodes" if len(domains) > 1 else "there is only one node"
    kept_by = place_copies(domains, copies)
    if any(len({domains[node] for node in nodes}) < copies for nodes in kept_by):
        largest, nodes_in_it = Counter(domains).most_common(1)[0]
        return (
            f"{largest} has {nodes_in_it} of {len(domains)} nodes, so that some copies are in the domain of "
            "their original; the loss of that domain can lose bytes"
        )
    return None


def keepers_of(entry: Entry) -> KeptBy:
    """Return which nodes keep the share of each node of a save, as indexes of entry.nodes."""
    return entry.kept_by or tuple((node,) for node in range(len(entry.nodes)))


def shares_kept_by(node: int, entry: Entry) -> list[int]:
    """Return the nodes whose shares a node keeps, its own first."""
    keepers = keepers_of(entry)
    return [node, *(owner for owner in range(len(keepers)) if owner != node and node in keepers[owner])]


def shares_of(entry: Entry) -> list[Share]:
    """Return the shares of a save."""
    return [
        Share(owner, tuple(entry.nodes[node] for node in nodes))
        for owner, nodes in zip(entry.nodes, keepers_of(entry), strict=True)
    ]


def missing_shares(shares: Iterable[Share], holders: Collection[str]) -> list[Share]:
    """Return the shares that none of these nodes has. holders: those that have the entry of the save."""
    return [share for share in shares if not set(share.nodes) & set(holders)]


def lost_copies(entry: Entry, holders: Collection[str]) -> list[str]:
    """Return the nodes that were to keep copies of a save, and do not have it; none if it has no copies."""
    return [node for node in entry.nodes if node not in holders] if entry.kept_by else []


class Reader(NamedTuple):
    """A node that can read a share. node: as which it has that; place: which it is of those there."""

    node: str
    place: int


def readers_of(share: Share, there: Mapping[str, Sequence[int]]) -> list[Reader]:
    """Return who can read a share. there: the nodes that have the save, and which they are."""
    return [Reader(node, place) for node in share.nodes for place in there.get(node, ())]


_Node = TypeVar("_Node", bound=Hashable)


def choose_readers(able: Sequence[Sequence[_Node]]) -> list[_Node]:
    """Return which node reads each share, given those that can: as equally many each as possible.

    The same on all ranks.
    """
    shares_of_node: Counter[_Node] = Counter()
    chosen: dict[int, _Node] = {}
    for share in sorted(range(len(able)), key=lambda share: len(able[share])):  # the least choice first
        chosen[share] = min(able[share], key=lambda node: shares_of_node[node])
        shares_of_node[chosen[share]] += 1
    return [chosen[share] for share in range(len(able))]
