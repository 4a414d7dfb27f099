"""Results that share bytes with another tensor of a call are found by strides alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from syncline.model_ops_rocm.checks import require_apart
from syncline.model_ops_rocm.memory import has_own_places, is_same_view, share_bytes

BUFFER = torch.zeros(4_096)


def refused(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        require_apart("op", {"out": one}, {"x": other})
    except ValueError as error:
        assert str(error) == "op: out must be apart from x, got tensors that share bytes"
        return True
    return False


def twice(one: torch.Tensor) -> bool:
    """Whether some element of it is another one too."""
    sizes = zip(one.shape, one.stride(), strict=True)
    places = [0]
    for size, step in sizes:
        places = [place + index * step for place in places for index in range(size)]
    return len(set(places)) < len(places)


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By writing: what the definition says."""
    BUFFER.zero_()
    one.fill_(1.0)
    return bool((other == 1.0).any())


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Any steps, or, as most tensors have, rows with gaps in rows with gaps."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    if draw(st.booleans()):
        steps = draw(st.lists(st.integers(0, 24), min_size=len(sizes), max_size=len(sizes)))
    else:
        steps, reach = [], 1
        for size in sizes:
            steps.append(reach)
            reach = reach * size + draw(st.sampled_from([0, 0, 1, 2, 5]))
    order = draw(st.permutations(range(len(sizes))))
    return BUFFER.as_strided(
        [sizes[dim] for dim in order], [steps[dim] for dim in order], draw(st.integers(0, 200))
    )


@given(one=views(), other=views())
@settings(max_examples=500)
def test_what_shares_an_element_is_refused(one: torch.Tensor, other: torch.Tensor) -> None:
    assert share_bytes(one, other) == share_bytes(other, one) == share_elements(one, other)
    assert has_own_places(one) != twice(one)
    if has_own_places(one):
        assert refused(one, other) == share_elements(one, other)
    else:
        with pytest.raises(ValueError, match="must have a place of its own for each element"):
            require_apart("op", {"out": one}, {})


@given(data=st.data())
def test_columns_of_one_buffer_are_refused_exactly_where_they_overlap(data: st.DataObject) -> None:
    """q, k and v of one product: rows at one distance, heads apart, in as many dimensions."""
    rows, heads, width = (data.draw(st.integers(1, 4)) for _ in range(3))
    distance = data.draw(st.integers(heads * width, 40))
    whole = BUFFER[: rows * distance].view(rows, distance)
    ends = [data.draw(st.integers(0, distance - heads * width)) for _ in range(2)]
    one, other = (whole[:, end : end + heads * width].view(rows, heads, width) for end in ends)
    assert refused(one, other) == share_elements(one, other)


def test_a_run_inside_a_row_of_a_tensor_that_begins_before_it_shares_its_bytes() -> None:
    whole = BUFFER[:256].view(4, 64)
    for start, stop, is_inside in ((72, 80, True), (112, 128, False), (110, 113, True)):
        run = BUFFER[start:stop]
        assert share_bytes(whole[:, :48], run) == share_bytes(run, whole[:, :48]) == is_inside


def test_an_expanded_result_is_refused_at_once_whatever_its_size() -> None:
    windows = torch.empty(4_096, 4_096).unfold(0, 3, 1).unfold(1, 3, 1)
    for out in (torch.empty(1, 8).expand(1 << 40, 8), windows):
        with pytest.raises(ValueError, match=r"^op: out must have a place of its own for each el"):
            require_apart("op", {"out": out}, {})


def test_two_results_and_results_that_are_inputs() -> None:
    x, out = torch.zeros(3, 4), torch.zeros(3, 4)
    require_apart("op", {"out": out, "residual": None}, {"x": x, "weight": None})
    require_apart("op", {"out": None}, {"x": x, "y": x})  # inputs may be one another
    require_apart("op", {"out": out[:0]}, {"x": out})
    require_apart("op", {"out": out.to("meta")}, {"x": out.to("meta")})
    with pytest.raises(ValueError, match=r"^op: out\[1\] must be apart from out\[0\], got"):
        require_apart("op", {"out[0]": out, "out[1]": out[1:]}, {"x": x})
    # The same bytes under another dtype, and a broadcast of one element of it.
    assert refused(out, out.view(torch.int32)[:1])
    assert refused(out, out[1, 1].expand(5, 5))


def test_the_same_view() -> None:
    x = torch.zeros(3, 4)
    assert is_same_view(x, x[:])
    others = (x[1:], x.T, x.view(torch.int32), x.clone(), x.view(4, 3))
    assert not any(is_same_view(x, other) for other in others)
    # What a dimension of one entry steps over is nowhere.
    wide = torch.zeros(3, 16)[:, :8]
    assert is_same_view(wide[0:1], wide[0].unsqueeze(0))


def test_what_has_no_memory_of_its_own_is_apart_from_everything() -> None:
    with FakeTensorMode():
        x, out = torch.zeros(3, 4), torch.zeros(3, 4)
        require_apart("op", {"out": out}, {"x": x})
    x, out = torch.zeros(3, 4), torch.zeros(3, 4)

    def both(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        require_apart("op", {"out": out}, {"x": x})
        return x + out

    assert torch.equal(torch.func.functionalize(both)(x, out), x)
