"""Philox4x32-10 against published vectors and against a scalar implementation of its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.model_ops_rocm.reference.philox import (
    PURPOSE_ACCEPT,
    PURPOSE_RECOVER,
    PURPOSE_SAMPLE,
    philox4x32,
    random_words,
    seed_to_int64,
    uniforms,
)

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


def scalar_philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """The paper's definition on Python integers, which cannot overflow."""
    c, k = list(counter), list(key)
    for round_index in range(10):
        if round_index:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        hi_0, lo_0 = divmod(0xD2511F53 * c[0], 2**32)
        hi_1, lo_1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [hi_1 ^ c[1] ^ k[0], lo_1, hi_0 ^ c[3] ^ k[1], lo_0]
    return c


def test_published_vectors_are_reproduced() -> None:
    for counter, key, answer in KNOWN_ANSWERS:
        c, k, expected = (
            tuple(int(word, 16) for word in text.split()) for text in (counter, key, answer)
        )
        words = [torch.tensor([word]) for word in c]
        keys = [torch.tensor([word]) for word in k]
        got = philox4x32((words[0], words[1], words[2], words[3]), (keys[0], keys[1]))
        assert [int(word) for word in got] == list(expected)
        assert scalar_philox(c, (k[0], k[1])) == list(expected)


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), WORDS, WORDS), min_size=1, max_size=8),
    st.sampled_from([PURPOSE_SAMPLE, PURPOSE_ACCEPT, PURPOSE_RECOVER]),
)
def test_a_uniform_is_the_first_word_of_its_seed_position_sample_and_purpose(
    rows: list[tuple[int, int, int]], purpose: int
) -> None:
    seeds = torch.tensor([seed_to_int64(seed) for seed, _, _ in rows])
    positions = torch.tensor([position for _, position, _ in rows])
    samples = torch.tensor([sample for _, _, sample in rows])
    expected = [
        scalar_philox((position, sample, purpose, 0), (seed % 2**32, seed // 2**32))
        for seed, position, sample in rows
    ]
    got = random_words(seeds, samples, positions, purpose)
    assert torch.stack(got, dim=1).tolist() == expected
    drawn = uniforms(seeds, samples, positions, purpose)
    assert drawn.dtype is torch.float64
    assert drawn.tolist() == [(words[0] // 256 + 0.5) / 2**24 for words in expected]
    # What a counter of 32-bit integers holds is the same word.
    narrow = positions.to(torch.int32), samples.to(torch.int32)
    assert torch.equal(uniforms(seeds, narrow[1], narrow[0], purpose), drawn)


def test_a_seed_beyond_64_bits_is_refused() -> None:
    assert [seed_to_int64(seed) for seed in (0, 2**63, 2**64 - 1)] == [0, -(2**63), -1]
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*64\), got"):
            seed_to_int64(seed)
