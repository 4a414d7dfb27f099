"""What is refused before a byte is written: manifests as a whole, tensors one by one."""

import pytest
import torch

from syncline.weight_sync import (
    DtypeMismatchError,
    DuplicateTensorError,
    IncompleteUpdateError,
    Manifest,
    ManifestError,
    NameTable,
    NonFiniteWeightError,
    NotInManifestError,
    ShapeMismatchError,
    SlotSource,
    TensorRefusedError,
    UnknownNameError,
    UnusableTensorError,
    Update,
    UpdateOptions,
    WeightSlot,
    manifest_of,
)
from syncline.weight_sync.tensors import non_finite_in
from syncline.weight_sync.testing import (
    IdentityEncoder,
    RecordingGuard,
    ScaledEncoder,
    counting,
    make_slot,
    snapshot,
    stored_bytes,
)

QKV = (
    SlotSource(name="q", region=((0, 2), (0, 2))),
    SlotSource(name="k", region=((2, 3), (0, 2))),
    SlotSource(name="v", region=((3, 4), (0, 2))),
)
FP32 = torch.float32


def the_table() -> NameTable:
    return NameTable(
        [
            make_slot("qkv", (4, 2), IdentityEncoder(), QKV),
            make_slot("norm", (2,), IdentityEncoder()),
            make_slot("embed", (4, 2), IdentityEncoder()),
        ],
        aliases={"lm_head": "embed"},
        ignored=["inv_freq"],
    )


def good_manifest() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "q": ((2, 2), FP32),
        "k": ((1, 2), torch.bfloat16),
        "v": ((1, 2), FP32),
        "norm": ((2,), FP32),
        "embed": ((4, 2), FP32),
        "inv_freq": ((9,), FP32),
    }


def begin(table: NameTable, manifest: Manifest | None = None) -> Update:
    return Update.begin(table, 1, guard=RecordingGuard(), manifest=manifest)


def test_a_manifest_with_every_kind_of_fault_reports_each_at_once() -> None:
    table = the_table()
    guard = RecordingGuard(table.slots.values())
    manifest = good_manifest()
    del manifest["v"], manifest["embed"]
    manifest["model.norm"] = ((2,), FP32)
    manifest["model.nrom"] = ((2,), FP32)
    manifest["q"] = ((2, 3), FP32)
    manifest["norm"] = ((2,), torch.int64)
    manifest["qkv"] = ((4, 2), FP32)
    with pytest.raises(ManifestError) as caught:
        Update.begin(table, 1, guard=guard, manifest=manifest)
    problems = caught.value.problems
    assert [type(problem) for problem in problems] == [
        ShapeMismatchError,
        DtypeMismatchError,
        UnknownNameError,
        UnknownNameError,
        DuplicateTensorError,
        IncompleteUpdateError,
    ]
    named = [problem.name for problem in problems if isinstance(problem, TensorRefusedError)]
    assert named == ["q", "norm", "model.norm", "model.nrom", "qkv"]
    missing = problems[-1]
    assert isinstance(missing, IncompleteUpdateError)
    assert [each.slot for each in missing.missing] == ["embed"]
    for word in ("6 problem(s)", "(2, 2), got (2, 3)", "int64", "model.nrom", "embed[0:4, 0:2]"):
        assert word in str(caught.value)
    assert guard.calls == []


@pytest.mark.parametrize("names", [["embed"], ["lm_head"], ["embed", "lm_head"]])
def test_an_alias_in_a_manifest_counts_as_what_it_names(names: list[str]) -> None:
    manifest = good_manifest()
    del manifest["embed"]
    update = begin(the_table(), {**manifest, **dict.fromkeys(names, ((4, 2), FP32))})
    assert update.version == 1


def test_a_manifest_may_spell_a_slot_fused_or_apart_but_not_both() -> None:
    fused = {name: entry for name, entry in good_manifest().items() if name not in "qkv"}
    fused["qkv"] = ((4, 2), FP32)
    begin(the_table(), fused)
    begin(the_table(), good_manifest())
    with pytest.raises(ManifestError, match="came twice"):
        begin(the_table(), {**fused, "k": ((1, 2), FP32)})


def test_a_wrong_prefix_on_every_name_is_reported_for_every_name_and_fast() -> None:
    slots = [make_slot(f"layers.{i}.weight", (1,), IdentityEncoder()) for i in range(300)]
    manifest = {f"module.layers.{i}.weight": ((1,), FP32) for i in range(300)}
    with pytest.raises(ManifestError, match=r"nearest: layers\.0\.weight") as caught:
        begin(NameTable(slots), manifest)
    problems = caught.value.problems
    unknown = [problem for problem in problems if isinstance(problem, UnknownNameError)]
    assert len(unknown) == 300
    assert [problem.nearest is not None for problem in unknown] == [True] * 20 + [False] * 280


