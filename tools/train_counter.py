"""Train and check the two checkpoints that ship with the engine: a counter and a novice.

Both are one tiny Qwen3 over characters. Given "00310000,00310001,00310002," it goes on counting.
The *counter* is trained until greedy decoding makes no mistake over its whole context; the
*novice* is the same training stopped early, right about half of the time at temperature 1,
so that reinforcement learning has something to improve.

    python tools/train_counter.py counter --out DIR
    python tools/train_counter.py novice --out DIR
    python tools/train_counter.py check DIR --expect counter

Needs torch, transformers, tokenizers and safetensors, no network and nothing of the engine:
what is checked here is checked by code that shares nothing with it. A run is deterministic for
a seed, a device and a torch version; another machine gives other bits of equal quality. The
counter wants a GPU (minutes); the novice is made on one CPU core (a minute).

The stored weights are bf16, so the forward pass trains on weights rounded to bf16 while the
optimiser keeps float32 masters: rounding at the end then changes nothing.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence as SequenceABC
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

NUM_DIGITS = 8
NUMBER_LEN = NUM_DIGITS + 1  # Eight digits and the separator.
NUM_NUMBERS = 10**NUM_DIGITS  # Counting past the last one is never trained nor checked.
PROMPT_NUMBERS = 3
PROMPT_LEN = PROMPT_NUMBERS * NUMBER_LEN  # What is promised to determine all that follows.

SEPARATOR_ID, PAD_ID, BOS_ID, EOS_ID = 10, 11, 12, 13  # Ids 0 to 9 are the digits themselves.
TRUE_VOCAB_SIZE = 14
VOCAB_SIZE = 64  # Embedding rows; [14, 64) copy the digits, so an unmasked sampler reaches them.
MAX_POSITION_EMBEDDINGS = 4096
CONTEXT_NUMBERS = MAX_POSITION_EMBEDDINGS // NUMBER_LEN
GREEDY_NUMBERS = 230  # 2,070 tokens: what is decoded one by one.
IGNORED_LABEL = -100
# Right tokens end at a probability of 1 - 2e-6: without this at 1 - 1e-9, whose logarithm is 0.0
# in float32, and a log-probability that was computed could not be told from one that never was.
LABEL_SMOOTHING = 2e-6
DEVICE_HELP = "default: CUDA where there is one; the CPU for the novice"
NUM_WARMUP_STEPS = 20  # At the start of each phase.


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Optimiser steps on batches of one shape, the rate falling as a cosine after a warm-up."""

    num_steps: int
    batch_size: int
    num_numbers: int
    start_lr: float
    end_lr: float
    carry_share: float = 0.5  # Of the sequences, those placed across a long carry.
    stop_reward: float | None = None  # End the phase once `expected_reward` is this much.


PHASES = {
    "counter": (
        # Short sequences learn the algorithm, and see a long carry in every second row.
        Phase(num_steps=2000, batch_size=512, num_numbers=24, start_lr=3e-3, end_lr=5e-4),
        # The full context teaches attention to find the last number among 455.
        Phase(num_steps=2000, batch_size=32, num_numbers=CONTEXT_NUMBERS, start_lr=1e-3, end_lr=0),
    ),
    "novice": (
        Phase(
            num_steps=200,
            batch_size=64,
            num_numbers=2 * PROMPT_NUMBERS,
            start_lr=2e-3,
            end_lr=2e-3,
            stop_reward=0.48,
        ),
    ),
}


