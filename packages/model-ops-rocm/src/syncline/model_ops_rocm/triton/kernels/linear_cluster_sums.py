"""How the two programs of a cluster add what each has summed of a tile of a product, on sm_90.

Unit: one thread's float32 sums, as many in both programs and of the same places. The program of
rank 0 ends up with the totals of the first half of them, that of rank 1 with those of the second.
Each sends the half that is not its own into room of the other (`cluster`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from syncline.model_ops_rocm.triton.kernels.cluster import (
    make_room,
    own_place,
    send_vector,
    wait_until,
)

PROGRAMS = gl.constexpr(2)  # of a cluster
_THREADS = 128  # that have sums
_VECTOR = 4  # sums that are sent at once


@gluon.constexpr_function
def _room_bytes(num_sums):
    return num_sums // 2 * _THREADS * 4


@gluon.constexpr_function
def _vectors(num_sums):
    """(where in the room they are, numbers of the sums) for all that are sent at once."""
    firsts = range(0, num_sums // 2, _VECTOR)
    return [(first * _THREADS * 4, range(first, first + _VECTOR)) for first in firsts]


@gluon.constexpr_function
def _send(num_sums):
    """PTX: sends the other's half; the own half becomes the first of $0 and so on."""
    half, room, num_bytes = num_sums // 2, f"${2 * num_sums}", _room_bytes(num_sums)
    lines = [
        "{",
        ".reg .b32 other, there, full;",
        f".reg .f32 sent<{half}>;",
        ".reg .pred is_lower;",
        "mov.u32 other, %cluster_ctarank;",
        "setp.eq.u32 is_lower, other, 0;",
        "xor.b32 other, other, 1;",
        *own_place(room),
        "mapa.shared::cluster.u32 there, own, other;",
        f"mapa.shared::cluster.u32 full, {room}, other;",
    ]
    for i in range(half):
        lines.append(f"selp.f32 sent{i}, ${half + i}, ${i}, is_lower;")
        lines.append(f"selp.f32 ${i}, ${i}, ${half + i}, is_lower;")
    lines.append("barrier.cluster.wait.acquire;")
    for at, numbers in _vectors(num_sums):
        sums = [f"sent{i}" for i in numbers]
        lines.append(send_vector(f"there+{at}", sums, f"full+{num_bytes}"))
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _receive(num_sums):
    """PTX: waits for the other's sums, and adds them to the first half of $0 and so on."""
    half, room, num_bytes = num_sums // 2, f"${2 * num_sums}", _room_bytes(num_sums)
    lines = [
        "{",
        f".reg .f32 got<{half}>;",
        *own_place(room),
        *wait_until(f"{room}+{num_bytes}"),
    ]
    for at, numbers in _vectors(num_sums):
        sums = ", ".join(f"got{i}" for i in numbers)
        lines.append(f"ld.shared.v4.f32 {{{sums}}}, [own+{at}];")
    # Of two numbers either order gives the same bits.
    lines += [f"add.f32 ${i}, ${i}, got{i};" for i in range(half)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _in_place(num_sums):
    """Constraints of PTX that changes a thread's sums, given an address with each."""
    ties = [str(index) for index in range(num_sums)]
    return ",".join(["=f"] * num_sums + ties + ["r"] * num_sums)


@gluon.jit
def make_room_for_sums(NUM_SUMS: gl.constexpr):
    """The address of room for NUM_SUMS / 2 of each thread that has sums; those threads arrive."""
    return make_room(_room_bytes(NUM_SUMS))


@gluon.jit
def send_sums(sums, room, NUM_SUMS: gl.constexpr):
    """Sends the other program its half of `sums`; the own half takes the place of the first."""
    return gl.inline_asm_elementwise(
        _send(NUM_SUMS),
        _in_place(NUM_SUMS),
        [sums, room],
        dtype=gl.float32,
        is_pure=False,
        pack=NUM_SUMS,
    )


@gluon.jit
def receive_sums(sums, room, NUM_SUMS: gl.constexpr):
    """What `send_sums` gave, with the other's sums of this program's half added."""
    return gl.inline_asm_elementwise(
        _receive(NUM_SUMS),
        _in_place(NUM_SUMS),
        [sums, room],
        dtype=gl.float32,
        is_pure=False,
        pack=NUM_SUMS,
    )


@gluon.jit
def store_each(addresses, values):
    """Values of 16 bits where `early.kept` said. What Triton stores, only one program would."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred is_wanted;
        setp.ne.s64 is_wanted, $1, 0;
        @is_wanted st.global.b16 [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,h",
        [addresses, values],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_pairs(addresses, values):
    """As `store_each`, two neighbours at a time, at the first one's address."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred is_wanted;
        setp.ne.s64 is_wanted, $1, 0;
        @is_wanted st.global.b32 [$1], $3;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,l,r",
        [addresses, values],
        dtype=gl.int16,
        is_pure=False,
        pack=2,
    )
