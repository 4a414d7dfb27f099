"""The digest of a plan: no field without effect, no two values with one encoding, no hash seed."""

import dataclasses
import itertools
import os
import subprocess
import sys
import types
import typing
from typing import Any

import pytest

from syncline.scheduler_core import FinishReason, PrefillChunk, StepPlan
from syncline.scheduler_core.digest import digest, encode

SIMPLE: dict[type, Any] = {
    int: 3,
    str: "a",
    bool: False,
    float: 0.5,
    bytes: b"x",
    object: "b",
}  # Any: samples


def sample_of(kind: Any) -> Any:  # Any: a type as `typing` describes it
    """Some value of this type, with every tuple filled and every optional value given."""
    kind = getattr(kind, "__supertype__", kind)  # A NewType.
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return sample_of(next(arg for arg in args if arg is not types.NoneType))
    if origin is tuple:
        return tuple(sample_of(arg) for arg in args if arg is not ...)
    if kind in SIMPLE:
        return SIMPLE[kind]
    hints = typing.get_type_hints(kind)  # A dataclass, or a kind that this test has to learn.
    return kind(**{name: sample_of(hint) for name, hint in hints.items()})


def others_than(value: Any) -> list[Any]:  # Any: values of every kind that a plan may hold
    """Values that differ from this one a little, at every depth, in every field."""
    if value is None:
        return [0]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    if isinstance(value, str):
        return [value + "b"]
    if isinstance(value, bytes):
        return [value + b"y"]
    if type(value) in (tuple,):
        items: list[Any] = list(value)  # Any: as above
        changed = [
            (*items[:i], other, *items[i + 1 :])
            for i, item in enumerate(items)
            for other in others_than(item)
        ]
        return [*changed, (*items, *items), (), (tuple(items),), None]
    return [
        dataclasses.replace(value, **{field.name: other})
        for field in dataclasses.fields(value)
        for other in others_than(object.__getattribute__(value, field.name))
    ]


def test_every_field_at_every_depth_changes_the_digest() -> None:
    """By the types of the fields, so that a field added later is not forgotten."""
    plan = sample_of(StepPlan)
    assert plan.joined and plan.prefill_chunks and plan.num_draft_tokens is not None
    others = set(others_than(plan))
    changed_fields = {
        field.name
        for other in others
        for field in dataclasses.fields(plan)
        if object.__getattribute__(other, field.name) != object.__getattribute__(plan, field.name)
    }
    assert changed_fields == {field.name for field in dataclasses.fields(plan)}
    digests = [other.digest() for other in others]
    assert len({plan.digest(), *digests}) == 1 + len(others)


def test_a_digest_is_64_hex_digits_and_equal_for_equal_plans() -> None:
    plan = sample_of(StepPlan)
    assert plan.digest() == dataclasses.replace(plan).digest()
    assert len(bytes.fromhex(plan.digest())) == 32


VALUES: list[object] = [
    None,
    False,
    True,
    0,
    1,
    -1,
    2**70,
    0.0,
    -0.0,
    1.0,
    "",
    "1",
    "1;",
    "\u00e9",
    b"",
    b"1",
    (),
    (1,),
    (1, 2),
    (12,),
    ((1,), 2),
    ((1, 2),),
    (True, 2),
    ("a", "b"),
    ("ab", ""),
    {},
    {1: 2},
    {1: 2, 3: 4},
    {(1, 2): (3, 4)},
    frozenset(),
    frozenset({1, 2}),
    PrefillChunk(row=1, start=2, stop=3, is_final=True),
    PrefillChunk(row=1, start=2, stop=3, is_final=False),
]


def test_no_two_values_have_one_encoding_and_none_begins_another() -> None:
    encoded = [encode(value) for value in VALUES]
    for one, other in itertools.permutations(encoded, 2):
        assert not one.startswith(other)


def test_the_encoding_is_the_documented_one() -> None:
    chunk = PrefillChunk(row=1, start=0, stop=12, is_final=True)
    assert encode((None, True, -7, "h\u00e9", b"\x00", frozenset({2, 1}))) == (
        b"(nti-7;s3:h\xc3\xa9b1:\x00<i1;i2;>)"
    )
    assert encode({"b": (1, 2), "a": 0.5}) == b"{s1:ad" + b"\x3f\xe0" + bytes(6) + b"s1:b(i1;i2;)}"
    assert encode(chunk) == b"@s12:PrefillChunks3:rowi1;s5:starti0;s4:stopi12;s8:is_finalt;"
    assert encode(FinishReason.STOP) == encode("stop")


def test_a_mapping_and_a_set_have_no_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(frozenset("abcdef")) == digest(frozenset("fedcba"))


@pytest.mark.parametrize("value", [[1], {1}, object(), StepPlan, 1j])
def test_a_kind_without_a_canonical_encoding_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="value must be of a kind with a canonical encoding"):
        digest(value)


RUN = """
from syncline.scheduler_core import RecordingScheduler
from syncline.scheduler_core.digest import digest
from syncline.scheduler_core.oracle import Scenario, run
from syncline.scheduler_core.records import PlanStep, replay
from syncline.scheduler_core import Scheduler, SchedulerConfig
from syncline.scheduler_core.testing import make_config, make_request
from syncline.kv_cache import KVCacheManager

records = []
def make(config, kv):
    return RecordingScheduler(config, kv, on_record=records.append)
requests = tuple(make_request(n, list(range(9)), 9, num_samples=2) for n in ("one", "two", "three"))
config = make_config(max_num_batched_tokens=12, max_steps_in_flight=2)
run(Scenario(requests=requests, num_blocks=9, config=config, preempts=frozenset({4})),
    make_scheduler=make)
plans = replay(Scheduler(config, KVCacheManager(9, 4)), records)
print(digest(tuple(plan.digest() for plan in plans)), len(plans))
"""


def test_plans_have_the_same_digests_in_processes_with_different_hash_seeds() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", RUN],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert int(printed[0].split()[1]) > 15
