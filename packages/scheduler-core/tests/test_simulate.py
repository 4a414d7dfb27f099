"""The simulator: its draws, its table against hand-made counts, its checks, its command line."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from syncline.kv_cache import KVCacheManager
from syncline.scheduler_core import Scheduler, SchedulerConfig, StepPlan
from syncline.scheduler_core.simulate.cli import main
from syncline.scheduler_core.simulate.draws import Draws, exp, ln
from syncline.scheduler_core.simulate.lengths import parse_lengths
from syncline.scheduler_core.simulate.workload import parse_arrivals

TINY: list[str] = [
    *("--num-requests", "2", "--prompt-len", "4", "--output-len", "3"),
    *("--num-blocks", "8", "--block-size", "4", "--max-num-seqs", "2", "--depth", "1"),
    *("--max-num-batched-tokens", "16", "--max-model-len", "32", "--admission-policy", "greedy"),
]


def printed(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, list[str]]:
    """The table: name -> the values of every run."""
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    rows: dict[str, list[str]] = {}
    for line in lines[lines.index("") + 1 :]:
        name, *values = [part for part in line.split("  ") if part]
        rows[name.strip()] = [value.strip() for value in values]
    return rows


def test_the_table_of_two_short_requests_is_what_a_hand_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Step 0 computes both prompts of 4, steps 1 and 2 two tokens each: 8 + 4 positions."""
    rows = printed(capsys, TINY)
    assert rows["steps"] == ["3"]
    assert rows["prefill tokens"] == ["8"]
    assert rows["decode tokens"] == ["4"]
    assert rows["prefill / decode"] == ["2.000"]
    assert rows["output tokens"] == ["6"]
    assert rows["preemptions"] == ["0"]
    assert rows["samples preempted"] == ["0 (0.0 %)"]
    # A prompt of 4 fills a block; its second token needs another, in step 1.
    assert rows["blocks held, peak"] == ["4 (50.0 %)"]
    assert rows["blocks held, mean"] == ["3.3 (41.7 %)"]
    assert rows["ended"] == ["stop 2"]
    assert rows["pretended time"] == ["0.003 s"]


def test_a_pool_too_small_for_both_preempts_the_younger_and_recomputes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three blocks: in step 1 the older takes the third, so the younger goes, with one output.

    It waits until the older has ended in step 2 and then recomputes 4 of its 5 tokens.
    """
    argv = [*TINY, "--num-blocks", "3", "--no-prefix-caching"]
    rows = printed(capsys, argv)
    assert rows["preemptions"] == ["1"]
    assert rows["samples preempted"] == ["1 (50.0 %)"]
    assert rows["recomputed tokens"] == ["4"]
    assert rows["prefill tokens"] == ["13"]
    assert rows["decode tokens"] == ["3"]
    assert rows["steps"] == ["5"]
    assert rows["steps with some left waiting"] == ["waiting_for_blocks 2"]


def test_several_pools_give_a_column_each(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, [*TINY, "--num-blocks", "3,8", "--no-prefix-caching"])
    assert rows["preemptions"] == ["1", "0"]
    assert rows["blocks in the pool"] == ["3", "8"]


def test_an_output_longer_than_the_limit_ends_by_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys, [*TINY, "--max-tokens", "2"])["ended"] == ["length 2"]
    rows = printed(capsys, [*TINY, "--output-len", "2|9", "--max-tokens", "3", "--num-requests=40"])
    num_by_length = int(rows["ended"][0].removeprefix("length "))
    assert 10 < num_by_length < 30
    assert rows["output tokens"] == [str(2 * 40 + num_by_length)]


@pytest.mark.parametrize("depth", ["1", "2", "3"])
@pytest.mark.parametrize("window", ["1", "3"])
def test_a_run_without_checks_gives_the_same_table(
    capsys: pytest.CaptureFixture[str], depth: str, window: str
) -> None:
    """The counting device gives the scheduler the same work as the oracle's runner."""
    argv = (
        "--num-requests 12 --prompt-len 3-9 --output-len geometric:9 --num-blocks 14 "
        "--block-size 4 --max-num-seqs 6 --max-num-batched-tokens 16 --max-model-len 40 "
        f"--num-samples 2 --prefix-len 5 --num-prefixes 3 --arrival poisson:0.5 "
        f"--admission-policy greedy --depth {depth} --window {window}"
    ).split()
    checked = printed(capsys, argv)
    assert checked["preemptions"] != ["0"] and checked["cached tokens"] != ["0"]
    assert printed(capsys, [*argv, "--check", "none"]) == checked
    assert printed(capsys, [*argv, "--check", "7"]) == checked


