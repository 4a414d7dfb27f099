"""The recorded store: a replay is the step again on the storages of the capture, right or stale."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from syncline.graph_lifecycle import (
    CaptureError,
    PlainArena,
    PoisonArena,
    RecordedStore,
    StaleGraphError,
    StepFunction,
    Tag,
    UncapturableOpError,
    UnknownGraphError,
)
from syncline.graph_lifecycle.testing import TinyStep, rebind

Mode = Callable[[], AbstractContextManager[object]]
MODES: list[Mode] = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.fixture
def step() -> TinyStep:
    step = TinyStep(PoisonArena())
    step.load(seed=0)
    return step


def replay_and_eager(
    store: RecordedStore, step: TinyStep, seed: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Output and KV of a replay and of the eager step, from the same blank KV."""
    inputs = step.inputs(seed)
    step.kv.zero_()
    replayed = store.replay("g", inputs)["out"].clone(), step.kv.clone()
    step.kv.zero_()
    eager = step(inputs)["out"], step.kv.clone()
    return replayed, eager


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.isnan().any()


@pytest.mark.parametrize("replay_mode", MODES)
@pytest.mark.parametrize("capture_mode", MODES)
def test_a_replay_equals_the_eager_step_after_the_inputs_change(
    step: TinyStep, capture_mode: Mode, replay_mode: Mode
) -> None:
    store = RecordedStore()
    with capture_mode():
        store.capture("g", step, step.inputs(seed=1))
    with replay_mode():
        for seed in (2, 3, 1):
            assert_same(*replay_and_eager(store, step, seed))


def test_a_replay_sees_weights_that_were_updated_in_place(step: TinyStep) -> None:
    store = RecordedStore()
    store.capture("g", step, step.inputs(seed=1))
    (old, _), _ = replay_and_eager(store, step, 2)
    step.load(seed=9)
    got, expected = replay_and_eager(store, step, 2)
    assert_same(got, expected)
    assert not torch.equal(got[0], old)


@pytest.mark.parametrize("cut", ["set_", "data"])
def test_a_replay_reads_the_old_bytes_once_the_storage_was_replaced(
    step: TinyStep, cut: str
) -> None:
    store = RecordedStore()
    store.capture("g", step, step.inputs(seed=1))
    before = replay_and_eager(store, step, 2)[0]
    replacement = step.up + 1
    if cut == "set_":
        rebind(step.up, replacement)
    else:
        step.up.data = replacement
    stale, eager = replay_and_eager(store, step, 2)
    assert_same(stale, before)
    assert not torch.equal(stale[0], eager[0])


def test_a_replay_reads_nan_while_the_memory_sleeps_and_new_bytes_at_the_kept_address() -> None:
    arena = PoisonArena()
    step = TinyStep(arena)
    step.load(seed=0)
    store = RecordedStore()
    store.capture("g", step, step.inputs(seed=1))
    receipt = arena.release(Tag.WEIGHTS)
    assert store.replay("g", step.inputs(seed=2))["out"].isnan().all()
    arena.restore(receipt)
    assert store.replay("g", step.inputs(seed=2))["out"].isnan().all()
    step.load(seed=0)
    assert_same(*replay_and_eager(store, step, 2))


@pytest.mark.parametrize("tag", [Tag.WEIGHTS, Tag.KV_CACHE])
def test_a_replay_reads_nan_for_ever_after_the_memory_moved(tag: Tag) -> None:
    arena = PoisonArena(move_on_restore=True)
    step = TinyStep(arena)
    step.load(seed=0)
    store = RecordedStore()
    store.capture("g", lambda i: {"out": step.kv.sum(0) + step.up.sum(0)}, {})
    arena.restore(arena.release(tag))
    step.load(seed=0)
    assert not (step.kv.sum(0) + step.up.sum(0)).isnan().any()
    assert store.replay("g", {})["out"].isnan().all()


def test_a_stale_replay_writes_kv_where_nobody_reads_it() -> None:
    arena = PoisonArena(move_on_restore=True)
    step = TinyStep(arena)
    step.load(seed=0)
    store = RecordedStore()
    store.capture("g", step, step.inputs(seed=1))
    arena.restore(arena.release(Tag.KV_CACHE))
    step.load(seed=0)
    store.replay("g", step.inputs(seed=2))
    assert step.kv.count_nonzero() == 0
    step(step.inputs(seed=2))
    assert step.kv.count_nonzero() > 0


