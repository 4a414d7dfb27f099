"""The stand-ins themselves, against loops over Python numbers."""

import itertools

import pytest
import torch

from syncline.weight_sync import whole_region
from syncline.weight_sync.domains import DomainGrid
from syncline.weight_sync.errors import EncoderContractError
from syncline.weight_sync.regions import Region, difference_all
from syncline.weight_sync.slots import WeightSlot
from syncline.weight_sync.testing import (
    CycleEncoder,
    FaultyEncoder,
    IdentityEncoder,
    RecordingGuard,
    ScaledEncoder,
    StandIn,
    counting,
    make_slot,
    ticking_clock,
)


def encode(encoder: StandIn, values: torch.Tensor) -> dict[str, torch.Tensor]:
    out = encoder.storage(tuple(values.shape))
    encoder.encode_into(out, values, whole_region(values.shape))
    return out


def test_the_cycle_layout_moves_each_element_two_places_within_its_tile() -> None:
    values = counting((6, 4))
    stored = encode(CycleEncoder(), values)["weight"]
    for row, column in itertools.product(range(6), range(4)):
        place = (row % 3 * 2 + column % 2 + 2) % 6
        top, left = row // 3 * 3, column // 2 * 2
        assert stored[top + place // 2, left + place % 2] == values[row, column]


def test_the_cycle_layout_has_order_three() -> None:
    values = counting((3, 2))
    once = encode(CycleEncoder(), values)["weight"]
    twice = encode(CycleEncoder(), once)["weight"]
    assert not torch.equal(once, values)
    assert not torch.equal(twice, values)
    assert torch.equal(encode(CycleEncoder(), twice)["weight"], values)


@pytest.mark.parametrize("block", [(1, None), (None, None), (2, 2), (None, 1)])
def test_scaled_blocks_are_those_of_a_plain_loop(block: tuple[int | None, int | None]) -> None:
    values = counting((5, 3))
    values[2] = 0
    stored = encode(ScaledEncoder(block), values)
    height, width = block[0] or 5, block[1] or 3
    for row, column in itertools.product(range(5), range(3)):
        inside = values[
            row // height * height : (row // height + 1) * height,
            column // width * width : (column // width + 1) * width,
        ]
        scale = torch.tensor(max(inside.flatten().tolist())) / 127
        scale = torch.tensor(1.0) if scale == 0 else scale
        assert stored["scale"][row // height, column // width] == scale
        assert stored["weight"][row, column] == round(float(values[row, column] / scale))


@pytest.mark.parametrize(
    "encoder", [IdentityEncoder(), CycleEncoder(), ScaledEncoder(), ScaledEncoder((2, 2))]
)
def test_encoding_block_by_block_is_encoding_at_once(encoder: StandIn) -> None:
    values = counting((6, 4))
    first = DomainGrid(make_slot("w", (6, 4), encoder)).blocks(((1, 4), (0, 3)))
    out = encoder.storage((6, 4))
    num_bytes = 0
    for region in first + difference_all(whole_region((6, 4)), first):
        (top, bottom), (left, right) = region
        encoder.encode_into(out, values[top:bottom, left:right], region)
        num_bytes += encoder.region_bytes((6, 4), region)
    whole = encode(encoder, values)
    assert all(torch.equal(tensor, whole[key]) for key, tensor in out.items())
    assert num_bytes == sum(tensor.nbytes for tensor in whole.values())
    assert num_bytes == encoder.region_bytes((6, 4), whole_region((6, 4)))


@pytest.mark.parametrize(
    ("encoder", "region", "blocks"),
    [
        (IdentityEncoder(), ((1, 4), (1, 3)), [((1, 4), (1, 3))]),
        (ScaledEncoder((1, None)), ((1, 4), (1, 3)), [((1, 4), (0, 4))]),
        (ScaledEncoder((None, None)), ((1, 4), (1, 3)), [((0, 6), (0, 4))]),
        (CycleEncoder(), ((1, 2), (0, 4)), [((0, 3), (0, 4))]),
        (CycleEncoder(), ((1, 6), (0, 4)), [((0, 3), (0, 4)), ((3, 6), (0, 4))]),
        (
            CycleEncoder(),
            ((0, 4), (1, 4)),
            [((0, 3), (0, 2)), ((0, 3), (2, 4)), ((3, 6), (0, 2)), ((3, 6), (2, 4))],
        ),
    ],
)
def test_blocks_touch_only_domains_that_the_region_touches(
    encoder: StandIn, region: Region, blocks: list[Region]
) -> None:
    assert DomainGrid(make_slot("w", (6, 4), encoder)).blocks(region) == blocks


def test_an_encoder_without_a_grid_is_named() -> None:
    class Checkered(IdentityEncoder):
        def region_is_encodable(self, logical_shape: tuple[int, ...], region: Region) -> bool:
            heads = {((0, stop), (0, 4)) for stop in range(5)} | {((0, 4), (0, c)) for c in (2, 4)}
            return region in heads

    slot = WeightSlot(
        name="w", logical_shape=(4, 4), encoder=Checkered(), storage=Checkered().storage((4, 4))
    )
    with pytest.raises(EncoderContractError, match="w") as caught:
        DomainGrid(slot).blocks(((1, 2), (0, 2)))
    assert caught.value.slot == "w"


def test_a_broken_encoder_leaves_bytes_behind() -> None:
    encoder = FaultyEncoder(IdentityEncoder(), broken=True)
    out = IdentityEncoder().storage((2,))
    with pytest.raises(RuntimeError, match="half way"):
        encoder.encode_into(out, counting((2,)), ((0, 2),))
    assert out["weight"].tolist() == [77, 77]
    encoder.broken = False
    encoder.encode_into(out, counting((2,)), ((0, 2),))
    assert out["weight"].tolist() == [1, 2]


def test_the_guard_is_exclusive_and_the_clock_ticks() -> None:
    guard = RecordingGuard()
    with pytest.raises(RuntimeError, match="not held"):
        guard.release()
    guard.acquire("one")
    with pytest.raises(RuntimeError, match="held already"):
        guard.acquire("two")
    clock = ticking_clock(0.5)
    assert [clock(), clock(), clock()] == [0.0, 0.5, 1.0]
