"""`syncline generate`: prompts in, completions out, as text or as JSON."""

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncline.engine.cli.threads import limit_threads
from syncline.engine.llm import LLM
from syncline.engine.outputs import RequestOutput
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.shipped import resolve_model


def run_generate(model: str, prompts: list[str], params: SamplingParams, *, as_json: bool) -> None:
    limit_threads(model)
    with LLM(resolve_model(model)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=not as_json)
    if as_json:
        print(json.dumps([output.to_json() for output in outputs]))
        return
    Console().print(completions_table(outputs))


def completions_table(outputs: list[RequestOutput]) -> Table:
    table = Table("prompt", "sample", "completion", "ended by", "tokens")
    for output in outputs:
        for completion in output.outputs:
            # Text, not markup: a completion may hold brackets.
            table.add_row(
                Text(output.prompt or ""),
                str(completion.index),
                Text(completion.text, overflow="fold"),
                completion.finish_reason or "",
                str(len(completion.token_ids)),
            )
    return table
