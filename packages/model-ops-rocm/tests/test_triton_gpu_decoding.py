"""On a GPU: a whole window in one graph, and rejection sampling over a real vocabulary."""

from dataclasses import fields

import pytest
import torch

from syncline.model_ops_rocm import (
    Advance,
    DecodeInputs,
    DecodeState,
    Rejection,
    VerifyDrafts,
    detect_arch,
    select,
)
from syncline.model_ops_rocm.reference.philox import uniforms

pytestmark = pytest.mark.gpu
DRAFTER = 7  # the purpose that these tests draw drafts with


def advance_of(backend: str) -> Advance:
    arch = detect_arch() if backend == "triton" else "cpu"
    return select("advance", backend=backend, arch=arch, dtype=torch.bfloat16)


def verify_of(backend: str) -> VerifyDrafts:
    arch = detect_arch() if backend == "triton" else "cpu"
    return select("verify_drafts", backend=backend, arch=arch, dtype=torch.float32)


class Window:
    """w steps of R rows: state, each step's inputs, and what the steps yield, all drawn."""

    def __init__(self, shape: tuple[int, int, int], seed: int, device: str) -> None:
        self.num_rows, self.num_queries, self.num_steps = shape
        generator = torch.Generator().manual_seed(seed)

        def drawn(low: int, high: int, *sizes: int) -> torch.Tensor:
            numbers = torch.randint(low, high, sizes, generator=generator, dtype=torch.int32)
            return numbers.to(device)

        num_rows, num_queries = self.num_rows, self.num_queries
        num_tokens = drawn(1, 200, num_rows)
        self.state = DecodeState(
            num_tokens_S=num_tokens,
            last_ids_S=drawn(0, 60, num_rows),
            is_alive_S=drawn(0, 9, num_rows) > 0,
            faults_S=drawn(0, 1, num_rows),
            min_num_tokens_S=num_tokens + drawn(0, 5, num_rows),
            max_num_tokens_S=num_tokens + drawn(1, 4 * self.num_steps * num_queries, num_rows),
            stop_ids_SE=drawn(0, 60, num_rows, 8),
            block_tables_SM=drawn(-1, 9_999, num_rows, 32),
            block_size=16,
            token_ids_SL=drawn(0, 1, num_rows, 512),
        )
        rows = torch.randperm(num_rows, generator=generator).int().to(device)
        starts = torch.arange(0, num_rows * num_queries + 1, num_queries).int().to(device)
        num_places = num_rows * num_queries
        self.inputs = [
            DecodeInputs(
                input_ids_T=drawn(0, 1, num_places),
                positions_T=drawn(0, 1, num_places),
                slot_mapping_T=drawn(0, 1, num_places),
                seq_lens_R=drawn(0, 1, num_rows),
                num_new_R=drawn(0, 1, num_rows),
                query_start_loc_R1=starts,
                rows_R=rows.clone(),
            )
            for _ in range(self.num_steps)
        ]
        self.drafts = [drawn(0, 6, num_rows, num_queries - 1) for _ in range(self.num_steps)]
        self.drawn = [drawn(0, 6, num_rows, num_queries) for _ in range(self.num_steps)]

    def run(self, advance: Advance, verify: VerifyDrafts) -> None:
        """As an engine would, with the model between the steps left out."""
        state, num_steps = self.state, self.num_steps
        advance(None, state, self.inputs[0], drafts_RK=self.drafts[0])
        for step in range(num_steps):
            tokens, num_accepted = verify(self.drafts[step], self.drawn[step])
            is_last = step == num_steps - 1
            following = step if is_last else step + 1
            advance(
                *(tokens, state, self.inputs[following]),
                num_accepted_R=num_accepted,
                drafts_RK=self.drafts[following],
                lays_out=not is_last,
            )

    def tensors(self) -> list[torch.Tensor]:
        values: list[DecodeState | DecodeInputs] = [self.state, *self.inputs]
        named = [getattr(value, field.name) for value in values for field in fields(value)]
        return [*(one for one in named if isinstance(one, torch.Tensor)), *self.drafts, *self.drawn]


