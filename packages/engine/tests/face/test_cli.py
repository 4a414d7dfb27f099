"""The command line: what is printed, in which form, and how each command ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from syncline.engine.cli.app import app
from syncline.engine.cli.exits import clean_exit
from syncline.engine.errors import CheckpointError, EngineConfigError
from syncline.engine.testing.checkpoints import NUM_TOKEN_IDS
from syncline.model_ops_rocm import available

runner = CliRunner()


def test_help_names_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("generate", "demo", "probe", "info", "ops"):
        assert command in result.stdout


def test_generate_as_json_is_json_alone(tiny_model: str) -> None:
    arguments = ["generate", "abc", "01", "--model", tiny_model, "-n", "2", "--max-tokens", "4"]
    result = runner.invoke(app, [*arguments, "--temperature", "1", "--seed", "3", "--json"])
    assert result.exit_code == 0, result.output
    outputs = json.loads(result.stdout)
    assert [output["prompt"] for output in outputs] == ["abc", "01"]
    completions = outputs[0]["outputs"]
    assert len(completions) == 2
    assert len(completions[0]["token_ids"]) == len(completions[0]["logprobs"])


def test_generate_prints_the_completion(tiny_model: str) -> None:
    result = runner.invoke(app, ["generate", "abc", "--model", tiny_model, "--max-tokens", "4"])
    assert result.exit_code == 0
    assert "abc" in result.stdout
    assert "length" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["generate", "abc", "--model", "/nowhere"], 1, "/nowhere"),
        (["info", "--model", "/nowhere"], 1, "/nowhere"),
        (["generate", "abc", "--temperature", "-1"], 2, "temperature"),
        (["ops", "--backend", "cuda"], 2, "backend must be one of torch, triton, aiter"),
        (["generate", "abc"], 2, "'abc' cannot be turned into token ids"),
        (["probe", "count", "--requests", "0"], 2, "requests"),
        (["probe", "count", "--max-num-batched-tokens", "7"], 2, "max_num_batched_tokens"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    arguments: list[str], exit_code: int, text: str
) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == exit_code
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert text in line


def test_an_unknown_option_is_a_usage_error() -> None:
    result = runner.invoke(app, ["generate", "abc", "--no-such-option"])
    assert result.exit_code == 2
    assert "no-such-option" in result.stderr


def test_info_describes_the_checkpoint(tiny_model: str) -> None:
    result = runner.invoke(app, ["info", "--model", tiny_model, "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["model"]["true_vocab_size"] == NUM_TOKEN_IDS
    assert re.match(r"(\d+) of \1 ops", facts["backends"]["torch"])
    plain = runner.invoke(app, ["info"])
    assert plain.exit_code == 0
    assert "backends" in plain.stdout


def test_ops_has_one_line_per_op_and_backend_and_a_reason_for_what_is_absent() -> None:
    lines = available()
    result = runner.invoke(app, ["ops"])
    assert result.exit_code == 0, result.output
    head, *rows = result.stdout.partition("\n\n")[0].splitlines()
    assert " ".join(head.split()) == "op backend there is runs here on not on, and why"
    told = [tuple(row.split()[:2]) for row in rows]
    assert told == list(dict.fromkeys((line.op, line.backend) for line in lines))
    reasons = result.stdout.partition("\n\n")[2].splitlines()
    assert [reason.partition(" ")[0] for reason in reasons] == [
        f"[{number}]" for number in range(1, len(reasons) + 1)
    ]
    (of_torch,) = (row for row in rows if row.split()[:2] == ["rms_norm", "torch"])
    assert "cpu gfx942 gfx950 sm_90 (float32 bfloat16 float16)  cpu gfx942 gfx950 sm_90" in of_torch
    assert "[" not in of_torch
    (of_triton,) = (row for row in rows if row.split()[:2] == ["rms_norm", "triton"])
    assert "  gfx942 gfx950 sm_90 (float32 bfloat16 float16)  " in of_triton
    number = of_triton.partition("cpu [")[2].partition("]")[0]
    assert f"[{number}] it runs on gfx942, gfx950, sm_90, not on cpu" in reasons


def test_ops_as_json_is_the_registry_line_by_line() -> None:
    result = runner.invoke(app, ["ops", "--op", "rms_norm", "--backend", "aiter", "--json"])
    assert result.exit_code == 0, result.output
    lines = available(op="rms_norm", backend="aiter")
    assert json.loads(result.stdout) == [
        {
            "op": "rms_norm",
            "backend": "aiter",
            "arch": line.arch,
            "dtype": str(line.dtype).removeprefix("torch."),
            "is_offered": line.arch in ("gfx942", "gfx950") and line.dtype != torch.float32,
            "why_not": line.why_not,
        }
        for line in lines
    ]


def test_a_model_that_cannot_count_fails_the_probe(tiny_model: str) -> None:
    arguments = ["probe", "count", "--requests", "3", "--max-tokens", "12", "--model", tiny_model]
    result = runner.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["passed"] is False
    assert report["clean"] == 0
    assert report["tokens"] == 36
    plain = runner.invoke(app, arguments)
    assert plain.exit_code == 1
    assert "0/3" in plain.stdout
    assert "FAILED" in plain.stdout


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (KeyboardInterrupt(), 130),
        (EngineConfigError("bad field", field="x"), 2),
        (CheckpointError("path", "two\nlines"), 1),
        (OSError("disk"), 1),
    ],
)
def test_errors_that_a_user_can_act_on_end_cleanly(error: BaseException, exit_code: int) -> None:
    with pytest.raises(typer.Exit) as caught, clean_exit():
        raise error
    assert caught.value.exit_code == exit_code


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(KeyError), clean_exit():
        raise KeyError("a bug")


@pytest.mark.parametrize("cpu_seconds", [0.3, 5.0])
def test_ctrl_c_ends_the_process_with_130_and_no_traceback(
    tmp_path: Path, cpu_seconds: float
) -> None:
    # Minutes of counting, interrupted while libraries load, or while it runs: the counter goes on
    # to the end of its context, and computes all of it again after every step.
    command = [
        *(sys.executable, "-m", "syncline.engine", "probe", "count", "--no-prefix-caching"),
        *("--requests", "64", "--max-tokens", "100000", "--force-preempt-every", "1"),
    ]
    with (tmp_path / "out").open("w+") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ.copy(), preexec_fn=_as_from_a_terminal
        )
        try:
            wait_until_busy(process, cpu_seconds)
            process.send_signal(signal.SIGINT)
            exit_code = process.wait(timeout=60)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        text = out.read()
    assert exit_code == 130, text
    assert "Traceback" not in text
    assert "interrupted" in text


def _as_from_a_terminal() -> None:
    """A shell starts what it puts in the background with SIGINT ignored, and children inherit it:
    there this very test, as any command of that shell, could not be interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until_busy(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Until the process has used this much processor time."""
    ticks = os.sysconf("SC_CLK_TCK")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        if (int(stat[11]) + int(stat[12])) / ticks > seconds:
            return
        time.sleep(0.05)
