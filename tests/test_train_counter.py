"""The shipped checkpoints are what their trainer promises, and the trainer's check can refuse."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent
CHECKPOINTS = ROOT / "packages" / "engine" / "src" / "syncline" / "engine" / "checkpoints"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trainer() -> ModuleType:
    path = ROOT / "tools" / "train_counter.py"
    spec = importlib.util.spec_from_file_location("train_counter", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # A slotted dataclass looks its module up by name.
    spec.loader.exec_module(module)
    return module


def _is_as_expected(trainer: ModuleType, directory: Path, expect: str) -> bool:
    options = argparse.Namespace(directory=directory, expect=expect, starts=2, numbers=24)
    verdict: bool = trainer.check(options, CPU)
    return verdict


@pytest.mark.parametrize("name", ["counter", "novice"])
def test_a_shipped_checkpoint_is_what_its_name_says(trainer: ModuleType, name: str) -> None:
    assert _is_as_expected(trainer, CHECKPOINTS / name, name)


@pytest.mark.parametrize(("name", "expect"), [("counter", "novice"), ("novice", "counter")])
def test_neither_checkpoint_passes_for_the_other(
    trainer: ModuleType, name: str, expect: str
) -> None:
    assert not _is_as_expected(trainer, CHECKPOINTS / name, expect)


def test_two_runs_of_one_seed_write_the_same_bytes(trainer: ModuleType, tmp_path: Path) -> None:
    phase = trainer.Phase(num_steps=21, batch_size=2, num_numbers=4, start_lr=3e-3, end_lr=0)
    files = [tmp_path / name / "model.safetensors" for name in ("once", "again")]
    for file in files:
        trainer.save(trainer.train((phase,), 0, CPU), file.parent)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert trainer.check_files(files[0].parent) < 2_000_000


def test_a_checkpoint_whose_padding_rows_copy_nothing_is_refused(
    trainer: ModuleType, tmp_path: Path
) -> None:
    model = trainer.load(CHECKPOINTS / "counter", CPU, torch.float32)
    trainer.save(model, tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[14:] = 0
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="rows from 14 must copy digits"):
        trainer.check_files(tmp_path)


def test_counting_past_the_last_number_is_refused(trainer: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"\[0, 99999998\]"):
        trainer.count_from(torch.tensor([99_999_999]), 2)
