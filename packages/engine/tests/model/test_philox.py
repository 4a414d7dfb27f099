"""Philox4x32-10 against published vectors and against a scalar implementation of its own."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.engine.sampling.philox import PURPOSE_SAMPLE, philox4x32, split_seed, uniform

WORDS = st.integers(0, 2**32 - 1)

# Random123 1.14.0, tests/kat_vectors, the rows "philox4x32 10": counter, key, expected.
KNOWN_ANSWERS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition on Python integers, which cannot overflow."""
    c, k = list(counter), list(key)
    for round_index in range(10):
        if round_index:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        hi_0, lo_0 = divmod(0xD2511F53 * c[0], 2**32)
        hi_1, lo_1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [hi_1 ^ c[1] ^ k[0], lo_1, hi_0 ^ c[3] ^ k[1], lo_0]
    return c


def vector_philox(counters: list[list[int]], keys: list[list[int]]) -> list[list[int]]:
    c = torch.tensor(counters).T
    k = torch.tensor(keys).T
    return torch.stack(philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))).T.tolist()


def test_published_vectors_are_reproduced() -> None:
    def words(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    counters = [words(counter) for counter, _, _ in KNOWN_ANSWERS]
    keys = [words(key) for _, key, _ in KNOWN_ANSWERS]
    expected = [words(answer) for _, _, answer in KNOWN_ANSWERS]
    assert vector_philox(counters, keys) == expected
    assert [scalar_philox(c, k) for c, k in zip(counters, keys, strict=True)] == expected


@given(st.lists(st.tuples(*[WORDS] * 6), min_size=1, max_size=8))
def test_vectors_equal_the_scalar_definition(rows: list[tuple[int, ...]]) -> None:
    counters = [list(row[:4]) for row in rows]
    keys = [list(row[4:]) for row in rows]
    expected = [scalar_philox(c, k) for c, k in zip(counters, keys, strict=True)]
    assert vector_philox(counters, keys) == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_uniform_is_the_first_word_of_its_seed_position_and_sample(
    seed: int, position: int, sample_index: int
) -> None:
    seed_lo, seed_hi = split_seed(seed)
    got = uniform(
        torch.tensor([seed_lo]),
        torch.tensor([seed_hi]),
        torch.tensor([position]),
        torch.tensor([sample_index]),
        PURPOSE_SAMPLE,
    )
    word = scalar_philox([position, sample_index, 0, 0], [seed % 2**32, seed // 2**32])[0]
    assert got.tolist() == [(word // 256 + 0.5) / 2**24]
    assert 0.0 < got.item() < 1.0
