"""Loading: every stored byte comes from the checkpoint, and every damage has one clear error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from syncline.engine.config import EngineConfig, WeightLayoutName
from syncline.engine.errors import CheckpointError, EngineConfigError
from syncline.engine.load import INDEX_FILE, SINGLE_FILE, Checkpoint, load_checkpoint
from syncline.engine.models.config import read_model_config
from syncline.engine.runner import ModelRunner, RunnerSettings
from syncline.engine.testing.checkpoints import TinyModel, write_tiny_checkpoint
from syncline.graph_lifecycle import PoisonArena
from syncline.model_ops_rocm import StorageFormat
from syncline.weight_sync import NameTable, stored_checksums

TINY = TinyModel(tie_word_embeddings=False, num_layers=1, intermediate_size=64)


def make_runner(
    directory: Path | str, layout: WeightLayoutName = "row_major", dtype: str = "float32"
) -> ModelRunner:
    config = EngineConfig(
        model=str(directory),
        num_kv_blocks=4,
        max_num_seqs=2,
        weight_layout=layout,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
    )
    model = read_model_config(directory)
    settings = RunnerSettings.resolve(config, model, true_vocab_size=41)
    return ModelRunner(model, settings, PoisonArena())


def write_sharded(directory: Path, tensors: dict[str, Tensor], num_shards: int = 3) -> None:
    """The same checkpoint as several files with an index."""
    (directory / SINGLE_FILE).unlink(missing_ok=True)
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def logical(table: NameTable, name: str) -> Tensor:
    slot = table.slots[name]
    assert isinstance(slot.encoder, StorageFormat)
    return slot.encoder.decode(slot.storage)


@pytest.mark.parametrize("layout", ["row_major", "shuffle_16x16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_slot_holds_what_the_checkpoint_says(
    tmp_path: Path, layout: WeightLayoutName, dtype: str
) -> None:
    write_tiny_checkpoint(tmp_path, TINY)
    runner = make_runner(tmp_path, layout, dtype)
    report = load_checkpoint(Checkpoint(tmp_path), runner.name_table, version=3)
    assert report.coverage == 1.0
    assert report.bytes_written == sum(slot.num_bytes for slot in runner.slots)
    assert report.version == 3
    stored = torch.float32 if dtype == "float32" else torch.bfloat16
    tensors = {name: tensor.to(stored) for name, tensor in TINY.tensors().items()}
    attention = "model.layers.0.self_attn."
    table = runner.name_table
    assert torch.equal(
        logical(table, attention + "qkv_proj.weight"),
        torch.cat([tensors[attention + f"{part}_proj.weight"] for part in "qkv"]),
    )
    mlp = "model.layers.0.mlp."
    assert torch.equal(
        logical(table, mlp + "gate_up_proj.weight"),
        torch.cat([tensors[mlp + "gate_proj.weight"], tensors[mlp + "up_proj.weight"]]),
    )
    for name in table.slots:
        if name in tensors:
            assert torch.equal(logical(table, name), tensors[name]), name


def test_sharded_and_single_files_store_the_same_bytes(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, TINY)
    single = make_runner(tmp_path)
    load_checkpoint(Checkpoint(tmp_path), single.name_table)
    write_sharded(tmp_path, TINY.tensors())
    sharded = make_runner(tmp_path)
    load_checkpoint(Checkpoint(tmp_path), sharded.name_table)
    assert stored_checksums(single.slots) == stored_checksums(sharded.slots)


def test_a_tied_head_is_accepted_under_both_names_and_must_agree(tmp_path: Path) -> None:
    tied = TinyModel(num_layers=1)
    write_tiny_checkpoint(tmp_path, tied)
    tensors = tied.tensors()
    embed = tensors["model.embed_tokens.weight"]
    runner = make_runner(tmp_path)

    save_file(tensors | {"lm_head.weight": embed.clone()}, tmp_path / SINGLE_FILE)
    report = load_checkpoint(Checkpoint(tmp_path), runner.name_table)
    assert report.aliases == ("lm_head.weight",)

    head_only = {name: t for name, t in tensors.items() if name != "model.embed_tokens.weight"}
    save_file(head_only | {"lm_head.weight": embed.clone()}, tmp_path / SINGLE_FILE)
    runner = make_runner(tmp_path)
    load_checkpoint(Checkpoint(tmp_path), runner.name_table)
    assert torch.equal(logical(runner.name_table, "model.embed_tokens.weight"), embed)

    save_file(tensors | {"lm_head.weight": embed + 1.0}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_checkpoint(Checkpoint(tmp_path), runner.name_table)


def test_fused_names_are_accepted_as_well(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, TINY)
    plain = make_runner(tmp_path)
    load_checkpoint(Checkpoint(tmp_path), plain.name_table)
    fused = {name: logical(plain.name_table, name).clone() for name in plain.name_table.slots}
    save_file(fused, tmp_path / SINGLE_FILE)
    runner = make_runner(tmp_path)
    load_checkpoint(Checkpoint(tmp_path), runner.name_table)
    assert stored_checksums(plain.slots) == stored_checksums(runner.slots)


def test_a_wrong_path_and_a_directory_without_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*index\.json"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_named_before_anything_is_written(tmp_path: Path, keep: int) -> None:
    write_tiny_checkpoint(tmp_path, TINY)
    path = tmp_path / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated"):
        Checkpoint(tmp_path)


def test_a_missing_shard_and_an_index_that_lies_are_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, TINY)
    write_sharded(tmp_path, TINY.tensors())
    gone = tmp_path / "model-00002-of-00003.safetensors"
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(CheckpointError, match=r"shards are missing: model-00002-of-00003"):
        Checkpoint(tmp_path)
    gone.write_bytes(content)
    index = json.loads((tmp_path / INDEX_FILE).read_text(encoding="utf-8"))
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"not in the index: model\.norm\.weight"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX_FILE).write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no readable weight_map"):
        Checkpoint(tmp_path)


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = dict(TINY.tensors())
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    return tensors


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (changed(model__norm__weight=None), "model.norm.weight"),
        (
            changed(model__layers__0__self_attn__k_proj__weight=None),
            "model.layers.0.self_attn.k_proj.weight",
        ),
        (changed(model__nrom__weight=torch.ones(32)), "model.norm.weight"),
        (changed(model__norm__weight=torch.ones(33)), "must be (32,), got (33,)"),
        (changed(model__norm__weight=torch.ones(32, dtype=torch.int64)), "model.norm.weight"),
        (changed(model__norm__weight=torch.full((32,), float("nan"))), "NaN or infinity"),
    ],
    ids=["missing", "part missing", "unknown", "shape", "dtype", "not finite"],
)
def test_tensors_that_do_not_fit_are_one_error_and_the_next_load_works(
    tmp_path: Path, tensors: dict[str, Tensor], named: str
) -> None:
    write_tiny_checkpoint(tmp_path, TINY)
    save_file(tensors, tmp_path / SINGLE_FILE)
    runner = make_runner(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(Checkpoint(tmp_path), runner.name_table)
    assert named in str(caught.value)
    assert caught.value.path == str(tmp_path)
    save_file(TINY.tensors(), tmp_path / SINGLE_FILE)
    assert load_checkpoint(Checkpoint(tmp_path), runner.name_table).coverage == 1.0


def test_headers_that_are_wrong_leave_weights_untouched(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, TINY)
    runner = make_runner(tmp_path)
    load_checkpoint(Checkpoint(tmp_path), runner.name_table)
    before = stored_checksums(runner.slots)
    save_file(changed(model__norm__weight=torch.ones(33)), tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError):
        load_checkpoint(Checkpoint(tmp_path), runner.name_table)
    assert stored_checksums(runner.slots) == before


def test_a_file_that_vanishes_while_loading_is_a_checkpoint_error(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, TINY)
    runner = make_runner(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    (tmp_path / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError):
        load_checkpoint(checkpoint, runner.name_table)


def test_a_layout_that_cannot_store_a_weight_names_it(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, TinyModel(intermediate_size=20))
    with pytest.raises(EngineConfigError, match=r"weight_layout='shuffle_16x16' cannot store"):
        make_runner(tmp_path, "shuffle_16x16")
