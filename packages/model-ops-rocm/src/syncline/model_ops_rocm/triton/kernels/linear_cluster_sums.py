"""How the two programs of a cluster add what each has summed of a tile of a product, on sm_90.

Unit: one thread's float32 sums, as many in both programs and of the same places. The program of
rank 0 ends up with the totals of the first half of them, that of rank 1 with those of the second.
Each sends the half that is not its own into shared memory of the other (st.async), whose barrier
counts the bytes. Triton has no words for that: it is PTX, between braces, so that the names and
labels of one copy are its own, however often a compiler writes it.

The barrier of a cluster counts all threads that have not ended. It is passed once: to arrive there
says that this program's room is ready, to wait, that the other's is, too. Every thread does both,
none waits before all have arrived, and what has passed it waits for no other cluster.

No program sends to one that has ended, for each waits for what it is sent. One may end while what
it sent is under way, which was in registers and needs nothing of it. Nothing outlives a launch: the
barriers are made anew in each.

Source: PTX ISA, st.async, mbarrier and barrier.cluster.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PROGRAMS = gl.constexpr(2)  # of a cluster
_THREADS = 128  # that have sums
THREADS = gl.constexpr(_THREADS)
_VECTOR = 4  # sums that are sent at once
# Behind a room: its barrier, and what keeps at a multiple of 1,024 bytes the shared memory that
# Triton lays out, which begins where this ends.
_TAIL_BYTES = 1_024


@gluon.constexpr_function
def sums_layout(num_warps, block_n):
    """Each program has a whole tile of sums, of a product that is `block_n` wide."""
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[num_warps, 1],
        instr_shape=[16, block_n, 16],
        cga_layout=[[0, 0]],
    )


@gluon.constexpr_function
def _room_bytes(num_sums):
    return num_sums // 2 * _THREADS * 4


@gluon.constexpr_function
def _room(num_sums):
    """PTX: $0 becomes the address of room for the other's sums, and all threads arrive.

    Bytes may come before they are expected: the barrier's phase ends after both.
    """
    num_bytes = _room_bytes(num_sums)
    return f"""
    {{
    .shared .align 1024 .b8 room[{num_bytes + _TAIL_BYTES}];
    .reg .pred is_first;
    mov.u32 $0, %tid.x;
    setp.eq.u32 is_first, $0, 0;
    mov.u32 $0, room;
    @is_first mbarrier.init.shared::cta.b64 [$0+{num_bytes}], 1;
    @is_first fence.mbarrier_init.release.cluster;
    @is_first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0+{num_bytes}], {num_bytes};
    barrier.cluster.arrive.relaxed;
    }}
    """


@gluon.constexpr_function
def _own_room(num_sums):
    """PTX: `own` becomes the address of this thread's first sums in the room.

    A thread's sums lie there beside those of the same places of the other threads.
    """
    return [
        ".reg .b32 own;",
        "mov.u32 own, %tid.x;",
        f"shl.b32 own, own, {(4 * _VECTOR).bit_length() - 1};",
        f"add.u32 own, own, ${2 * num_sums};",
    ]


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
        *_own_room(num_sums),
        "mapa.shared::cluster.u32 there, own, other;",
        f"mapa.shared::cluster.u32 full, {room}, other;",
    ]
    for i in range(half):
        lines.append(f"selp.f32 sent{i}, ${half + i}, ${i}, is_lower;")
        lines.append(f"selp.f32 ${i}, ${i}, ${half + i}, is_lower;")
    lines.append("barrier.cluster.wait.acquire;")
    for at, numbers in _vectors(num_sums):
        sums = ", ".join(f"sent{i}" for i in numbers)
        lines.append(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
            f"[there+{at}], {{{sums}}}, [full+{num_bytes}];"
        )
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _receive(num_sums):
    """PTX: waits for the other's sums, and adds them to the first half of $0 and so on."""
    half, room, num_bytes = num_sums // 2, f"${2 * num_sums}", _room_bytes(num_sums)
    lines = [
        "{",
        f".reg .f32 got<{half}>;",
        ".reg .pred is_full;",
        *_own_room(num_sums),
        "WAIT:",
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is_full, "
        f"[{room}+{num_bytes}], 0;",
        "@!is_full bra WAIT;",
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
def rank_in_cluster():
    """This program's, 0 or 1."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def make_room(NUM_SUMS: gl.constexpr):
    """The address of room for NUM_SUMS / 2 of each thread that has sums; those threads arrive."""
    return gl.inline_asm_elementwise(
        _room(NUM_SUMS),
        "=&r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def arrive():
    """What a warp without sums owes the cluster's barrier, and `leave` before it ends."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed; mov.u32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def leave():
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire; mov.u32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def make_up():
    """Of a warp that is there to make up the number."""
    arrive()
    leave()


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
def store_each(places, values, inside):
    """Values of 16 bits. What Triton stores, only one program of a cluster would."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred is_inside;
        setp.ne.s32 is_inside, $3, 0;
        @is_inside st.global.b16 [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,h,r",
        [places.to(gl.int64), values, inside.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_pairs(places, values, inside):
    """As `store_each`, two neighbours at a time; `inside` says for the first whether they are."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred is_inside;
        setp.ne.s32 is_inside, $4, 0;
        @is_inside st.global.b32 [$1], $3;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,l,r,r,r",
        [places.to(gl.int64), values, inside.to(gl.int32)],
        dtype=gl.int16,
        is_pure=False,
        pack=2,
    )