def test_a_replay_on_memory_that_is_really_gone_is_an_error_and_no_crash() -> None:
    arena = PlainArena()
    step = TinyStep(arena)
    step.load(seed=0)
    store = RecordedStore()
    store.capture("g", step, step.inputs(seed=1))
    receipt = arena.release(Tag.KV_CACHE)
    with pytest.raises(StaleGraphError, match="was freed"):
        store.replay("g", step.inputs(seed=2))
    arena.restore(receipt)
    with pytest.raises(StaleGraphError, match="was freed"):
        store.replay("g", step.inputs(seed=2))


def test_the_capture_returns_every_tensor_that_it_reads_or_writes_outside(step: TinyStep) -> None:
    store = RecordedStore()
    outside = store.capture("g", step, step.inputs(seed=1))
    assert {id(t) for t in outside} == {id(t) for t in (step.up, step.down, step.kv, step.scale)}


def test_outputs_are_the_graphs_own_buffers_until_its_next_replay(step: TinyStep) -> None:
    store = RecordedStore()
    store.capture("g", lambda i: {"x": i["x"], "kv": step.kv, "twice": i["x"] * 2}, step.inputs(1))
    first = store.replay("g", step.inputs(2))
    kept = first["twice"].clone()
    second = store.replay("g", step.inputs(3))
    for name in ("x", "kv", "twice"):
        assert second[name] is first[name]
    assert not torch.equal(kept, second["twice"])
    assert second["kv"].data_ptr() != step.kv.data_ptr()
    assert torch.equal(second["kv"], step.kv)


def test_inputs_are_copied_so_the_callers_tensors_may_change_or_go(step: TinyStep) -> None:
    store = RecordedStore()
    given = step.inputs(1)
    store.capture("g", lambda i: {"y": i["x"] + 1}, {"x": given["x"]})
    given["x"].fill_(7)
    assert store.replay("g", {"x": given["x"]})["y"].eq(8).all()
    later = given["x"].clone()
    out = store.replay("g", {"x": later})
    later.fill_(0)
    assert out["y"].eq(8).all()


def test_packed_fp4_is_recorded_in_the_deterministic_mode_of_pytorch() -> None:
    """Which fills what it allocates, and cannot fill packed fp4."""
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4)
    store = RecordedStore()

    def turned(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"out": inputs["codes"].view(torch.uint8) + 1}

    torch.use_deterministic_algorithms(True)
    try:
        store.capture("g", turned, {"codes": codes.view(torch.float4_e2m1fn_x2)})
        again = {"codes": (codes + 5).view(torch.float4_e2m1fn_x2)}
        assert torch.equal(store.replay("g", again)["out"], codes + 6)
    finally:
        torch.use_deterministic_algorithms(False)


