"""Dividing tensors into shards of equal bytes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trunkline.checkpoint.directory.shares import BLOCK_BYTES, WHOLE_BYTES, divide, limited, spread

SIZES = st.lists(
    st.one_of(st.integers(0, 100), st.integers(0, 4 * BLOCK_BYTES), st.sampled_from([0, 4096, BLOCK_BYTES])),
    max_size=40,
)


@given(SIZES, st.integers(1, 12))
def test_shares_cover_all_once_in_order_and_are_equal(sizes: list[int], shards: int) -> None:
    parts = divide(sizes, shards)
    assert len(parts) == shards
    reached = [0] * len(sizes)
    for pieces in parts:
        for piece in pieces:
            assert reached[piece.tensor] == piece.begin < piece.end
            assert piece.begin % 4096 == 0
            reached[piece.tensor] = piece.end
    assert reached == sizes
    shares = [sum(piece.end - piece.begin for piece in pieces) for pieces in parts]
    assert max(shares) - min(shares) <= BLOCK_BYTES


@given(SIZES.filter(lambda sizes: max(sizes, default=0) <= WHOLE_BYTES), st.integers(1, 12))
def test_small_tensors_stay_whole(sizes: list[int], shards: int) -> None:
    for pieces in divide(sizes, shards):
        assert all((piece.begin, piece.end) == (0, sizes[piece.tensor]) for piece in pieces)


@given(SIZES, st.integers(1, 400), st.data())
def test_a_part_is_cut_where_its_costs_reach_the_limit(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    [pieces] = divide(sizes, 1)
    costs = [data.draw(st.integers(1, 100)) for _ in sizes]
    parts = limited(pieces, costs, limit)
    assert [piece for part in parts for piece in part] == pieces
    for part in parts:
        assert len(part) <= 1 or sum(costs[piece.tensor] for piece in part) <= limit
    for part, after in pairwise(parts):
        assert sum(costs[piece.tensor] for piece in [*part, after[0]]) > limit


@given(st.integers(0, 100 * BLOCK_BYTES), st.integers(1, 9), st.integers(1, 9))
def test_few_bytes_use_few_shards(total: int, writers: int, volumes: int) -> None:
    used = spread(total, writers, volumes)
    assert 1 <= used.writers <= writers
    assert 1 <= used.volumes <= volumes
    assert (used.writers * used.volumes - 1) * BLOCK_BYTES <= total
    if total >= writers * volumes * BLOCK_BYTES:
        assert used == (writers, volumes)
