"""Which rows share a bucket: all of them once, with little padding."""

from hypothesis import given
from hypothesis import strategies as st

from syncline.model_ops_rocm.reference.buckets import RowBucket, bucket_rows


@given(num_blocks=st.lists(st.integers(0, 300), max_size=80))
def test_rows_with_blocks_are_in_one_bucket_each_and_padding_is_bounded(
    num_blocks: list[int],
) -> None:
    buckets = bucket_rows(num_blocks)
    rows = [row for bucket in buckets for row in bucket.rows]
    assert sorted(rows) == [row for row, count in enumerate(num_blocks) if count]
    for bucket in buckets:
        used = sum(num_blocks[row] for row in bucket.rows)
        assert bucket.num_blocks == max(num_blocks[row] for row in bucket.rows)
        assert bucket.num_blocks * len(bucket.rows) - used <= max(32, used // 8)
    widths = [bucket.num_blocks for bucket in buckets]
    assert widths == sorted(widths, reverse=True)


def test_similar_rows_keep_their_order_in_one_bucket() -> None:
    assert bucket_rows([3, 4, 3, 5]) == (RowBucket(rows=(0, 1, 2, 3), num_blocks=5),)


def test_a_long_row_does_not_pad_the_short_ones() -> None:
    first, second = bucket_rows([2, 2, 100, 2, 0, 2])
    assert first == RowBucket(rows=(2,), num_blocks=100)
    assert second == RowBucket(rows=(0, 1, 3, 5), num_blocks=2)


def test_equal_rows_never_split() -> None:
    assert len(bucket_rows([40] * 256)) == 1


def test_nothing_to_attend_needs_no_bucket() -> None:
    assert bucket_rows([]) == ()
    assert bucket_rows([0, 0]) == ()
