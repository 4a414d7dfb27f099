"""DigitOrder: the permuted view and the address arithmetic are one permutation."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.model_ops_rocm.layouts import REST, DigitOrder
from syncline.model_ops_rocm.regions import Region


@st.composite
def orders(draw: st.DrawFn) -> DigitOrder:
    splits = []
    for _ in range(draw(st.integers(1, 3))):
        before = draw(st.lists(st.integers(1, 3), max_size=1))
        after = draw(st.lists(st.integers(1, 3), max_size=2))
        splits.append((*before, REST, *after))
    numbers = range(sum(len(split) for split in splits))
    return DigitOrder(tuple(splits), tuple(draw(st.permutations(numbers))))


@st.composite
def placed(draw: st.DrawFn) -> tuple[DigitOrder, tuple[int, ...]]:
    """An order, and a shape that fits it, with up to two dimensions in front."""
    order = draw(orders())
    lead = draw(st.lists(st.integers(1, 2), max_size=2))
    last = [multiple * draw(st.integers(1, 3)) for multiple in order.multiples]
    return order, (*lead, *last)


def aligned_region(data: st.DataObject, order: DigitOrder, shape: tuple[int, ...]) -> Region:
    steps = (1,) * (len(shape) - len(order.digits)) + order.tile
    ranges = []
    for size, step in zip(shape, steps, strict=True):
        ends = data.draw(st.lists(st.integers(0, size // step), min_size=2, max_size=2))
        ranges.append((min(ends) * step, max(ends) * step))
    return tuple(ranges)


@given(case=placed())
@settings(max_examples=60, deadline=None)
def test_view_and_arithmetic_agree_and_undo_each_other(
    case: tuple[DigitOrder, tuple[int, ...]],
) -> None:
    order, shape = case
    logical = torch.arange(math.prod(shape)).view(shape)
    stored = order.in_stored_order(logical).reshape(-1)
    assert torch.equal(order.in_logical_order(stored, shape).reshape(shape), logical)
    for index in itertools.product(*(range(size) for size in shape)):
        address = order.address(shape, index)
        assert stored[address] == logical[index]
        assert order.index(shape, address) == index


@given(case=placed(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_write_reaches_the_addresses_of_its_region_and_no_other(
    case: tuple[DigitOrder, tuple[int, ...]], data: st.DataObject
) -> None:
    order, shape = case
    region = aligned_region(data, order, shape)
    stored = torch.full((math.prod(shape),), -1)
    part = tuple(slice(start, stop) for start, stop in region)
    source = torch.arange(math.prod(shape)).view(shape)[part]
    order.write(stored, source, shape, region)
    expected = {
        order.address(shape, index): value
        for index, value in zip(
            itertools.product(*(range(start, stop) for start, stop in region)),
            source.reshape(-1).tolist(),
            strict=True,
        )
    }
    found = {place: value for place, value in enumerate(stored.tolist()) if value != -1}
    assert found == expected


@pytest.mark.parametrize(
    ("digits", "order", "message"),
    [
        (((4,),), (0,), "one REST in each dimension"),
        (((REST, REST),), (0, 1), "one REST in each dimension"),
        (((2, 2, REST),), (0, 1, 2), "first or second"),
        (((REST, 0),), (0, 1), "REST or positive"),
        (((REST, 2),), (0, 0), "name each digit .* once"),
        (((REST, 2),), (0,), "name each digit .* once"),
    ],
)
def test_what_is_no_permutation_is_refused(
    digits: tuple[tuple[int, ...], ...], order: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DigitOrder(digits, order)


def test_a_shape_that_does_not_fit_is_refused() -> None:
    order = DigitOrder(((REST, 4), (REST, 2)), (0, 2, 1, 3))
    assert order.multiples == (4, 2)
    with pytest.raises(ValueError, match=r"multiples of \(4, 2\), got \(6, 2\)"):
        order.sizes((6, 2))
    with pytest.raises(ValueError, match="must have 2 dimensions"):
        order.sizes((8,))
