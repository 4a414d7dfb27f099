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
_DEFAULT = "(default: %(default)s)"
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
    add("--num-requests", type=whole_number(1, 10**7), default="768", metavar="N", help=_DEFAULT)
    add(
        "--prompt-len",
        type=_lengths,
        default="68-202",
        metavar="LENGTHS",
        help=f"tokens {_DEFAULT}",
    )
    add(
        "--output-len",
        type=_lengths,
        default="423-1269",
        metavar="LENGTHS",
        help=f"tokens {_DEFAULT}",
    )
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
        help=f"at-once, every:STEPS or poisson:RATE in requests per step {_DEFAULT}",
    )
    add(
        "--num-samples",
        "-n",
        type=whole_number(1, 1024),
        default="1",
        metavar="N",
        help=f"of each request {_DEFAULT}",
    )
    add(
        "--prefix-len",
        type=whole_number(0),
        default="0",
        metavar="N",
        help=f"tokens in front of each prompt that its group has in common {_DEFAULT}",
    )
    add(
        "--num-prefixes",
        type=whole_number(1),
        default="1",
        metavar="N",
        help=f"number of groups {_DEFAULT}",
    )
    add("--seed", type=whole_number(0, 2**63 - 1), default="0", metavar="N", help=_DEFAULT)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--num-blocks",
        type=_whole_numbers,
        default="4675",
        metavar="N[,N...]",
        help=f"size of the pool; several give a column each {_DEFAULT}",
    )
    for names, limits, default, text in (
        (["--block-size"], (1, 4096), "16", "tokens"),
        (["--max-num-seqs"], (1, 10**6), "512", "sequences per step"),
        (["--max-num-batched-tokens"], (1, 10**9), "16384", "tokens per step"),
        (["--max-model-len"], (2, 10**9), "4096", "tokens of prompt and output"),
        (["--depth"], (1, 64), "2", "steps in flight"),
        (["--window"], (1, 1024), "1", "decode steps in one launch"),
        (["--num-draft-tokens", "-k"], (0, 64), "0", "of each row and decode step"),
    ):
        convert = whole_number(*limits)
        add(*names, type=convert, default=default, metavar="N", help=f"{text} {_DEFAULT}")
    add(
        "--acceptance",
        type=_rate,
        default="0.7",
        metavar="RATE",
        help=f"chance that a draft after a right one is right, 0 to 1 {_DEFAULT}",
    )
    add("--no-prefix-caching", action="store_true", help="share no prefix between requests")
    add(
        "--admission-policy",
        choices=("forecast", "greedy"),
        default="forecast",
        help="start a sequence if the expected peak of block use fits the pool, or as soon as its "
        f"own blocks are free {_DEFAULT}",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checks and output")
    add = group.add_argument
    add(
        "--check",
        type=_check_interval,
        default="every",
        metavar="every|N|none",
        help="execute every plan on the oracle and compare the books every N steps, or check "
        f"nothing, which is many times faster {_DEFAULT}",
    )
    add(
        "--sweep",
        action="store_true",
        help="find the smallest pool without preemption first, by bisection, and run that one, "
        "whatever --num-blocks says",
    )
    add("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev or chrome://tracing")
    add("--html", metavar="FILE", help="write a page with the pool and the queue as pictures")
    for name, default in (("--us-per-step", "1000"), ("--us-per-token", "5")):
        text = f"pretended cost {_DEFAULT}"
        add(name, type=whole_number(0), default=default, metavar="N", help=text)


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
