"""`syncline probe count`: run the probe on a checkpoint and print its table."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from syncline.engine.build import build_parts
from syncline.engine.cli.threads import limit_threads
from syncline.engine.config import EngineConfig
from syncline.engine.engine import LLMEngine
from syncline.engine.probes.count import CountProbe, CountReport, run_count_probe
from syncline.engine.shipped import resolve_model

MAX_STREAMS_SHOWN = 8


def run_probe_command(
    model: str, probe: CountProbe, config: Mapping[str, Any], *, as_json: bool
) -> bool:
    """Whether the probe passed. Any: configuration values, which EngineConfig checks."""
    limit_threads(model)
    settings = EngineConfig.from_kwargs(model=resolve_model(model), **config)
    with LLMEngine(settings, build_parts(settings)) as engine:
        disable = as_json or not sys.stderr.isatty()
        with tqdm(total=probe.num_requests, desc="count", unit="req", disable=disable) as bar:

            def show(num_ended: int, num_preemptions: int) -> None:
                bar.set_postfix(preemptions=num_preemptions, refresh=False)
                bar.update(num_ended - bar.n)

            report = run_count_probe(engine, probe, show)
    if as_json:
        print(json.dumps({"config": dict(config)} | report.to_json()))
    else:
        _print_report(report, settings)
    return report.passed


def _print_report(report: CountReport, settings: EngineConfig) -> None:
    console = Console()
    counts, probe = report.counts, report.probe
    rows = {
        f"KV blocks of {settings.block_size} tokens": str(settings.num_kv_blocks),
        "token budget per step": str(settings.max_num_batched_tokens),
        "clean requests": f"{counts.num_clean}/{probe.num_requests}",
        "broken requests": str(counts.num_broken),
        "drifted requests": str(counts.num_drifted),
        "breaks": str(counts.num_breaks),
        "foreign numbers": str(counts.num_foreign_numbers),
        "preemptions": str(report.num_preemptions),
        "of these forced": str(report.num_forced_preemptions),
        "tokens recomputed": str(report.num_recomputed_tokens),
        "tokens/s": f"{report.tokens_per_s:.0f}",
    }
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    spoilt = [stream for stream in report.streams if not stream.is_clean]
    for stream in spoilt[:MAX_STREAMS_SHOWN]:
        owners = sorted({owner for _, owner in stream.foreign})
        console.print(
            f"request {stream.request_index}: {stream.num_breaks} breaks, first "
            f"{stream.first_break}, numbers of requests {owners}",
            markup=False,
        )
    if report.num_short:
        console.print(f"{report.num_short} requests ended early")
    if report.num_preemptions < probe.until_preemptions:
        console.print(f"{report.num_preemptions} preemptions, {probe.until_preemptions} wanted")
    console.print("passed" if report.passed else "FAILED")
