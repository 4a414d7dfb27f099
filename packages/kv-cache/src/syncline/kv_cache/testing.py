"""Helpers for tests of this package and of those above it; not for production code."""

from syncline.kv_cache.prefix_index import Chunk, unpack_tokens
from syncline.kv_cache.types import BlockKey


def colliding_key(parent: BlockKey, chunk: Chunk) -> BlockKey:
    """A key function with two values only, so that unlike contents share a key all the time."""
    return BlockKey((parent + sum(unpack_tokens(chunk))) % 2)