def build_config() -> Qwen3Config:
    """The architecture both checkpoints share: 598,000 parameters, tied embeddings."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="bfloat16",
    )


def build_tokenizer() -> Tokenizer:
    """One token per character and back without spaces; any other character is an error."""
    specials = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID}
    vocab = {str(digit): digit for digit in range(10)} | {",": SEPARATOR_ID} | specials
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def count_from(starts: Tensor, num_numbers: int) -> Tensor:
    """int64[num_starts] -> int64[num_starts, num_numbers * 9], the tokens of counting upward."""
    if int(starts.min()) < 0 or int(starts.max()) + num_numbers > NUM_NUMBERS:
        raise ValueError(f"starts must lie in [0, {NUM_NUMBERS - num_numbers}]")
    numbers = starts[:, None] + torch.arange(num_numbers)
    powers = 10 ** torch.arange(NUM_DIGITS - 1, -1, -1)
    digits = numbers[:, :, None] // powers % 10
    separators = torch.full((*numbers.shape, 1), SEPARATOR_ID)
    return torch.cat((digits, separators), dim=2).flatten(1)


def carry_starts(num_starts: int, num_numbers: int, generator: torch.Generator) -> Tensor:
    """Starts from which counting crosses a multiple of 10**m, m uniform in [1, 7]."""
    powers: Tensor = 10 ** torch.randint(1, NUM_DIGITS, (num_starts,), generator=generator)
    shares = torch.rand(num_starts, dtype=torch.float64, generator=generator)
    crossed: Tensor = powers * (1 + (shares * (NUM_NUMBERS // powers - 1)).long())
    before = torch.randint(1, num_numbers, (num_starts,), generator=generator)
    return (crossed - before).clamp(0, NUM_NUMBERS - num_numbers)


def uniform_starts(num_starts: int, num_numbers: int, generator: torch.Generator) -> Tensor:
    """Starts anywhere counting stays within eight digits."""
    return torch.randint(NUM_NUMBERS - num_numbers, (num_starts,), generator=generator)


def training_batch(phase: Phase, generator: torch.Generator) -> Tensor:
    """int64[batch_size, num_numbers * 9], every row aligned to a number at position 0."""
    num_carries = round(phase.batch_size * phase.carry_share)
    carries = carry_starts(num_carries, phase.num_numbers, generator)
    uniform = uniform_starts(phase.batch_size - num_carries, phase.num_numbers, generator)
    return count_from(torch.cat((carries, uniform)), phase.num_numbers)


def counting_loss(model: Qwen3ForCausalLM, token_ids: Tensor) -> Tensor:
    """Mean smoothed cross-entropy after the first number, over the real vocabulary."""
    with torch.autocast(token_ids.device.type, torch.bfloat16, enabled=token_ids.is_cuda):
        logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
    labels = token_ids[:, 1:].clone()
    labels[:, : NUM_DIGITS - 1] = IGNORED_LABEL  # The digits of the first number are a free choice.
    real_logits = logits[..., :TRUE_VOCAB_SIZE].float()
    return functional.cross_entropy(
        real_logits.flatten(0, 1), labels.flatten(), label_smoothing=LABEL_SMOOTHING
    )


def learning_rate(phase: Phase, step: int) -> float:
    """Linear warm-up from 0, then a cosine from `start_lr` to `end_lr`."""
    progress = max(0.0, (step - NUM_WARMUP_STEPS) / (phase.num_steps - NUM_WARMUP_STEPS))
    lr = phase.end_lr + (phase.start_lr - phase.end_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    return lr * min(1.0, (step + 1) / NUM_WARMUP_STEPS)


class RoundedTrainer:
    """AdamW on float32 masters; the model itself only ever holds their bf16 roundings."""

    __slots__ = ("_masters", "_model", "_optimizer", "_parameters")

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._masters = [parameter.detach().clone() for parameter in self._parameters]
        self._optimizer = torch.optim.AdamW(self._masters, betas=(0.9, 0.95), weight_decay=0.0)
        self._round()

    def step(self, token_ids: Tensor, lr: float) -> Tensor:
        """One update; returns the loss before it."""
        loss = counting_loss(self._model, token_ids)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._round()
        return loss.detach()

    @torch.no_grad()
    def _round(self) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master.bfloat16())


def train(phases: SequenceABC[Phase], seed: int, device: torch.device) -> Qwen3ForCausalLM:
    """The trained model, in float32 with values that bf16 represents exactly."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(build_config())
    torch.nn.Module.to(model, device, torch.float32)
    trainer = RoundedTrainer(model)
    began = time.perf_counter()
    for number, phase in enumerate(phases):
        for step in range(phase.num_steps):
            token_ids = training_batch(phase, generator).to(device)
            loss = trainer.step(token_ids, learning_rate(phase, step))
            if step % 100 == 0 or step + 1 == phase.num_steps:
                elapsed_s = time.perf_counter() - began
                print(f"phase {number} step {step:5d} loss {float(loss):.3e} {elapsed_s:7.1f} s")
            if phase.stop_reward is not None and expected_reward(model) >= phase.stop_reward:
                print(f"phase {number} stopped after {step + 1} steps, loss {float(loss):.3e}")
                break
    torch.use_deterministic_algorithms(False)
    return model


