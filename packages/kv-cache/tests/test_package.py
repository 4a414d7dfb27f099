"""The agreed public names, and the README's example."""

import re
from pathlib import Path

import syncline.kv_cache as kv_cache

AGREED = [
    "AllBlocksCleared",
    "BlockId",
    "BlockKey",
    "BlockNotHeldError",
    "BlockPool",
    "BlockTable",
    "BlocksInUseError",
    "BlocksRemoved",
    "BlocksStored",
    "CacheRoot",
    "IndexListener",
    "IntegrityError",
    "KVCacheError",
    "KVCacheManager",
    "KVCacheStats",
    "KVEvent",
    "KVEventLog",
    "Lease",
    "LeaseError",
    "PrefixEntry",
    "PrefixIndex",
    "PrefixMatch",
    "PromptHold",
    "PromptHolds",
    "Reservation",
    "StableChain",
    "StableKey",
    "StaleMatchError",
    "chain_key",
    "stable_key",
    "stable_root_key",
]


def test_the_public_names_are_the_agreed_ones() -> None:
    assert kv_cache.__all__ == AGREED
    assert all(hasattr(kv_cache, name) for name in AGREED)


def test_the_readme_examples_run() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
