"""The command itself: the one place of this package that prints and writes files.

Exit status: 0 for a run that broke nothing, 1 for one that did, 2 for a bad option or a file that
cannot be written, 130 when interrupted, 141 when whoever read the output has gone.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence as SequenceABC
from dataclasses import replace

from syncline.scheduler_core.config import SchedulerConfig
from syncline.scheduler_core.oracle.drafters import hash_drafter
from syncline.scheduler_core.scheduler import Scheduler
from syncline.scheduler_core.simulate.history import CostModel
from syncline.scheduler_core.simulate.loop import (
    BrokenInvariantError,
    MakeScheduler,
    Setup,
    simulate,
)
from syncline.scheduler_core.simulate.options import OneLineParser, parse_options
from syncline.scheduler_core.simulate.picture import page
from syncline.scheduler_core.simulate.report import facts, table
from syncline.scheduler_core.simulate.sweep import find_smallest_pool
from syncline.scheduler_core.simulate.trace import trace_json
from syncline.scheduler_core.simulate.workload import Load, Workload, draw_load, ending_model


class _FileError(Exception):
    """A file of the user's could not be written."""


def main(argv: SequenceABC[str], make_scheduler: MakeScheduler = Scheduler) -> int:
    """Returns the exit status; a bad option raises SystemExit(2)."""
    try:
        parser, options = parse_options(argv)
        return _run(parser, options, make_scheduler)
    except BrokenInvariantError as error:
        print(f"simulate: broken: {error}", file=sys.stderr)
        return 1
    except _FileError as error:
        print(f"simulate: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough, which is no error.
        _discard_output()
        return 141
    except OSError as error:  # A full disk.
        print(f"simulate: error: cannot write the output: {error.strerror}", file=sys.stderr)
        _discard_output()
        return 2
    except KeyboardInterrupt:
        print("simulate: interrupted", file=sys.stderr)
        return 130


def _discard_output() -> None:
    """Give up what standard output still holds: the interpreter would write it again at exit."""
    with contextlib.suppress(OSError):
        sys.stdout.close()


def _run(parser: OneLineParser, options: argparse.Namespace, make_scheduler: MakeScheduler) -> int:
    if options.html is not None and options.html == options.trace:
        parser.error(f"arguments --trace and --html: must be two files, got {options.html!r} twice")
    load, setups = _prepare(parser, options)
    for name, path in (("--trace", options.trace), ("--html", options.html)):
        if path is not None:
            _require_writable(parser, name, path)
    headline = _headline(options)
    print(headline)
    print(flush=True)
    if options.sweep:
        setups = [_sweep(load, setups[0], make_scheduler)]
    results = [simulate(load, setup, make_scheduler) for setup in setups]
    cost = CostModel(us_per_step=options.us_per_step, us_per_token=options.us_per_token)
    print(table([facts(result, cost) for result in results]), flush=True)
    if options.trace is not None:
        _write(options.trace, trace_json(results, cost, headline))
    if options.html is not None:
        _write(options.html, page(results, cost, headline))
    return 0


def _sweep(load: Load, setup: Setup, make_scheduler: MakeScheduler) -> Setup:
    """The setup with the smallest pool; prints what was tried."""
    sweep = find_smallest_pool(load, setup, make_scheduler)
    for num_blocks, num_preemptions, num_cut in sweep.tried:
        cut = f", {num_cut:,} samples cut short" if num_cut else ""
        print(f"tried {num_blocks:>10,} blocks: {num_preemptions:,} preemptions{cut}")
    print(f"smallest pool found without preemption: {sweep.num_blocks:,} blocks")
    print(flush=True)
    return replace(setup, num_blocks=sweep.num_blocks)


def _require_writable(parser: OneLineParser, name: str, path: str) -> None:
    """Found out before the run, not after it. Leaves an empty file where there was none."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        parser.error(f"argument {name}: cannot write {path!r}: {error.strerror}")


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise _FileError(f"cannot write {path!r}: {error.strerror}") from error


def _prepare(parser: OneLineParser, options: argparse.Namespace) -> tuple[Load, list[Setup]]:
    """What to run on what; one line and exit status 2 if the options do not fit each other."""
    workload = Workload(
        num_requests=options.num_requests,
        prompt=options.prompt_len,
        output=options.output_len,
        arrival=options.arrival,
        prefix_len=options.prefix_len,
        num_prefixes=options.num_prefixes,
        num_samples=options.num_samples,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    try:
        config = SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            max_steps_in_flight=options.depth,
            admission_policy=options.admission_policy,
        )
        load = draw_load(workload, config.max_model_len)
    except ValueError as error:
        parser.error(str(error))
    model = ending_model(load, config.max_model_len) if options.check else None
    setups = [
        Setup(
            config=config,
            num_blocks=num_blocks,
            block_size=options.block_size,
            enable_prefix_caching=not options.no_prefix_caching,
            window=options.window,
            num_draft_tokens=options.num_draft_tokens,
            drafter=hash_drafter(options.acceptance, options.seed),
            check_interval=options.check,
            model=model,
        )
        for num_blocks in options.num_blocks
    ]
    return load, setups


def _headline(options: argparse.Namespace) -> str:
    """What was run, in two lines."""
    prefix = f", after {options.prefix_len} in common" if options.prefix_len else ""
    drafts = ""
    if options.num_draft_tokens:
        drafts = f"{options.num_draft_tokens} drafts right at {options.acceptance}, "
    return (
        f"{options.num_requests:,} requests x {options.num_samples}, arriving {options.arrival}: "
        f"prompts {options.prompt_len}{prefix}, outputs {options.output_len}, seed {options.seed}\n"
        f"at most {options.max_num_seqs:,} sequences and {options.max_num_batched_tokens:,} tokens "
        f"per step, depth {options.depth}, window {options.window}, {drafts}"
        f"blocks of {options.block_size} tokens, {options.admission_policy} admission"
    )