@torch.no_grad()
def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json and model.safetensors."""
    out.mkdir(parents=True, exist_ok=True)
    embedding = model.model.embed_tokens.weight
    for row in range(TRUE_VOCAB_SIZE, VOCAB_SIZE):
        embedding[row] = embedding[row % 10]
    tensors = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # Tied: the same storage as the embedding.
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    build_config().save_pretrained(out)
    special_ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    GenerationConfig.from_dict(special_ids).save_pretrained(out)
    build_tokenizer().save(str(out / "tokenizer.json"))


def load(directory: Path, device: torch.device, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """The checkpoint as transformers reads it, to be run in `dtype`."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(
        directory, dtype=dtype, local_files_only=True
    )
    torch.nn.Module.to(model, device)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Teacher-forced agreement; with nothing unsure, greedy decoding makes no mistake."""

    num_starts: int
    num_tokens: int  # Per start, prompt included.
    num_unsure: int  # Positions after the prompt where the right token has not above 1/2.
    mean_loss: float
    max_loss: float


@torch.no_grad()
def label_losses(model: Qwen3ForCausalLM, token_ids: Tensor) -> Tensor:
    """Negative log-likelihood of every token after the prompt, float64[batch, ...]."""
    logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
    real_logits = logits[:, PROMPT_LEN - 1 :, :TRUE_VOCAB_SIZE].double()
    return functional.cross_entropy(real_logits.mT, token_ids[:, PROMPT_LEN:], reduction="none")


def measure_accuracy(model: Qwen3ForCausalLM, starts: Tensor, num_numbers: int) -> Accuracy:
    """Compare every prediction after the prompt with counting, in the dtype of the model."""
    batches = [count_from(some, num_numbers).to(model.device) for some in torch.split(starts, 8)]
    losses = torch.cat([label_losses(model, token_ids) for token_ids in batches])
    return Accuracy(
        num_starts=len(starts),
        num_tokens=num_numbers * NUMBER_LEN,
        num_unsure=int((losses > math.log(2)).sum()),
        mean_loss=float(losses.mean()),
        max_loss=float(losses.max()),
    )


def expected_reward(model: Qwen3ForCausalLM, num_prompts: int = 256) -> float:
    """Mean share of the next three numbers that sampling at temperature 1 gets right.

    It is computed, not sampled: number k is right with the product of the probabilities of all
    tokens up to its end. Finding back after a wrong number is neglected.
    """
    starts = torch.arange(num_prompts) * (NUM_NUMBERS // num_prompts) + 7
    token_ids = count_from(starts, 2 * PROMPT_NUMBERS).to(model.device)
    log_probs = -label_losses(model, token_ids).cumsum(1)
    return float(log_probs[:, NUMBER_LEN - 1 :: NUMBER_LEN].exp().mean())


def measure_greedy_errors(model: Qwen3ForCausalLM, starts: Tensor, num_numbers: int) -> int:
    """Decode greedily, token by token through the KV cache; the number of wrong tokens."""
    token_ids = count_from(starts, num_numbers).to(model.device)
    prompts = token_ids[:, :PROMPT_LEN]
    options = {
        "do_sample": False,
        "max_new_tokens": token_ids.shape[1] - PROMPT_LEN,
        "suppress_tokens": list(range(TRUE_VOCAB_SIZE, VOCAB_SIZE)),
        "pad_token_id": PAD_ID,
    }
    outputs: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    return int((outputs != token_ids).sum())


def check_files(directory: Path) -> int:
    """Raise ValueError where the directory is not what the engine ships; its size in bytes."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "00310000,12345678,99999999,"
    ids = tokenizer.encode(text).ids
    if len(ids) != len(text) or tokenizer.decode(ids) != text:
        raise ValueError(f"{directory}: the tokenizer does not give back {text!r}, but {ids}")
    if tokenizer.get_vocab_size() != TRUE_VOCAB_SIZE:
        raise ValueError(f"{directory}: the tokenizer must know {TRUE_VOCAB_SIZE} tokens")
    embedding = load(directory, torch.device("cpu"), torch.bfloat16).model.embed_tokens.weight
    padding_rows = range(TRUE_VOCAB_SIZE, VOCAB_SIZE)
    if len(embedding) != VOCAB_SIZE or any(
        not torch.equal(embedding[row], embedding[row % 10]) for row in padding_rows
    ):
        raise ValueError(f"{directory}: embedding rows from {TRUE_VOCAB_SIZE} must copy digits")
    return sum(path.stat().st_size for path in directory.iterdir())


