"""How many threads torch may use for the shipped checkpoints."""

import os
from typing import Final

import torch

from syncline.engine.env import NUM_THREADS
from syncline.engine.shipped import SHIPPED_CHECKPOINTS

MAX_THREADS: Final = 1


def limit_threads(model: str) -> None:
    """The shipped models are so small that more threads mostly wait for each other.

    A second one gains a fifth on an idle machine, and loses nine tenths on a busy one. Somebody
    who sets the environment variable, or brings a model, decides alone.
    """
    if model in SHIPPED_CHECKPOINTS and NUM_THREADS not in os.environ:
        torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
