"""`syncline info`: what is installed, what could run, and what a checkpoint is."""

import json
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncline.engine.models.config import read_eos_token_ids, read_model_config
from syncline.engine.shipped import SHIPPED_CHECKPOINTS, resolve_model, shipped_checkpoint
from syncline.engine.tokenizer import Tokenizer
from syncline.model_ops_rocm import available, detect_arch

PACKAGES = (
    "syncline-engine",
    "syncline-graph-lifecycle",
    "syncline-kv-cache",
    "syncline-model-ops-rocm",
    "syncline-scheduler-core",
    "syncline-weight-sync",
)


def run_info(model: str | None, *, as_json: bool) -> None:
    facts: dict[str, dict[str, object]] = {
        "packages": {name: _version(name) for name in (*PACKAGES, "torch", "transformers")},
        "devices": {"cpu_threads": torch.get_num_threads(), "gpus": torch.cuda.device_count()},
        "backends": _backends(),
        "checkpoints": {name: _is_there(name) for name in SHIPPED_CHECKPOINTS},
    }
    if model is not None:
        facts["model"] = _model_facts(resolve_model(model))
    if as_json:
        print(json.dumps(facts))
        return
    table = Table("", "", "", show_header=False, box=None)
    for section, entries in facts.items():
        for position, (name, value) in enumerate(entries.items()):
            table.add_row(section if position == 0 else "", name, Text(str(value)))
    Console().print(table)


def _backends() -> dict[str, object]:
    """Per backend, on this machine's device: how many ops it has, and why not the others."""
    arch = detect_arch()
    ops: dict[str, dict[str, str | None]] = {}
    for line in available(arch=arch, dtype=torch.bfloat16):
        ops.setdefault(line.backend, {})[line.op] = line.why_not
    described: dict[str, object] = {}
    for backend, why_not in ops.items():
        reasons = sorted({reason for reason in why_not.values() if reason is not None})
        num_there = sum(reason is None for reason in why_not.values())
        missing = f"; {'; '.join(reasons)}" if reasons else ""
        described[backend] = f"{num_there} of {len(why_not)} ops on {arch}{missing}"
    return described


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed as a distribution"


def _is_there(checkpoint: str) -> str:
    directory = Path(shipped_checkpoint(checkpoint))
    return str(directory) if directory.is_dir() else "missing"


def _model_facts(directory: str) -> dict[str, object]:
    config = read_model_config(directory)
    tokenizer = Tokenizer.from_directory(directory)
    return asdict(config) | {
        "path": directory,
        "true_vocab_size": tokenizer.num_ids,
        "eos_token_ids": sorted(read_eos_token_ids(directory)),
    }
