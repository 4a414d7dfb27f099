"""Commands and their options; what a command does is in a module of its own."""

from typing import Annotated

import typer

from syncline.engine.cli.exits import clean_exit
from syncline.engine.cli.generate import run_generate
from syncline.engine.cli.info import run_info
from syncline.engine.cli.ops import run_ops
from syncline.engine.cli.probe import run_probe_command
from syncline.engine.probes.count import CountProbe
from syncline.engine.sampling_params import SamplingParams

app = typer.Typer(
    name="syncline",
    help="A rollout engine for reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
probe_app = typer.Typer(
    help="Runs that show from the outside whether the engine's memory is right.",
    no_args_is_help=True,
)
app.add_typer(probe_app, name="probe")

ModelOption = Annotated[
    str, typer.Option(help="A checkpoint directory, or the name of a shipped one.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command()
def generate(  # noqa: PLR0913 reason: one parameter per command line option
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    model: ModelOption = "counter",
    max_tokens: Annotated[int, typer.Option(help="Output tokens per sample.")] = 64,
    n: Annotated[int, typer.Option("-n", "--n", help="Samples per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus to sample from.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Likeliest tokens to sample from; 0 = all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of every prompt's draws.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; repeatable.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Complete prompts."""
    with clean_exit():
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop or (),
        )
        run_generate(model, prompts, params, as_json=json_output)


@app.command()
def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Run seeds 0 to N-1, each judged.")] = 1,
    model: ModelOption = "novice",
    steps: Annotated[int, typer.Option(min=2, help="Training steps per seed.")] = 8,
    json_output: JsonOption = False,
) -> None:
    """A colocated reinforcement learning run on the CPU; exit 1 unless it holds what it must."""
    with clean_exit():
        # Here, because it loads transformers, which takes seconds that no other command needs.
        from syncline.engine.cli.demo import run_demo_command

        passed = run_demo_command(model, seeds, steps, as_json=json_output)
    raise typer.Exit(0 if passed else 1)


@probe_app.command("count")
def probe_count(  # noqa: PLR0913 reason: one parameter per command line option
    requests: Annotated[int, typer.Option(help="Requests that count side by side.")] = 64,
    kv_blocks: Annotated[int, typer.Option(help="KV pool, in blocks of 16 tokens.")] = 4096,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens per step.")] = 8192,
    max_tokens: Annotated[int, typer.Option(help="Output tokens per request.")] = 512,
    max_steps_in_flight: Annotated[
        int, typer.Option(help="1 is synchronous, 2 plans a step ahead.")
    ] = 2,
    prefix_caching: Annotated[
        bool, typer.Option(help="Off: a preempted request computes everything again.")
    ] = True,
    force_preempt_every: Annotated[
        int, typer.Option(help="Preempt a sequence every so many steps; 0 = never.")
    ] = 0,
    until_preemptions: Annotated[
        int, typer.Option(help="Stop forcing at this many; fewer fail the probe.")
    ] = 0,
    model: ModelOption = "counter",
    json_output: JsonOption = False,
) -> None:
    """Count in disjoint ranges under memory pressure; exit 1 unless every stream is clean."""
    with clean_exit():
        probe = CountProbe(
            num_requests=requests,
            max_tokens=max_tokens,
            force_preempt_every=force_preempt_every,
            until_preemptions=until_preemptions,
        )
        config = {
            "num_kv_blocks": kv_blocks,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": requests,
            "max_steps_in_flight": max_steps_in_flight,
            "enable_prefix_caching": prefix_caching,
        }
        passed = run_probe_command(model, probe, config, as_json=json_output)
    raise typer.Exit(0 if passed else 1)


@app.command()
def info(
    model: Annotated[str | None, typer.Option(help="Describe this checkpoint as well.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Versions, backends and why some are absent, shipped checkpoints; a checkpoint's facts."""
    with clean_exit():
        run_info(model, as_json=json_output)


@app.command()
def ops(
    op: Annotated[str | None, typer.Option(help="This op alone.")] = None,
    backend: Annotated[str | None, typer.Option(help="This backend alone.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Every op by backend: architectures and dtypes, and why what is absent is absent."""
    with clean_exit():
        run_ops(op, backend, as_json=json_output)
