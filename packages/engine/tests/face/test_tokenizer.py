"""Text and ids: round trips, characters over several tokens, damaged files."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from syncline.engine.errors import CheckpointError
from syncline.engine.testing.checkpoints import NUM_TOKEN_IDS, build_tokenizer
from syncline.engine.tokenizer import IncrementalDetokenizer, Tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token per byte, as byte-level BPE without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = HFTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    return Tokenizer(hf, "bytes")


def test_num_ids_counts_added_tokens() -> None:
    hf = build_tokenizer()
    assert Tokenizer(hf, "tiny").num_ids == NUM_TOKEN_IDS
    hf.add_special_tokens(["<tool>"])
    assert Tokenizer(hf, "tiny").num_ids == NUM_TOKEN_IDS + 1


def test_text_comes_back_and_special_tokens_only_when_asked() -> None:
    tokenizer = Tokenizer(build_tokenizer(), "tiny")
    ids = tokenizer.encode("0012,ab")
    assert tokenizer.decode(ids) == "0012,ab"
    with_eos = (*ids, NUM_TOKEN_IDS - 1)
    assert tokenizer.decode(with_eos) == "0012,ab"
    assert tokenizer.decode(with_eos, skip_special_tokens=False) == "0012,ab<eos>"


def test_a_missing_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(str(tmp_path))


def test_a_damaged_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": ', encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_directory(str(tmp_path))


@pytest.mark.parametrize("text", ["plain", "gr\u00fc\u00dfe", "\U0001f600 ok", "a\u20acb\u20ac"])
def test_pieces_make_the_whole_text_and_no_half_character_shows(text: str) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.append(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == detokenizer.text == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_never_become_a_character_show_when_flushed() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in tokenizer.encode("a\u20ac")[:-1]:
        detokenizer.append(token_id)
    assert detokenizer.text == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.text == "a\ufffd"