@pytest.mark.parametrize("shape", [(256, 1, 8), (256, 4, 4), (5, 3, 3), (300, 2, 2)], ids=str)
def test_a_window_in_one_graph_is_the_reference_step_by_step(shape: tuple[int, int, int]) -> None:
    advance, verify = advance_of("triton"), verify_of("triton")
    Window(shape, 1, "cuda").run(advance, verify)  # compiled before it is captured
    captured = Window(shape, 1, "cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured.run(advance, verify)
    for seed in (2, 3):
        changed, expected = Window(shape, seed, "cuda"), Window(shape, seed, "cpu")
        for buffer, new in zip(captured.tensors(), changed.tensors(), strict=True):
            buffer.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        expected.run(advance_of("torch"), verify_of("torch"))
        for one, other in zip(captured.tensors(), expected.tensors(), strict=True):
            assert torch.equal(one.cpu(), other)
        assert 0 < int(expected.state.is_alive_S.sum()) < shape[0] or shape[0] < 10


def workspace_for(drafts: torch.Tensor, target: torch.Tensor, rejection: Rejection) -> torch.Tensor:
    num_bytes = verify_of("triton").workspace_bytes(drafts, target, rejection)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("is_certain", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rejection_over_a_real_vocabulary_chooses_as_the_reference_does(
    dtype: torch.dtype, is_certain: bool
) -> None:
    num_rows, num_drafts, num_ids = 48, 3, 151_936
    make = torch.Generator().manual_seed(0)
    target = torch.randn(num_rows, num_drafts + 1, num_ids, generator=make)
    target[..., :8] += 8.0
    own = (target[:, :num_drafts] + torch.randn(num_rows, num_drafts, num_ids, generator=make)).to(
        dtype
    )
    target = target.to(dtype)
    drafts = torch.randint(0, 8, (num_rows, num_drafts), generator=make)
    drafts[::7, 1] = -1

    def on(device: str) -> Rejection:
        return Rejection(
            seeds_R=torch.arange(num_rows, device=device) << 33,
            sample_index_R=torch.zeros(num_rows, dtype=torch.int32, device=device),
            positions_R=torch.arange(num_rows, device=device),
            draft_logits_RKV=None if is_certain else own.to(device),
            temperature_R=torch.full((num_rows,), 0.8, device=device),
        )

    given = drafts.cuda(), target.cuda()
    found = verify_of("triton")(
        *given, rejection=on("cuda"), workspace=workspace_for(*given, on("cuda"))
    )
    expected = verify_of("torch")(drafts, target, rejection=on("cpu"))
    # One row in thousands may draw within a rounding of an edge.
    same = (found[0].cpu() == expected[0]).all(dim=1)
    assert int(same.sum()) >= num_rows - 1
    assert len(set(expected[1].tolist())) > 2


def test_by_statistics_every_token_is_distributed_as_the_target() -> None:
    num_rows, num_drafts, num_ids = 400_000, 2, 5
    make = torch.Generator().manual_seed(0)
    one = torch.randn(num_drafts + 1, num_ids, generator=make)
    two = torch.randn(num_drafts, num_ids, generator=make)
    p, q = one.double().softmax(-1), two.double().softmax(-1)
    seeds, samples = torch.arange(num_rows) * 7_919, torch.zeros(num_rows, dtype=torch.int64)
    drawn = [uniforms(seeds, samples, samples + place, DRAFTER) for place in range(num_drafts)]
    chosen = [torch.searchsorted(one.cumsum(0), u) for one, u in zip(q, drawn, strict=True)]
    drafts = torch.stack(chosen, dim=1).clamp(max=num_ids - 1)
    rejection = Rejection(
        seeds_R=seeds.cuda(),
        sample_index_R=samples.cuda(),
        positions_R=samples.cuda(),
        draft_logits_RKV=two.cuda().expand(num_rows, -1, -1),
    )
    given = drafts.cuda(), one.cuda().expand(num_rows, -1, -1)
    found = verify_of("triton")(
        *given, rejection=rejection, workspace=workspace_for(*given, rejection)
    )
    tokens, num_accepted = (result.cpu() for result in found)
    for place in range(num_drafts + 1):
        has_token = num_accepted >= place
        expected = p[place] * int(has_token.sum())
        counts = torch.bincount(tokens[has_token, place], minlength=num_ids)
        # 4 degrees of freedom: above 23.5 once in ten thousand.
        assert float(((counts - expected) ** 2 / expected).sum()) < 23.5