def test_two_runs_with_one_seed_are_byte_identical_in_any_process() -> None:
    argv = [
        *TINY,
        "--num-requests",
        "9",
        "--output-len",
        "lognormal:9,0.5",
        "--arrival=every:2",
    ]
    paths = [str(path) for path in map(Path, sys.path) if path.is_dir()]

    def output(hash_seed: str, seed: str) -> bytes:
        command = [sys.executable, "-m", "syncline.scheduler_core.simulate", *argv, "--seed", seed]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment["PYTHONHASHSEED"] = hash_seed
        return subprocess.run(command, env=environment, capture_output=True, check=True).stdout

    assert output("1", "5") == output("2", "5")
    assert output("1", "5") != output("1", "6")


@pytest.mark.parametrize("is_full", [False, True])
def test_output_that_nobody_takes_ends_without_a_trace_of_python(is_full: bool) -> None:
    """A reader that has gone is no error; a full disk is one line."""
    paths = [str(path) for path in map(Path, sys.path) if path.is_dir()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYTHONUNBUFFERED", None)  # What is buffered is flushed at exit, once more.
    if is_full:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    command = [sys.executable, "-m", "syncline.scheduler_core.simulate", *TINY]
    ended = subprocess.run(
        command, env=environment, stdout=output, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(output)
    told = "simulate: error: cannot write the output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == ((2, told) if is_full else (141, ""))


def test_groups_that_no_request_belongs_to_cost_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The draws of the others stay the same."""
    argv = [*TINY, "--prefix-len", "4", "--num-prefixes"]
    many = printed(capsys, [*argv, "1000000000"])
    assert many["cached tokens"] == ["0"] and many == printed(capsys, [*argv, "2"])


class Forgetful(Scheduler):
    """Plans a decode without the block that it was given for it."""

    __slots__ = ()

    def plan(self, **inputs: Any) -> StepPlan | None:  # Any: whatever the original takes.
        plan = super().plan(**inputs)
        return None if plan is None else replace(plan, new_blocks=())


def test_a_broken_scheduler_is_found_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    def make(config: SchedulerConfig, kv: KVCacheManager) -> Scheduler:
        return Forgetful(config, kv)

    assert main(TINY, make) == 1
    error = capsys.readouterr().err
    assert error == (
        "simulate: broken: step 1: row 0 ('r0'): position 4 is not reserved, the row has 1 blocks\n"
    )


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--num-blocks", "0"], ["--num-blocks", "between 1 and", "'0'"]),
        (["--num-blocks", "4,x"], ["--num-blocks", "'x'"]),
        (["--prompt-len", "9-3"], ["--prompt-len", "LOW <= HIGH", "'9-3'"]),
        (["--output-len", "lognormal:5,9"], ["--output-len", "between 0 and 3"]),
        (["--output-len", "geometric:nan"], ["--output-len", "above 1"]),
        (["--arrival", "poisson:0"], ["--arrival", "poisson:RATE", "'poisson:0'"]),
        (["--check", "0"], ["--check", "'0'"]),
        (["--prompt-len", "4000-5000"], ["shorter than max_model_len (4096)"]),
        (["--max-num-batched-tokens", "9"], ["max_num_batched_tokens", "512", "9"]),
        (["--num-request", "9"], ["--num-request"]),
        (["--prefix-len", "1000000000"], ["shorter than max_model_len (4096)"]),
        (["--trace", os.devnull, "--html", os.devnull], ["--trace and --html", "two files"]),
        (["--preset", "other"], ["--preset", "published"]),
    ],
)
def test_a_bad_option_is_one_line_with_its_name_and_limit(
    capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_an_interrupt_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def make(config: SchedulerConfig, kv: KVCacheManager) -> Scheduler:
        raise KeyboardInterrupt

    assert main(TINY, make) == 130
    assert capsys.readouterr().err == "simulate: interrupted\n"


def test_lengths_are_as_their_text_says() -> None:
    draws = Draws(seed=3)
    values = {
        text: [parse_lengths(text).draw(draws, (7, i)) for i in range(4000)]
        for text in ("5", "3-6", "geometric:20", "lognormal:20,0.5", "2|40")
    }
    assert set(values["5"]) == {5}
    assert set(values["3-6"]) == {3, 4, 5, 6}
    assert set(values["2|40"]) == {2, 40}
    for text in ("geometric:20", "lognormal:20,0.5", "2|40"):
        mean = sum(values[text]) / 4000
        assert 18.5 < mean < 22.5, text
    assert min(values["geometric:20"]) == 1


def test_the_functions_of_draws_are_those_of_mathematics() -> None:
    assert exp(0.0) == 1.0
    for i in range(-60, 60):
        assert exp(ln(1.7) * i) == pytest.approx(1.7**i, rel=1e-11)
        assert ln(1.7**i) == pytest.approx(math.log(1.7) * i, rel=1e-13, abs=1e-15)


def test_arrivals_come_when_they_should() -> None:
    draws = Draws(seed=1)
    assert parse_arrivals("at-once").steps(draws, 3) == [0, 0, 0]
    assert parse_arrivals("every:5").steps(draws, 3) == [0, 5, 10]
    steps = parse_arrivals("poisson:0.25").steps(draws, 2000)
    assert steps == sorted(steps)
    assert 7400 < steps[-1] < 8600
