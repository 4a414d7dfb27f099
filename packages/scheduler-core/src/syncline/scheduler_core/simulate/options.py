"""The command's options, their limits, and the presets. Touches no file and prints only help.

A bad option ends with exit status 2 and one line that names the option, the value and its limit.
"""

import argparse
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import Final, NoReturn

from syncline.scheduler_core.simulate.lengths import Lengths, parse_lengths
from syncline.scheduler_core.simulate.workload import Arrivals, parse_arrivals

# What is known of the run that the published figures are of: 768 requests, both pools, about
# 650,000 output tokens, and prefill / decode of 0.16 without preemption. That makes prompts of 135
# and outputs of 846 tokens on average. Assumed: their spread, and the engine's defaults of 512
# sequences and 16,384 tokens per step.
PRESETS: Final[dict[str, dict[str, str]]] = {
    "published": {
        "num_requests": "768",
        "num_blocks": "4675,34164",
        "block_size": "16",
        "prompt_len": "68-202",
        "output_len": "423-1269",
        "max_num_seqs": "512",
        "max_num_batched_tokens": "16384",
        "max_model_len": "4096",
        "depth": "2",
    },
}

_DESCRIPTION = "Run a workload through the scheduler without a device, and say what it did."
_EPILOG = (
    "Lengths: 135 | 64-206 | geometric:846 | lognormal:846,0.8 (mean, sigma), "
    "or alternatives joined by '|'."
)


class OneLineParser(argparse.ArgumentParser):
    """Errors are one line; the usage is for those who ask."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def whole_number(minimum: int, maximum: int = 10**9) -> Callable[[str], int]:
    """A converter for argparse."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number between {minimum} and {maximum}, got {text!r}"
            )
        return value

    return convert


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(whole_number(1, 10**8)(part) for part in text.split(","))


def _lengths(text: str) -> Lengths:
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _arrivals(text: str) -> Arrivals:
    try:
        return parse_arrivals(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, got {text!r}")
    return value


def _check_interval(text: str) -> int:
    if text in ("every", "none"):
        return int(text == "every")
    return whole_number(1)(text)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--num-requests", type=whole_number(1, 10**7), default="768", metavar="N")
    add("--prompt-len", type=_lengths, default="68-202", metavar="LENGTHS", help="tokens")
    add("--output-len", type=_lengths, default="423-1269", metavar="LENGTHS", help="tokens")
    add(
        "--max-tokens",
        type=whole_number(1),
        metavar="N",
        help="output tokens that the scheduler is told to allow (default: what is left of "
        "--max-model-len; the drawn length is never told)",
    )
    add(
        "--arrival",
        type=_arrivals,
        default="at-once",
        metavar="WHEN",
        help="at-once, every:STEPS or poisson:RATE in requests per step (default: at-once)",
    )
    add("--num-samples", "-n", type=whole_number(1, 1024), default="1", metavar="N")
    add(
        "--prefix-len",
        type=whole_number(0),
        default="0",
        metavar="N",
        help="tokens in front of each prompt that its group has in common (default: 0)",
    )
    add("--num-prefixes", type=whole_number(1), default="1", metavar="N", help="number of groups")
    add("--seed", type=whole_number(0, 2**63 - 1), default="0", metavar="N")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--num-blocks",
        type=_whole_numbers,
        default="4675",
        metavar="N[,N...]",
        help="size of the pool; several give a column each (default: 4675)",
    )
    add("--block-size", type=whole_number(1, 4096), default="16", metavar="N", help="tokens")
    add("--max-num-seqs", type=whole_number(1, 10**6), default="512", metavar="N")
    add("--max-num-batched-tokens", type=whole_number(1), default="16384", metavar="N")
    add("--max-model-len", type=whole_number(2), default="4096", metavar="N", help="tokens")
    add("--depth", type=whole_number(1, 64), default="2", metavar="N", help="steps in flight")
    add("--window", type=whole_number(1, 1024), default="1", metavar="N", help="decodes at once")
    add("--num-draft-tokens", "-k", type=whole_number(0, 64), default="0", metavar="N")
    add(
        "--acceptance",
        type=_rate,
        default="0.7",
        metavar="RATE",
        help="chance that a draft after a right one is right, 0 to 1 (default: 0.7)",
    )
    add("--no-prefix-caching", action="store_true")
    add(
        "--admission-policy",
        choices=("forecast", "greedy"),
        default="forecast",
        help="start a sequence if the expected peak of block use fits the pool, or as soon as its "
        "own blocks are free (default: forecast)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checks and output")
    add = group.add_argument
    add(
        "--check",
        type=_check_interval,
        default="every",
        metavar="every|N|none",
        help="execute every plan on the oracle and compare the books every N steps (default: "
        "every), or check nothing",
    )
    add(
        "--sweep",
        action="store_true",
        help="find the smallest pool without preemption first, and run that one",
    )
    add("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev or chrome://tracing")
    add("--html", metavar="FILE", help="write a page with the pool and the queue as pictures")
    add("--us-per-step", type=whole_number(0), default="1000", metavar="N", help="pretended cost")
    add("--us-per-token", type=whole_number(0), default="5", metavar="N", help="pretended cost")


def make_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="simulate", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False
    )
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help="options of a known run; others given here go before it",
    )
    _add_workload(parser)
    _add_engine(parser)
    _add_output(parser)
    return parser


def parse_options(argv: SequenceABC[str]) -> tuple[OneLineParser, argparse.Namespace]:
    """Exits with status 2, and one line, for a bad option."""
    parser = make_parser()
    preset = parser.parse_args(argv).preset
    if preset is not None:
        parser.set_defaults(**PRESETS[preset])
    return parser, parser.parse_args(argv)