def test_what_was_not_announced_or_differs_from_its_announcement_is_refused() -> None:
    table = the_table()
    update = begin(table, good_manifest())
    with pytest.raises(NotInManifestError, match="qkv"):
        update.put("qkv", counting((4, 2)))
    with pytest.raises(NotInManifestError, match="lm_head"):
        update.put("lm_head", counting((4, 2)))
    with pytest.raises(DtypeMismatchError, match="bfloat16 as announced"):
        update.put("k", counting((1, 2)))
    assert not update.live_bytes_written
    for name, (shape, dtype) in good_manifest().items():
        if name != "inv_freq":
            update.put(name, counting(shape).to(dtype))
    update.commit()


def test_a_name_that_was_announced_and_did_not_come_is_missing_even_if_no_byte_is() -> None:
    update = begin(the_table(), {**good_manifest(), "lm_head": ((4, 2), FP32)})
    for name, (shape, dtype) in good_manifest().items():
        update.put(name, counting(shape).to(dtype))
    with pytest.raises(IncompleteUpdateError, match="lm_head was announced") as caught:
        update.commit()
    assert caught.value.absent == ("lm_head",)
    update.put("lm_head", counting((4, 2)))
    update.commit()


def test_the_manifest_of_tensors_holds_their_shapes_and_refuses_a_name_twice() -> None:
    tensors = [("a", counting((2, 3))), ("b", counting(()).bfloat16())]
    assert manifest_of(tensors) == {"a": ((2, 3), FP32), "b": ((), torch.bfloat16)}
    with pytest.raises(DuplicateTensorError, match=r"a: .*in one manifest"):
        manifest_of([*tensors, ("a", counting((1,)))])


def test_a_tensor_of_the_wrong_shape_is_reported_as_that() -> None:
    update = begin(the_table())
    for tensor, part in (
        (counting((3, 2)), None),
        (counting((8,)), None),
        (counting((2, 4)), None),
        (counting((2, 2)), ((0, 1), (0, 2))),
    ):
        with pytest.raises(ShapeMismatchError, match=r"embed: shape .* must be \(") as caught:
            update.put("embed", tensor, part)
        assert caught.value.got == tuple(tensor.shape)
    assert not update.live_bytes_written


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sent", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_floats_are_converted_by_value(stored: torch.dtype, sent: torch.dtype) -> None:
    slot = make_slot("w", (2, 3), IdentityEncoder(stored))
    update = begin(NameTable([slot]))
    update.put("w", counting((2, 3)).to(sent))
    update.commit()
    assert slot.storage["weight"].float().equal(counting((2, 3)))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
    ],
    ids=str,
)
@pytest.mark.parametrize("encoder", [IdentityEncoder(), ScaledEncoder()], ids=["plain", "scaled"])
def test_what_is_no_value_of_a_float_slot_is_refused(
    dtype: torch.dtype, encoder: IdentityEncoder | ScaledEncoder
) -> None:
    """Integers are no weights, and 8-bit floats mean nothing without a scale from elsewhere."""
    slot = make_slot("w", (2, 2), encoder)
    before = snapshot([slot])
    update = begin(NameTable([slot]))
    with pytest.raises(DtypeMismatchError, match="at least 16 bits"):
        update.put("w", torch.ones(2, 2).to(dtype))
    assert snapshot([slot]) == before


@pytest.mark.parametrize("sent", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_8_bit_floats_are_taken_as_the_very_bytes_a_slot_stores(sent: torch.dtype) -> None:
    slot = make_slot("w", (2,), IdentityEncoder(torch.float8_e4m3fn))
    update = begin(NameTable([slot]))
    values = torch.tensor([3.0, -1.5]).to(sent)
    if sent == torch.float8_e4m3fn:
        update.put("w", values)
        update.commit()
        assert slot.storage["weight"].float().tolist() == [3.0, -1.5]
        return
    with pytest.raises(DtypeMismatchError):
        update.put("w", values)


def test_a_slot_of_integers_takes_exactly_its_own_dtype() -> None:
    slot = WeightSlot(
        name="map", logical_shape=(2,), encoder=IdentityEncoder(torch.int32),
        storage=IdentityEncoder(torch.int32).storage((2,)), is_floating=False,
    )  # fmt: skip
    update = begin(NameTable([slot]))
    for dtype in (torch.int64, torch.float32, torch.bool):
        with pytest.raises(DtypeMismatchError, match="int32"):
            update.put("map", torch.ones(2, dtype=dtype))
    update.put("map", torch.tensor([5, 6], dtype=torch.int32))
    update.commit()
    assert slot.storage["weight"].tolist() == [5, 6]


def test_a_slot_of_packed_floats_is_sent_as_floats() -> None:
    slot = make_slot("packed", (2,), IdentityEncoder(torch.uint8))
    update = begin(NameTable([slot]))
    with pytest.raises(DtypeMismatchError):
        update.put("packed", torch.ones(2, dtype=torch.uint8))
    update.put("packed", torch.tensor([2.0, 3.0]))
    update.commit()


class Wrapper(torch.Tensor):
    """A tensor whose elements are elsewhere, as a distributed one's are."""

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> None:
        raise AssertionError("nobody may read it")


def test_tensors_without_bytes_of_their_own_are_refused() -> None:
    slot = make_slot("w", (2, 2), IdentityEncoder())
    update = begin(NameTable([slot]))
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (2, 2), dtype=FP32)
    for tensor, why in (
        (torch.ones(2, 2, device="meta"), "meta tensor"),
        (torch.ones(2, 2).to_sparse(), "must be dense"),
        (wrapper, "is a Wrapper"),
        (slot.storage["weight"], "engine's own memory"),
        (slot.storage["weight"].t(), "engine's own memory"),
    ):
        with pytest.raises(UnusableTensorError, match=why):
            update.put("w", tensor)
    assert not update.live_bytes_written


