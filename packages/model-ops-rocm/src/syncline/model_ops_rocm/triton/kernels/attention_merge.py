"""How the programs of a cluster merge what each has attended of a row, on sm_90.

Unit: one thread's sums of [HEAD_DIM, columns] as the accumulators lie, with its columns' highest
scores and totals; of the same places in every program. All but the first program send them into
room of the first (`cluster`), which merges them in the order of the programs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from syncline.model_ops_rocm.triton.kernels.cluster import (
    make_room,
    own_place,
    send_vector,
    wait_until,
)

_THREADS = 128
_VECTOR = 4  # numbers that are sent at once


@gluon.constexpr_function
def _columns(num_sums):
    """Of a thread's sums the numbers of one for each of its columns.

    Of each four it has two neighbours, of a row and of the eighth after it; the second half of all
    lies 64 rows on.
    """
    return [number for number in range(num_sums // 2) if number % 4 < 2]


@gluon.constexpr_function
def _part_bytes(num_sums):
    return (num_sums + 2 * len(_columns(num_sums))) * _THREADS * 4


@gluon.constexpr_function
def _room_bytes(num_sums, num_ctas):
    return (num_ctas - 1) * _part_bytes(num_sums)


@gluon.constexpr_function
def _vectors(num_sums):
    """(where in a part, [which of sums, highest scores and totals, number]) of what is sent."""
    columns = _columns(num_sums)
    numbers = [(0, number) for number in range(num_sums)]
    numbers += [(kind, number) for kind in (1, 2) for number in columns]
    firsts = range(0, len(numbers), _VECTOR)
    return [(first * _THREADS * 4, numbers[first : first + _VECTOR]) for first in firsts]


@gluon.constexpr_function
def _send(num_sums, num_ctas):
    """PTX: sends the sums, highest scores and totals of $1 and after to the first program."""
    room, first = f"${4 * num_sums}", "first"
    lines = [
        "{",
        f".reg .b32 {first}, part, there, full;",
        f"mov.u32 {first}, 0;",
        "mov.u32 part, %cluster_ctarank;",
        "sub.u32 part, part, 1;",
        *own_place(room),
        f"mad.lo.u32 there, part, {_part_bytes(num_sums)}, own;",
        f"mapa.shared::cluster.u32 there, there, {first};",
        f"mapa.shared::cluster.u32 full, {room}, {first};",
        "barrier.cluster.wait.acquire;",
    ]
    for at, numbers in _vectors(num_sums):
        values = [f"${(1 + kind) * num_sums + number}" for kind, number in numbers]
        full = f"full+{_room_bytes(num_sums, num_ctas)}"
        lines.append(send_vector(f"there+{at}", values, full))
    lines += [f"mov.f32 ${number}, ${num_sums + number};" for number in range(num_sums)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _await(num_sums, num_ctas):
    """PTX: waits until all parts are in the room at $1."""
    full = f"$1+{_room_bytes(num_sums, num_ctas)}"
    lines = ["{", "barrier.cluster.wait.acquire;", *wait_until(full), "mov.u32 $0, $1;", "}"]
    return "\n".join(lines)


@gluon.constexpr_function
def _read(num_sums, part):
    """PTX: the sums, highest scores and totals of a part, from $0 on, each for every sum."""
    lines = ["{", *own_place(f"${4 * num_sums}")]
    for at, numbers in _vectors(num_sums):
        values = ", ".join(f"${kind * num_sums + number}" for kind, number in numbers)
        lines.append(f"ld.shared.v4.f32 {{{values}}}, [own+{part * _part_bytes(num_sums) + at}];")
    for number in range(num_sums):
        same = number % (num_sums // 2) // 4 * 4 + number % 2
        if same != number:
            lines += [
                f"mov.f32 ${kind * num_sums + number}, ${kind * num_sums + same};"
                for kind in (1, 2)
            ]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _operands(num_sums, num_results, num_inputs):
    """Constraints: float results and inputs for each sum, and an address."""
    results = ["=&f"] * (num_results * num_sums)
    return ",".join([*results, *["f"] * (num_inputs * num_sums), *["r"] * num_sums])


@gluon.jit
def make_room_for_parts(NUM_SUMS: gl.constexpr, NUM_CTAS: gl.constexpr):
    """The address of room for all parts but the first program's, NUM_SUMS for each thread."""
    return make_room(_room_bytes(NUM_SUMS, NUM_CTAS))


@gluon.jit
def send_part(acc, top, total, room, NUM_SUMS: gl.constexpr, NUM_CTAS: gl.constexpr):
    """Sends acc [HEAD_DIM, COLUMNS], top and total [COLUMNS] to the first program."""
    zeros = gl.zeros_like(acc)
    gl.inline_asm_elementwise(
        _send(NUM_SUMS, NUM_CTAS),
        _operands(NUM_SUMS, 1, 3),
        [acc, gl.expand_dims(top, 0) + zeros, gl.expand_dims(total, 0) + zeros, room],
        dtype=gl.float32,
        is_pure=False,
        pack=NUM_SUMS,
    )


@gluon.jit
def _read_part(acc, room, PART: gl.constexpr, NUM_SUMS: gl.constexpr):
    return gl.inline_asm_elementwise(
        _read(NUM_SUMS, PART),
        _operands(NUM_SUMS, 3, 1),
        [acc, room],
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=NUM_SUMS,
    )


@gluon.jit
def merge_parts(acc, top, total, room, NUM_SUMS: gl.constexpr, NUM_CTAS: gl.constexpr):
    """(acc, top, total) of all programs, each [HEAD_DIM, COLUMNS]; in the first of them."""
    room = gl.inline_asm_elementwise(
        _await(NUM_SUMS, NUM_CTAS), "=r,r", [room], dtype=gl.int32, is_pure=False, pack=1
    )
    zeros = gl.zeros_like(acc)
    top, total = gl.expand_dims(top, 0) + zeros, gl.expand_dims(total, 0) + zeros
    for part in gl.static_range(NUM_CTAS - 1):
        other, other_top, other_total = _read_part(acc, room, part, NUM_SUMS)
        highest = gl.maximum(top, other_top)
        shrink, weight = gl.exp2(top - highest), gl.exp2(other_top - highest)
        acc = acc * shrink + other * weight
        total = total * shrink + other_total * weight
        top = highest
    return acc, top, total
