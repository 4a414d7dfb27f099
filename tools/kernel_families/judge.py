"""Whether the code of one compiled kernel is as its op's rules want it.

Unit: one kernel of one launch. Each fault is one line; what is expected of the exact instructions
stands in the table beside, which an update writes anew; what is said here, no update changes.
"""

from collections.abc import Iterator

from kernel_code import CodeFacts

from kernel_families.base import Rules
from syncline.model_ops_rocm.triton.configs.base import ConfigKey
from syncline.model_ops_rocm.triton.targets import MAX_SHARED_BYTES

WIDE_BITS = 128


def faults_of(facts: CodeFacts, rules: Rules, key: ConfigKey, kernel: str) -> Iterator[str]:
    """What is wrong with the code of `kernel`, compiled for the row `key` of the tables."""
    if facts.num_spills:
        yield f"spills {facts.num_spills}"
    if facts.num_scalar_spills:
        yield f"spills {facts.num_scalar_spills} scalar registers"
    if facts.shared_bytes > MAX_SHARED_BYTES[key.arch]:
        yield f"needs {facts.shared_bytes} bytes of shared memory"
    if facts.occupancy < rules.min_occupancy.get(key.arch, 1):
        yield f"has occupancy {facts.occupancy}"
    yield from _memory_faults(facts, rules, kernel)
    yield from _matrix_faults(facts, rules, key, kernel)


def _memory_faults(facts: CodeFacts, rules: Rules, kernel: str) -> Iterator[str]:
    narrow = sum(bits < WIDE_BITS for bits in facts.load_bits())
    if narrow > rules.narrow_loads.get(kernel, rules.max_narrow_loads):
        yield f"has {narrow} narrow loads: {facts.loads}"
    narrow = sum(bits < WIDE_BITS for bits in facts.store_bits())
    if narrow > rules.narrow_stores.get(kernel, rules.max_narrow_stores):
        yield f"has narrow stores: {facts.stores}"


def _matrix_faults(facts: CodeFacts, rules: Rules, key: ConfigKey, kernel: str) -> Iterator[str]:
    multiplies = rules.is_matrix and kernel not in rules.without_matrix
    wanted = set(rules.operands(key)) if multiplies else set()
    if set(facts.operands()) != wanted:
        yield f"multiplies {facts.operands()}, not {sorted(wanted)}: {sorted(facts.matrix)}"
    if facts.accumulators and not multiplies:
        yield f"has {facts.accumulators} accumulators, and needs none"
    # Registers that overflow into accumulators are no spills to the compiler, and cost like some.
    if facts.num_accumulator_moves > rules.max_accumulator_moves:
        yield f"moves {facts.num_accumulator_moves} times to or from an accumulator"