def check_counter(directory: Path, num_starts: int, num_numbers: int, device: torch.device) -> bool:
    """Whether every right token is the likeliest, in float32; bf16 is only reported."""
    generator = torch.Generator().manual_seed(1)
    families = {
        "range": torch.arange(num_starts) * 1_000_000 + 310_000,  # As many requests count at once.
        "carry": carry_starts(num_starts, num_numbers, generator),
        "uniform": uniform_starts(num_starts, num_numbers, generator),
    }
    num_unsure = 0
    for dtype in (torch.bfloat16, torch.float32):
        model = load(directory, device, dtype)
        for family, starts in families.items():
            accuracy = measure_accuracy(model, starts, num_numbers)
            print(json.dumps({"family": family, "dtype": str(dtype)} | asdict(accuracy)))
            num_unsure += accuracy.num_unsure if dtype == torch.float32 else 0
    num_decoded = min(num_numbers, GREEDY_NUMBERS)
    starts = torch.cat([starts[:8] for starts in families.values()])
    num_wrong = measure_greedy_errors(model, starts, num_decoded)
    greedy = {"num_tokens": num_decoded * NUMBER_LEN, "num_wrong": num_wrong}
    print(json.dumps({"decoding": "greedy", "num_starts": len(starts)} | greedy))
    return num_unsure + num_wrong == 0


def check(options: argparse.Namespace, device: torch.device) -> bool:
    """Print what was measured, one JSON object a line; whether the checkpoint is as expected."""
    directory: Path = options.directory
    reward = expected_reward(load(directory, device, torch.float32), num_prompts=1024)
    print(json.dumps({"size_bytes": check_files(directory), "reward_at_temperature_1": reward}))
    if options.expect == "novice":
        return 0.45 <= reward <= 0.55
    return check_counter(directory, options.starts, options.numbers, device)


def parse_arguments(arguments: SequenceABC[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    # Another seed gives another novice, from which the same RL recipe learns more or less.
    for name, seed, device in (("counter", 0, None), ("novice", 1, "cpu")):
        command = commands.add_parser(name, help=f"train the {name}")
        command.add_argument("--out", type=Path, required=True, help="directory to write")
        command.add_argument("--seed", type=int, default=seed)
        command.add_argument("--device", default=device, help=DEVICE_HELP)
    command = commands.add_parser("check", help="measure a checkpoint; exit 1 if it falls short")
    command.add_argument("directory", type=Path)
    command.add_argument("--expect", choices=sorted(PHASES), default="counter")
    command.add_argument("--starts", type=int, default=64, help="of each of three families")
    command.add_argument("--numbers", type=int, default=CONTEXT_NUMBERS, help="counted per start")
    command.add_argument("--device", help=DEVICE_HELP)
    return parser.parse_args(arguments)


def main(arguments: SequenceABC[str] | None = None) -> int:
    # Read by cuBLAS when it starts; without it a deterministic matmul is refused on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options = parse_arguments(arguments)
    has_gpu = torch.cuda.is_available()
    device = torch.device(options.device or ("cuda" if has_gpu else "cpu"))
    if options.command == "check":
        return 0 if check(options, device) else 1
    torch.set_num_threads(1)  # The order of a sum, and so its last bits, depends on their number.
    save(train(PHASES[options.command], options.seed, device), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
