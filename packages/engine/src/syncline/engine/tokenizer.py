"""Text to token ids and back, from one `tokenizer.json`; nothing of chat templates or models.

Source: detokenising by a prefix window and a read window, so that a character spread over several
tokens appears once it is whole, is what vLLM and TGI do.
"""

from collections.abc import Sequence as SequenceABC
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from syncline.engine.errors import CheckpointError, PromptError

TOKENIZER_FILE = "tokenizer.json"
MAX_TEXT_SHOWN = 80  # Characters of a text in an error.
_REPLACEMENT = "\ufffd"  # What a decoder writes for bytes that are no whole character yet.


class Tokenizer:
    """A tokenizer read from disk.

    num_ids is one more than the largest id, added tokens included: every id at or above it is
    padding of the embedding table.
    """

    __slots__ = ("_hf", "num_ids", "path")

    def __init__(self, hf: HFTokenizer, path: str) -> None:
        self._hf = hf
        self.path = path
        self.num_ids = max(hf.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_directory(cls, directory: str) -> "Tokenizer":
        """Read `tokenizer.json`; CheckpointError when it is missing or damaged."""
        path = Path(directory) / TOKENIZER_FILE
        if not path.is_file():
            raise CheckpointError(directory, f"no {TOKENIZER_FILE} in it")
        try:
            hf = HFTokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception.
            raise CheckpointError(directory, f"{TOKENIZER_FILE} cannot be read: {error}") from error
        return cls(hf, directory)

    def encode(self, text: str) -> tuple[int, ...]:
        """PromptError for a text that the tokenizer has no ids for."""
        try:
            return tuple(self._hf.encode(text).ids)
        except Exception as error:  # The library raises bare Exception.
            shown = ascii(text if len(text) <= MAX_TEXT_SHOWN else text[:MAX_TEXT_SHOWN] + "...")
            raise PromptError(
                f"the prompt {shown} cannot be turned into token ids by this model's tokenizer: "
                f"{error}"
            ) from error

    def decode(self, token_ids: SequenceABC[int], *, skip_special_tokens: bool = True) -> str:
        return self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


class IncrementalDetokenizer:
    """Text of a growing list of ids, each id decoded a bounded number of times."""

    __slots__ = ("_prefix_start", "_read_start", "_token_ids", "_tokenizer", "text")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        # [0, read_start)  in `text` already; [prefix_start, read_start)  decoded again each time,
        # because a token's text may depend on the one before it (spaces, split characters).
        self._prefix_start = 0
        self._read_start = 0
        self.text = ""

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def append(self, token_id: int) -> str:
        """Take one id; the text it completes, often "" in the middle of a character."""
        self._token_ids.append(token_id)
        prefix, both = self._windows()
        if len(both) <= len(prefix) or both.endswith(_REPLACEMENT):
            return ""
        return self._emit(both[len(prefix) :])

    def flush(self) -> str:
        """The text of ids that never became a whole character, after the last id."""
        prefix, both = self._windows()
        return self._emit(both[len(prefix) :])

    def _windows(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        prefix = decode(self._token_ids[self._prefix_start : self._read_start])
        return prefix, decode(self._token_ids[self._prefix_start :])

    def _emit(self, new_text: str) -> str:
        self._prefix_start, self._read_start = self._read_start, len(self._token_ids)
        self.text += new_text
        return new_text
