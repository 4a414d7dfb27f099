"""The demo's trainer: transformers' Qwen3, clipped policy gradient, AdamW; no code of the engine's.

Scores every token exactly as it was sampled: temperature 1, padded vocabulary rows masked. The
padded rows of the tied embedding are parameters like all others, and are sent like all others.

Source: DAPO (arXiv:2503.14476): the asymmetric clip, the mean over tokens, and that groups of equal
rewards are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from syncline.engine.rl.mismatch import Mismatch, measure_mismatch

CLIP_LOW: Final = 0.2
CLIP_HIGH: Final = 0.28
MAX_GRAD_NORM: Final = 1.0
_SCORE_ROWS: Final = 128  # Rows per forward when nothing is trained, to bound memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """num_passes over a step's samples, each as num_shares updates on a random share of them."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    num_passes: int = 2
    num_shares: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """One step's samples; B samples of R answer tokens after P prompt tokens.

    token_ids   int64[B, P + R]
    logprobs    float64[B, R], as the engine recorded them
    advantages  float32[B]
    """

    token_ids: Tensor
    num_prompt_tokens: int
    logprobs: Tensor
    advantages: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """mismatch is measured before the first update, with the weights that sampled.

    num_trained  samples that had an advantage; 0: nothing was learnt.
    """

    mismatch: Mismatch
    num_trained: int


class Trainer:
    """Holds the policy; `train` improves it, `named_tensors` hands it over."""

    __slots__ = ("_config", "_generator", "_model", "_optimizer", "_true_vocab_size")

    def __init__(self, checkpoint: str, true_vocab_size: int, config: TrainerConfig) -> None:
        """Reads a local checkpoint directory; never asks a network."""
        self._config = config
        self._true_vocab_size = true_vocab_size
        self._generator = torch.Generator().manual_seed(config.seed)
        self._model = Qwen3ForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, local_files_only=True
        )
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.lr, betas=config.betas, weight_decay=0.0
        )

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under the name a checkpoint has for it, tied ones under both names."""
        for name, tensor in self._model.state_dict().items():
            yield name, tensor.detach()

    def train(self, rollouts: Rollouts) -> TrainReport:
        """A few clipped updates on the samples that their group gives an advantage."""
        old = self.score(rollouts.token_ids, rollouts.num_prompt_tokens)
        mismatch = measure_mismatch(old, rollouts.logprobs)
        # A group of equal rewards has nothing to say and would only thin out the mean.
        rows = rollouts.advantages.nonzero().squeeze(-1)
        for _ in range(self._config.num_passes):
            order = torch.randperm(len(rows), generator=self._generator)
            for share in rows[order].tensor_split(self._config.num_shares):
                if len(share):
                    self._update(rollouts, old, share)
        return TrainReport(mismatch=mismatch, num_trained=len(rows))

    @torch.no_grad()
    def score(self, token_ids: Tensor, num_prompt_tokens: int) -> Tensor:
        """float32[B, R]: the logprob of every answer token."""
        parts = torch.split(token_ids, _SCORE_ROWS)
        return torch.cat([self._logprobs(part, num_prompt_tokens) for part in parts])

    def _logprobs(self, token_ids: Tensor, num_prompt_tokens: int) -> Tensor:
        output = self._model(input_ids=token_ids[:, :-1], use_cache=False)
        logits: Tensor = output.logits[:, num_prompt_tokens - 1 :].float()
        # A padded row must not be in the normaliser: the engine never samples it.
        masked = logits.clone()
        masked[..., self._true_vocab_size :] = float("-inf")
        chosen = token_ids[:, num_prompt_tokens:, None]
        return masked.log_softmax(-1).gather(-1, chosen).squeeze(-1)

    def _update(self, rollouts: Rollouts, old: Tensor, rows: Tensor) -> None:
        new = self._logprobs(rollouts.token_ids[rows], rollouts.num_prompt_tokens)
        loss = clipped_loss(new, old[rows], rollouts.advantages[rows])
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()


def clipped_loss(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """Mean over tokens of the pessimistic, clipped surrogate. new, old: [B, R]; advantages: [B]."""
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1.0 - CLIP_LOW, 1.0 + CLIP_HIGH)
    weights = advantages[:, None]
    return -torch.minimum(ratio * weights, clipped * weights).mean()
