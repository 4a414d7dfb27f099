"""Keys of full blocks that are equal in every process and run: for routers and for slower tiers.

A key is SHA-256 over its parent's key and its tokens, back to the facts of the root. It names the
content a block ought to have, not a state of this engine: `kv_epoch`, which is private to one
process, is not part of it. Whoever keeps such keys is told when older content lost its meaning.
Source: block hashes of vLLM v1's KV events. Differs: fixed-width tokens instead of a pickle.
"""

import hashlib
import struct
from collections.abc import Sequence as SequenceABC
from typing import NewType

StableKey = NewType("StableKey", bytes)
"""32 bytes. Long enough to be trusted without comparing the content."""


def stable_root_key(*, salt: str = "", adapter_id: str = "", kv_format: str = "") -> StableKey:
    """The chain value before the first block."""
    digest = hashlib.sha256(b"syncline.kv.root")
    for text in (salt, adapter_id, kv_format):
        encoded = text.encode("utf-8", "surrogatepass")
        # With its length first, so that no two roots run together.
        digest.update(struct.pack("<Q", len(encoded)) + encoded)
    return StableKey(digest.digest())


def stable_key(parent: StableKey, token_ids: SequenceABC[int]) -> StableKey:
    """The key of a full block behind `parent`. Raises ValueError for an id outside 64 bits."""
    try:
        packed = struct.pack(f"<{len(token_ids)}Q", *token_ids)
    except struct.error as error:
        raise ValueError(
            f"token_ids must be between 0 and 2**64 - 1, got {min(token_ids)} to {max(token_ids)}"
        ) from error
    return StableKey(hashlib.sha256(parent + packed).digest())


class StableChain:
    """The keys of the full blocks of one token list that only grows; each is computed once."""

    __slots__ = ("_block_size", "_keys", "_root_key")

    def __init__(self, root_key: StableKey, block_size: int) -> None:
        self._root_key = root_key
        self._block_size = block_size
        self._keys: list[StableKey] = []

    def keys(self, token_ids: SequenceABC[int], num_blocks: int) -> tuple[StableKey, ...]:
        """Of the first `num_blocks` blocks. Raises ValueError unless that many are full."""
        size = self._block_size
        if not 0 <= num_blocks <= len(token_ids) // size:
            raise ValueError(
                f"num_blocks must be in [0, {len(token_ids) // size}] (full blocks), "
                f"got {num_blocks}"
            )
        keys = self._keys
        for i in range(len(keys), num_blocks):
            parent = keys[-1] if keys else self._root_key
            keys.append(stable_key(parent, token_ids[i * size : (i + 1) * size]))
        return tuple(keys[:num_blocks])
