"""Which nodes keep which shares."""

import itertools
import random
from collections import Counter

import pytest

from trunkline.checkpoint.nodes.agreement import Entry
from trunkline.checkpoint.nodes.copies import (
    Share,
    about_copies,
    choose_readers,
    missing_shares,
    place_copies,
    shares_of,
)

A, B, C = "node a", "node b", "node c"


def entry(copies: int) -> Entry:
    nodes = (A, B, C)
    return Entry("id", 1, "branch", (), nodes, 1, kept_by=place_copies(nodes, copies))


@pytest.mark.parametrize(
    ("copies", "holders", "missing"),
    [
        (1, (A, B, C), ""),
        (1, (A, C), "b"),
        (2, (A, C), ""),
        (2, (A,), "b"),
        (9, (A,), ""),
        (2, (), "abc"),
    ],
)
def test_which_shares_are_lost(copies: int, holders: tuple[str, ...], missing: str) -> None:
    lost = missing_shares(shares_of(entry(copies)), holders)
    assert [share.owner for share in lost] == [f"node {each}" for each in missing]


def test_copies_are_on_the_nodes_that_follow() -> None:
    assert shares_of(entry(2)) == [Share(A, (A, B)), Share(B, (B, C)), Share(C, (C, A))]
    assert shares_of(Entry("id", 1, "branch", (), (A, B), 1)) == [Share(A, (A,)), Share(B, (B,))]


@pytest.mark.parametrize(
    "domains", ["aabb", "abab", "aabbcc", "abcabcd", "aaabbbccd", "ab", "abc", "abcdefgh"]
)
@pytest.mark.parametrize("copies", [2, 3])
def test_the_loss_of_a_domain_leaves_a_copy_of_each_share(domains: str, copies: int) -> None:
    kept_by = place_copies(domains, copies)
    largest = max(Counter(domains).values())
    assert (about_copies(domains, copies) is None) == (largest * copies <= len(domains))
    if largest * copies > len(domains):
        return
    assert all(len(nodes) == copies for nodes in kept_by)
    assert all(nodes[0] == node for node, nodes in enumerate(kept_by))
    assert all(len({domains[node] for node in nodes}) == copies for nodes in kept_by)


def test_each_node_keeps_equally_many_shares() -> None:
    rng = random.Random(3)
    for _ in range(300):
        domains = [rng.choice("abcd") for _ in range(rng.randint(1, 12))]
        copies = rng.randint(1, 5)
        kept_by = place_copies(domains, copies)
        count = min(copies, len(domains))
        assert set(Counter(itertools.chain(*kept_by)).values()) == {count}
        assert all(len(set(nodes)) == count for nodes in kept_by)


def test_what_is_said_of_too_few_nodes_or_domains() -> None:
    assert about_copies("abc", 3) is None
    assert about_copies("a", 2) == "there is only one node"
    assert about_copies("ab", 3) == "there are only 2 nodes"
    said = about_copies(["domain r1", "domain r1", "domain r1", "domain r2"], 2)
    assert said is not None
    assert said.startswith("domain r1 has 3 of 4 nodes")


def test_shares_are_read_by_as_many_nodes_as_can() -> None:
    assert choose_readers([[A, B], [B, C], [C, A]]) == [A, B, C]
    assert choose_readers([["a", "b"], ["b", "c"], ["c"], ["a"]]) == ["b", "b", "c", "a"]
    assert choose_readers([[A, B], [A, B]]) == [A, B]
    assert choose_readers([[A, B], [A]]) == [B, A]
