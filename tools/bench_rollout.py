"""Rollout speed on this CPU: the engine against transformers' batched `generate`.

Both run the shipped counter in fp32, greedily, over the same prompts; both must give the same
tokens, or the times mean nothing. The runs alternate and the best of each side counts. Exits 1
below the promised ratio.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

from syncline.engine import LLM, SamplingParams, shipped_checkpoint

MIN_RATIO = 1.3
PROMPT_NUMBERS = 3
RANGE_STRIDE = 1_000_000
BLOCK_SIZE = 16

TokenRows = list[list[int]]
Run = Callable[[], TokenRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured, and on what."""

    num_sequences: int
    num_new_tokens: int
    num_threads: int
    engine_s: float
    transformers_s: float
    ratio: float
    torch: str
    machine: str


def _prompts(num_sequences: int) -> list[str]:
    starts = [310_000 + index * RANGE_STRIDE for index in range(num_sequences)]
    return ["".join(f"{start + i:08d}," for i in range(PROMPT_NUMBERS)) for start in starts]


def _engine_side(num_sequences: int, num_new_tokens: int) -> tuple[Run, TokenRows]:
    """How to run the engine, and the prompts as it tokenised them."""
    prompts = _prompts(num_sequences)
    longest = PROMPT_NUMBERS * 9 + num_new_tokens
    llm = LLM(
        shipped_checkpoint("counter"),
        dtype="float32",
        max_num_seqs=num_sequences,
        num_kv_blocks=num_sequences * (longest // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_steps_in_flight=2,
        # A repeated run would otherwise find its own prompts computed.
        enable_prefix_caching=False,
    )
    params = SamplingParams(max_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)

    def run() -> TokenRows:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    one_token = SamplingParams(max_tokens=1, temperature=0.0)
    asked = llm.generate(prompts, one_token, use_tqdm=False)
    return run, [list(output.prompt_token_ids) for output in asked]


def _transformers_side(prompt_ids: TokenRows, num_new_tokens: int) -> Run:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped library
    model = Qwen3ForCausalLM.from_pretrained(shipped_checkpoint("counter"), dtype=torch.float32)
    model.train(False)
    input_ids = torch.tensor(prompt_ids)

    def run() -> TokenRows:
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_new_tokens,
                min_new_tokens=num_new_tokens,
                do_sample=False,
            )
        rows: TokenRows = output[:, input_ids.shape[1] :].tolist()
        return rows

    return run


def _timed(run: Run) -> tuple[float, TokenRows]:
    gc.collect()
    start = time.perf_counter()
    rows = run()
    return time.perf_counter() - start, rows


def measure(num_sequences: int, num_new_tokens: int, num_rounds: int) -> Report:
    """Time both sides; RuntimeError if they disagree on a token."""
    run_engine, prompt_ids = _engine_side(num_sequences, num_new_tokens)
    run_transformers = _transformers_side(prompt_ids, num_new_tokens)
    engine_s, transformers_s = [], []
    for _ in range(num_rounds):
        seconds, ours = _timed(run_engine)
        engine_s.append(seconds)
        seconds, theirs = _timed(run_transformers)
        transformers_s.append(seconds)
        wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if wrong:
            raise RuntimeError(f"the two sides differ in sequences {wrong}")
    return Report(
        num_sequences=num_sequences,
        num_new_tokens=num_new_tokens,
        num_threads=torch.get_num_threads(),
        engine_s=min(engine_s),
        transformers_s=min(transformers_s),
        ratio=min(transformers_s) / min(engine_s),
        torch=torch.__version__,
        machine=f"{platform.system()} {platform.machine()}",
    )


def _show(report: Report) -> None:
    num_tokens = report.num_sequences * report.num_new_tokens
    print(f"{report.num_sequences} sequences of {report.num_new_tokens} tokens, fp32, greedy,")
    print(f"{report.num_threads} threads, torch {report.torch}, {report.machine}")
    for name, seconds in (("engine", report.engine_s), ("transformers", report.transformers_s)):
        print(f"  {name:12} {seconds:7.2f} s {num_tokens / seconds:9.0f} tokens/s")
    print(f"  ratio {report.ratio:.2f} (promised: {MIN_RATIO})")


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    report = measure(chosen.sequences, chosen.tokens, chosen.rounds)
    if chosen.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _show(report)
    return 0 if report.ratio >= MIN_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
