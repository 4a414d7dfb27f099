"""State rows: the lowest free one is taken, and each that is given up is reported once."""

import itertools

from syncline.scheduler_core.rows import RowPool


def test_every_order_of_giving_up_leaves_each_row_free_once() -> None:
    for order in itertools.permutations(range(4)):
        rows = RowPool(4)
        assert [rows.take() for _ in range(4)] == [0, 1, 2, 3]
        assert (rows.num_free, rows.free_rows) == (0, frozenset())
        for i, row in enumerate(order):
            rows.give_up(row)
            assert rows.num_free == i + 1
            assert rows.free_rows == frozenset(order[: i + 1])
        assert rows.drain_left() == order
        assert rows.drain_left() == ()
        assert [rows.take() for _ in range(4)] == [0, 1, 2, 3]


def test_a_row_given_up_and_taken_again_is_still_reported() -> None:
    rows = RowPool(2)
    row = rows.take()
    rows.give_up(row)
    assert rows.take() == row
    rows.give_up(row)
    assert rows.drain_left() == (row, row)