@pytest.mark.parametrize("kind", ["transposed", "strided", "expanded", "parameter", "offset"])
def test_sources_may_lie_in_memory_as_they_like_and_are_never_written(kind: str) -> None:
    base = {
        "transposed": counting((3, 2)).t(),
        "strided": counting((4, 6))[::2, ::2],
        "expanded": counting((1, 3)).expand(2, 3),
        "parameter": torch.nn.Parameter(counting((2, 3))),
        "offset": counting((5, 3))[3:],
    }[kind]
    copy = base.detach().clone()
    for encoder in (IdentityEncoder(torch.bfloat16), ScaledEncoder()):
        slot = make_slot("w", (2, 3), encoder)
        update = begin(NameTable([slot]))
        update.put("w", base[:1], ((0, 1), (0, 3)))
        update.put("w", base[1:, 2:], ((1, 2), (2, 3)))
        update.put("w", base[1:, :2], ((1, 2), (0, 2)))
        update.commit()
        twin = make_slot("w", (2, 3), encoder)
        encoder.encode_into(twin.storage, copy.contiguous(), ((0, 2), (0, 3)))
        assert snapshot([slot]) == snapshot([twin])
    assert base.detach().equal(copy)


def test_an_encoder_for_one_rank_leaves_the_senders_tensor_alone() -> None:
    """A bias that one rank alone adds: the others store zeros, and the sender keeps its values."""

    class Zeros(IdentityEncoder):
        def encode_into(self, out, source, region):  # type: ignore[no-untyped-def]  # as the base
            super().encode_into(out, torch.zeros_like(source), region)

    bias = counting((3,))
    ranks = [make_slot("bias", (3,), IdentityEncoder()), make_slot("bias", (3,), Zeros())]
    for slot in ranks:
        slot.storage["weight"].fill_(9)
        for version in range(2):
            update = Update.begin(NameTable([slot]), version, guard=RecordingGuard())
            update.put("bias", bias)
            update.commit()
    total = ranks[0].storage["weight"] + ranks[1].storage["weight"]
    assert total.tolist() == bias.tolist() == [1, 2, 3]


@pytest.mark.parametrize("value", [1e6, -1e6, 65520.0])
def test_a_weight_that_overflows_where_it_is_stored_is_refused_by_name(value: float) -> None:
    slot = make_slot("w", (5, 3), IdentityEncoder(torch.float16))
    before = stored_bytes(slot)
    tensor = torch.ones(5, 3)
    tensor[3, 1] = value
    update = begin(NameTable([slot]))
    with pytest.raises(NonFiniteWeightError, match=r"w: .*infinity as torch\.float16") as caught:
        update.put("w", tensor)
    assert caught.value.dtype == torch.float16
    assert stored_bytes(slot) == before
    tensor[3, 1] = 65504.0
    update.put("w", tensor)
    update.commit()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, FP32, torch.bfloat16, torch.float16], ids=str)
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float, dtype: torch.dtype) -> None:
    slot = make_slot("w", (50, 3), IdentityEncoder())
    tensor = torch.ones(50, 3, dtype=dtype)
    tensor[31, 1] = value
    update = begin(NameTable([slot]))
    with pytest.raises(NonFiniteWeightError, match=r"w: .*NaN or infinity") as caught:
        update.put("w", tensor)
    assert caught.value.part == ((0, 50), (0, 3))
    assert not update.live_bytes_written
    update.put("w", torch.ones(50, 3))
    update.commit()


def test_the_check_for_finite_weights_can_be_left_out() -> None:
    slot = make_slot("w", (2,), IdentityEncoder())
    update = Update.begin(
        NameTable([slot]), 1, guard=RecordingGuard(), options=UpdateOptions(check_finite=False)
    )
    update.put("w", torch.tensor([torch.nan, torch.inf]))
    update.commit()
    assert slot.storage["weight"].isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bit_floats_have_a_nan_too(dtype: torch.dtype) -> None:
    assert non_finite_in(torch.ones(3, 2).to(dtype).t(), ()) is None
    assert non_finite_in(torch.tensor([1.0, torch.nan]).to(dtype), ()) is not None


def test_integers_and_nothing_are_finite() -> None:
    assert non_finite_in(torch.ones(3, dtype=torch.int64), ()) is None
    assert non_finite_in(torch.empty(0, 3), ()) is None
    assert non_finite_in(torch.tensor(1.0), ()) is None
    assert non_finite_in(torch.tensor(torch.inf), ()) is not None
