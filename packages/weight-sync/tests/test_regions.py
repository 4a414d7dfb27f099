"""Region arithmetic and Coverage against sets of index tuples."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from syncline.weight_sync.coverage import Coverage
from syncline.weight_sync.regions import (
    Region,
    difference,
    difference_all,
    extents,
    intersection,
    relative,
    require_within,
    volume,
    whole_region,
)

Cells = set[tuple[int, ...]]


def cells(region: Region) -> Cells:
    return set(itertools.product(*(range(start, stop) for start, stop in region)))


def cells_of(regions: list[Region]) -> Cells:
    """Their union; fails if two of them share a cell."""
    found: Cells = set()
    for region in regions:
        assert not found & cells(region), f"{region} overlaps another"
        found |= cells(region)
    return found


def regions_in(shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    bounds = [
        st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda p: (min(p), max(p)))
        for size in shape
    ]
    return st.tuples(*bounds)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.data(), shapes)
def test_intersection_and_difference_are_those_of_sets(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    first, second = data.draw(regions_in(shape)), data.draw(regions_in(shape))
    common = intersection(first, second)
    assert (set() if common is None else cells(common)) == cells(first) & cells(second)
    assert cells_of(difference(first, second)) == cells(first) - cells(second)
    assert volume(first) == len(cells(first))


@given(st.data(), shapes)
def test_a_difference_has_no_bounds_of_its_own(data: st.DataObject, shape: tuple[int, ...]) -> None:
    first, second = data.draw(regions_in(shape)), data.draw(regions_in(shape))
    for piece in difference(first, second):
        for dim, interval in enumerate(piece):
            assert set(interval) <= {*first[dim], *second[dim]}


def test_a_zero_dimensional_region_holds_one_element() -> None:
    assert whole_region(()) == ()
    assert volume(()) == 1
    assert intersection((), ()) == ()
    assert difference((), ()) == []
    assert difference_all((), []) == [()]


def test_relative_counts_from_the_origin() -> None:
    assert relative(((3, 5), (2, 4)), ((2, 9), (2, 4))) == ((1, 3), (0, 2))
    assert extents(((3, 5), (2, 4))) == (2, 2)


@pytest.mark.parametrize(
    "region", [((0, 2),), ((0, 2), (3, 2)), ((-1, 2), (0, 3)), ((0, 2), (0, 4))]
)
def test_a_region_outside_the_shape_is_refused_by_field(region: Region) -> None:
    with pytest.raises(ValueError, match="part of w must"):
        require_within(region, (2, 3), "part of w")


class CoverageMachine(RuleBasedStateMachine):
    @initialize(shape=shapes)
    def create(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.coverage = Coverage(shape)
        self.covered: Cells = set()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        region = data.draw(regions_in(self.shape))
        doubles = cells_of(self.coverage.overlaps(region))
        assert doubles == cells(region) & self.covered
        if doubles:
            return
        self.coverage.add(region)
        self.covered |= cells(region)

    @rule(data=st.data())
    def add_what_is_missing(self, data: st.DataObject) -> None:
        for region in self.coverage.missing(data.draw(regions_in(self.shape))):
            self.coverage.add(region)
            self.covered |= cells(region)

    @rule(data=st.data())
    def a_copy_grows_alone(self, data: st.DataObject) -> None:
        twin = self.coverage.copy()
        for region in twin.missing():
            twin.add(region)
        assert twin.is_complete

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        region = data.draw(regions_in(self.shape))
        assert cells_of(self.coverage.missing(region)) == cells(region) - self.covered
        assert self.coverage.covers(region) == (cells(region) <= self.covered)
        extra = self.coverage.missing(data.draw(regions_in(self.shape)))
        known = self.covered | cells_of(extra)
        assert self.coverage.covers(region, extra) == (cells(region) <= known)

    @invariant()
    def counts_are_those_of_the_set(self) -> None:
        assert self.coverage.num_covered == len(self.covered)
        whole = cells(whole_region(self.shape))
        assert self.coverage.is_complete == (self.covered == whole)
        assert cells_of(self.coverage.missing()) == whole - self.covered


TestCoverage = CoverageMachine.TestCase
TestCoverage.settings = settings(settings.default, stateful_step_count=12)


def test_parts_in_order_stay_one_rectangle() -> None:
    coverage = Coverage((1000, 4))
    for row in range(999):
        coverage.add(((row, row + 1), (0, 4)))
    assert coverage.overlaps(((0, 1000), (0, 4))) == [((0, 999), (0, 4))]
    assert coverage.missing() == [((999, 1000), (0, 4))]
