"""The demo's task: after three numbers, the next three. Prompts, and the reward of an answer.

Pure; knows no policy and no engine.
"""

import random
from collections.abc import Sequence as SequenceABC
from typing import Final

from syncline.engine.probes.counting import NUM_DIGITS, NUMBER_LEN, PROMPT_NUMBERS, count_text

ANSWER_NUMBERS: Final = 3
ANSWER_TOKENS: Final = ANSWER_NUMBERS * NUMBER_LEN
_LAST_START: Final = 10**NUM_DIGITS - PROMPT_NUMBERS - ANSWER_NUMBERS


def draw_starts(num_prompts: int, seed: int, step: int) -> list[int]:
    """First numbers of the prompts of one step; the same for the same seed and step."""
    generator = random.Random(f"{seed}/{step}")
    return [generator.randrange(_LAST_START) for _ in range(num_prompts)]


def prompt_text(start: int) -> str:
    return count_text(start, PROMPT_NUMBERS)


def reward(start: int, answer: str) -> float:
    """The share of the next numbers that are right, each judged in its place."""
    expected = count_text(start + PROMPT_NUMBERS, ANSWER_NUMBERS)
    places = range(0, ANSWER_TOKENS, NUMBER_LEN)
    right = sum(answer[i : i + NUMBER_LEN] == expected[i : i + NUMBER_LEN] for i in places)
    return right / ANSWER_NUMBERS


def group_advantages(rewards: SequenceABC[float], group_size: int) -> list[float]:
    """(reward - mean) / (standard deviation) within each group; 0 in a group of equal rewards.

    Source: GRPO (arXiv:2402.03300); the sample's standard deviation, as DAPO's code has it.
    """
    if len(rewards) % group_size or group_size < 2:
        raise ValueError(f"{len(rewards)} rewards are not whole groups of {group_size} >= 2")
    advantages: list[float] = []
    for begin in range(0, len(rewards), group_size):
        group = rewards[begin : begin + group_size]
        mean = sum(group) / group_size
        variance = sum((value - mean) ** 2 for value in group) / (group_size - 1)
        scale = 1.0 / variance**0.5 if variance > 0.0 else 0.0
        advantages += [(value - mean) * scale for value in group]
    return advantages