def test_views_inplace_ops_and_several_results_are_replayed() -> None:
    state = torch.zeros(6)

    def fn(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        x = inputs["x"]
        view = state[2:4]
        view += x[:2]
        state.view(3, 2)[0].copy_(x[2:])
        values, indices = torch.topk(x, 2)
        low, high = torch.chunk(x, 2)
        scratch = torch.zeros(4).scatter_(0, indices, values)
        x.mul_(2)
        return {"scratch": scratch, "sum": low + high, "stack": torch.stack([low, high])}

    store = RecordedStore()
    store.capture("g", fn, {"x": torch.zeros(4)})
    x = torch.tensor([1.0, 4.0, 3.0, 2.0])
    out = store.replay("g", {"x": x})
    assert state.tolist() == [3, 2, 1, 4, 0, 0]
    assert out["scratch"].tolist() == [0, 4, 3, 0]
    assert out["sum"].tolist() == [8, 12]
    assert out["stack"].tolist() == [[2, 8], [6, 4]]
    assert x.tolist() == [1, 4, 3, 2]
    store.replay("g", {"x": x})
    assert state.tolist() == [3, 2, 2, 8, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_kv_cache_made_in_inference_mode_is_written_by_replays(mode: Mode) -> None:
    with torch.inference_mode():
        kv = torch.zeros(4, 2)
    store = RecordedStore()

    def fn(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        kv.index_copy_(0, inputs["slots"], inputs["rows"])
        return {"all": kv}

    with torch.inference_mode():
        store.capture("g", fn, {"slots": torch.tensor([0]), "rows": torch.ones(1, 2)})
    with mode():
        store.replay("g", {"slots": torch.tensor([2]), "rows": torch.full((1, 2), 5.0)})
    assert kv.tolist() == [[1, 1], [0, 0], [5, 5], [0, 0]]


def test_parameters_that_require_gradients_are_read_without_a_tape() -> None:
    weight = torch.nn.Parameter(torch.eye(2))
    store = RecordedStore()
    outside = store.capture("g", lambda i: {"y": i["x"] @ weight}, {"x": torch.ones(1, 2)})
    assert [t is weight for t in outside] == [True]
    with torch.no_grad():
        weight.mul_(3)
    out = store.replay("g", {"x": torch.ones(1, 2)})["y"]
    assert out.tolist() == [[3, 3]] and not out.requires_grad


def test_attention_without_dropout_is_captured(step: TinyStep) -> None:
    def fn(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        q = inputs["q"]
        return {"o": functional.scaled_dot_product_attention(q, q, q, is_causal=True)}

    store = RecordedStore()
    store.capture("g", fn, {"q": torch.zeros(1, 2, 4, 8)})
    q = torch.randn(1, 2, 4, 8)
    assert torch.equal(store.replay("g", {"q": q})["o"], fn({"q": q})["o"])


REFUSED: dict[str, tuple[StepFunction, str]] = {
    "item": (lambda i: {"y": i["x"] * i["x"].sum().item()}, "aten._local_scalar_dense"),
    "float": (lambda i: {"y": i["x"] * float(i["x"][0])}, "aten._local_scalar_dense"),
    "bool": (lambda i: {"y": i["x"] if i["x"].any() else -i["x"]}, "aten._local_scalar_dense"),
    "int": (lambda i: {"y": i["x"][: int(i["x"].sum())]}, "aten._local_scalar_dense"),
    "tolist": (lambda i: {"y": torch.tensor(i["x"].tolist())}, "Tensor.tolist"),
    "numpy": (lambda i: {"y": torch.from_numpy(i["x"].numpy())}, "Tensor.numpy"),
    "cpu": (lambda i: {"y": i["x"].cpu()}, "Tensor.cpu"),
    "data_ptr": (lambda i: {"y": i["x"] + i["x"].data_ptr()}, "Tensor.data_ptr"),
    "equal": (lambda i: {"y": i["x"] * torch.equal(i["x"], i["x"])}, "aten.equal"),
    "allclose": (lambda i: {"y": i["x"] * torch.allclose(i["x"], i["x"])}, "aten."),
    "nonzero": (lambda i: {"y": i["x"].nonzero()}, "aten.nonzero"),
    "where": (lambda i: {"y": torch.where(i["x"] > 0)[0]}, "aten.nonzero"),
    "mask": (lambda i: {"y": i["x"][i["x"] > 0]}, "aten.index.Tensor"),
    "mask_write": (lambda i: {"y": i["x"].index_put((i["x"] > 0,), i["x"])}, "aten.index_put"),
    "masked_select": (lambda i: {"y": i["x"].masked_select(i["x"] > 0)}, "aten.masked_select"),
    "unique": (lambda i: {"y": torch.ops.aten._unique2(i["x"])[0]}, "aten._unique2"),
    "rand": (lambda i: {"y": torch.rand(3) + i["x"]}, "aten.rand"),
    "multinomial": (lambda i: {"y": torch.multinomial(i["x"] + 1, 1)}, "aten.multinomial"),
    "dropout": (lambda i: {"y": functional.dropout(i["x"], training=True)}, "dropout|bernoulli"),
    "resize": (lambda i: {"y": (i["x"] * 1).resize_(2)}, "aten.resize_"),
    "set": (lambda i: {"y": (i["x"] * 1).set_(i["x"].untyped_storage())}, "aten.set_"),
    "meta": (lambda i: {"y": i["x"].to("meta")}, "aten._to_copy"),
    "sparse": (lambda i: {"y": torch.eye(3).to_sparse() @ i["x"]}, "aten."),
    "number": (lambda i: {"y": 3}, "output 'y'"),  # type: ignore[dict-item]  # wrong on purpose
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_cannot_be_repeated_is_refused_by_the_name_of_its_op(
    name: str, mode: Mode
) -> None:
    fn, op = REFUSED[name]
    store = RecordedStore("decode")
    with mode(), pytest.raises(UncapturableOpError, match=op) as caught:
        store.capture("g", fn, {"x": torch.ones(3)})
    assert (caught.value.key, caught.value.store) == ("g", "decode")
    assert isinstance(caught.value, CaptureError)
    assert store.keys == () and store.num_bytes == 0


def test_a_step_that_swallows_the_refusal_is_refused_all_the_same() -> None:
    def fn(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        try:
            return {"y": inputs["x"] * inputs["x"].max().item()}
        except Exception:  # noqa: BLE001 a careless step, on purpose
            return {"y": inputs["x"]}

    def fn_with_method(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        try:
            return {"y": torch.tensor(inputs["x"].tolist())}
        except Exception:  # noqa: BLE001 a careless step, on purpose
            return {"y": inputs["x"]}

    for swallowing in (fn, fn_with_method):
        with pytest.raises(UncapturableOpError):
            RecordedStore().capture("g", swallowing, {"x": torch.ones(3)})


def test_integer_indexing_and_masked_fill_have_fixed_shapes_and_are_captured() -> None:
    def fn(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        x, index = inputs["x"], inputs["index"]
        picked = x[index, None] + torch.zeros(3).index_put((index,), x[index])[index]
        return {"y": picked.masked_fill(picked > 4, 0.0)}

    store = RecordedStore()
    store.capture("g", fn, {"x": torch.zeros(3), "index": torch.tensor([0, 1])})
    given = {"x": torch.tensor([1.0, 2.0, 3.0]), "index": torch.tensor([2, 0])}
    assert torch.equal(store.replay("g", given)["y"], fn(given)["y"])


def test_an_error_of_the_step_passes_through_and_leaves_nothing() -> None:
    def fn(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        raise RuntimeError("the step is broken")

    store = RecordedStore()
    with pytest.raises(RuntimeError, match="the step is broken"):
        store.capture("g", fn, {"x": torch.ones(3)})
    assert store.keys == ()
    store.capture("g", lambda i: {"y": i["x"] + 1}, {"x": torch.ones(3)})
    assert (torch.ones(3) + 1).sum() == 6  # No mode was left on the stack.


def test_wrong_inputs_are_refused_by_name() -> None:
    store = RecordedStore()
    store.capture("g", lambda i: {"y": i["a"] + i["b"]}, {"a": torch.ones(2), "b": torch.ones(2)})
    good = {"a": torch.ones(2), "b": torch.ones(2)}
    for bad, message in [
        ({"a": torch.ones(2)}, r"inputs must be \['a', 'b'\], got \['a'\]"),
        (good | {"c": torch.ones(2)}, r"got \['a', 'b', 'c'\]"),
        (good | {"b": torch.ones(1)}, r"inputs\['b'\] must be torch.float32 \(2,\)"),
        (good | {"b": torch.ones(2).long()}, r"got torch.int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            store.replay("g", bad | {"a": torch.full((2,), 9.0)})
    assert store.replay("g", good)["y"].tolist() == [2, 2]


def test_keys_are_unique_known_and_forgotten() -> None:
    store = RecordedStore()
    for key in ("a", ("decode", 8)):
        store.capture(key, lambda i: {"y": i["x"] + 1}, {"x": torch.ones(4)})
    assert store.keys == ("a", ("decode", 8))
    assert store.num_bytes == 2 * (16 + 16)
    with pytest.raises(ValueError, match="'a' is captured already"):
        store.capture("a", lambda i: {"y": i["x"]}, {"x": torch.ones(4)})
    store.discard("a")
    store.discard("a")
    with pytest.raises(UnknownGraphError) as caught:
        store.replay("a", {"x": torch.ones(4)})
    assert (caught.value.key, caught.value.known) == ("a", (("decode", 8),))
    assert store.num_bytes == 32
