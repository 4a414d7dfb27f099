"""`syncline demo`: the run's table as it goes, then its verdict."""

import json
import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from syncline.engine.cli.threads import limit_threads
from syncline.engine.rl.demo import DemoOptions, run_demo
from syncline.engine.rl.verdict import DemoStep, Verdict, judge

COLUMNS = (
    ("seed", 4),
    ("step", 4),
    ("reward", 6),
    ("tokens/s", 8),
    ("preempt", 7),
    ("sync s", 6),
    ("synced B", 9),
    ("slept B", 10),
    ("k3_kl", 7),
    ("chi2", 8),
)


def run_demo_command(model: str, num_seeds: int, num_steps: int, *, as_json: bool) -> bool:
    """Whether every seed's run held what it must."""
    # The bar of the trainer's checkpoint would run into the table.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # not annotated
    limit_threads(model)
    options = DemoOptions(model=model, num_steps=num_steps)
    began = time.perf_counter()
    results = _run_quietly(options, num_seeds) if as_json else _run_live(options, num_seeds)
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps(_as_json(results, seconds)))
    else:
        _print_verdicts(results, seconds)
    return all(verdict.passed for _, verdict in results)


Results = list[tuple[list[DemoStep], Verdict]]


def _run_quietly(options: DemoOptions, num_seeds: int) -> Results:
    results = []
    for seed in range(num_seeds):
        steps = list(run_demo(replace(options, seed=seed)))
        results.append((steps, judge(steps, options.num_steps)))
    return results


def _run_live(options: DemoOptions, num_seeds: int) -> Results:
    """Prints each row when its step is done, on a terminal and in a log alike."""
    console = Console(highlight=False)
    console.print(_line([title for title, _ in COLUMNS], header=True))
    results: Results = []
    for seed in range(num_seeds):
        steps = []
        for step in run_demo(replace(options, seed=seed)):
            steps.append(step)
            console.print(_line(_cells(seed, step)))
        results.append((steps, judge(steps, options.num_steps)))
    return results


def _line(cells: list[str], *, header: bool = False) -> Table:
    """One row of a table whose columns have fixed widths, so that rows can come one by one."""
    table = Table.grid(padding=(0, 1))
    for _, width in COLUMNS:
        table.add_column(justify="right", width=width, no_wrap=True)
    table.add_row(*cells, style="bold" if header else "")
    return table


def _cells(seed: int, step: DemoStep) -> list[str]:
    return [
        str(seed),
        str(step.step),
        f"{step.mean_reward:.3f}",
        f"{step.tokens_per_s:.0f}",
        str(step.num_preemptions),
        f"{step.sync_s:.3f}",
        f"{step.sync_bytes:,}",
        f"{step.slept_bytes:,}",
        f"{step.k3_kl:.1e}",
        f"{step.chi2_token:.1e}",
    ]


def _print_verdicts(results: Results, seconds: float) -> None:
    console = Console()
    for seed, (_, verdict) in enumerate(results):
        state = "passed" if verdict.passed else "FAILED"
        console.print(
            f"seed {seed} {state}: reward {verdict.reward_gain:+.3f}, "
            f"largest k3_kl {verdict.max_k3_kl:.1e}, {verdict.num_preemptions} preemptions",
            highlight=False,
        )
        for failure in verdict.failures:
            console.print(f"  {failure}", markup=False, highlight=False)
    console.print(f"{seconds:.0f} s", highlight=False)


def _as_json(results: Results, seconds: float) -> dict[str, object]:
    return {
        "passed": all(verdict.passed for _, verdict in results),
        "seconds": seconds,
        "seeds": [
            {
                "seed": seed,
                "passed": verdict.passed,
                "failures": list(verdict.failures),
                "reward_gain": verdict.reward_gain,
                "steps": [step.to_json() for step in steps],
            }
            for seed, (steps, verdict) in enumerate(results)
        ],
    }
