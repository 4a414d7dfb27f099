"""A warp that asks for pages of a paged KV cache by sm_90's tensor memory accelerator (TMA).

Unit: one program's pages of 64 tokens of a key/value head, in pieces of PAGES pages: keys, or their
values. The pieces of a row go round the programs of a cluster. A program's own, keys and values in
turn, take turns in STAGES stages of shared memory, which have a barrier that completes when all of
the pages have come, and one that does when they have been read. Pages past the last are asked for
outside of the cache: there are zeros, and no memory is read.

What the kernel ahead may still write is read after it has ended. But L2 may be asked for it before:
what lies there is what memory holds, whoever writes it last. So the first AHEAD pages are on their
way while that kernel still runs, by a table and a length that may be old: they choose what is
asked for, and nothing else. In Gluon, which no interpreter runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from syncline.model_ops_rocm.triton.kernels.cluster import arrive, each_whole, leave

PAGE: gl.constexpr = gl.constexpr(64)  # tokens
_ASKED: gl.constexpr = gl.constexpr(512)  # elements of a page that L2 is asked for at once, at most


@gluon.constexpr_function
def _lanes(num_ctas):
    return gl.BlockedLayout([1], [32], [1], [0], cga_layout=each_whole(num_ctas, 1))


@gluon.constexpr_function
def _ask_l2(num_bytes):
    """PTX: asks L2 for `num_bytes` at $1, if $2 is not 0."""
    return f"""
    {{
    .reg .pred is_wanted;
    setp.ne.s32 is_wanted, $2, 0;
    @is_wanted cp.async.bulk.prefetch.L2.global [$1], {num_bytes};
    mov.u32 $0, 0;
    }}
    """


@gluon.jit
def _fetch(places, are_wanted, NUM_BYTES: gl.constexpr):
    """Asks L2 for NUM_BYTES, a multiple of 16, at each of `places`."""
    gl.inline_asm_elementwise(
        _ask_l2(NUM_BYTES),
        "=r,l,r",
        [places.to(gl.int64), are_wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pages_of(seq_len, Q_LEN: gl.constexpr, WINDOW: gl.constexpr):
    """(how many pages hold the sequence, the first that is attended)."""
    num_pages = gl.cdiv(gl.maximum(seq_len, 0), PAGE)
    first_page = 0 * num_pages
    if WINDOW > 0:
        first_page = gl.maximum(seq_len - Q_LEN - WINDOW + 1, 0) // PAGE
    return num_pages, first_page


@gluon.jit
def _fetch_lines(lens_at, table_at, NUM_CTAS: gl.constexpr):
    """Asks L2 for what the first loads after the wait read."""
    lane = gl.arange(0, 32, _lanes(NUM_CTAS))
    at = gl.where(lane == 0, lens_at.to(gl.int64), table_at.to(gl.int64))
    _fetch(at // 16 * 16, lane < 2, 16)


@gluon.jit
def _fetch_pages(
    caches,
    num_blocks,
    lens_at,
    table,
    table_tokens,
    place,
    rank,
    NUM_CTAS: gl.constexpr,
    Q_LEN: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    PLACES: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Asks L2 for this program's first AHEAD pages, by what table and length hold now.

    Read past L1, which would still have it after the wait.
    """
    # A page lies in one piece, or a slot of it at a time.
    NUM_ASKED: gl.constexpr = _ASKED if PLACES[2] == SHAPE[1] else SHAPE[1]
    NUM_TIMES: gl.constexpr = PAGE * SHAPE[1] // NUM_ASKED
    index = gl.arange(0, AHEAD * NUM_TIMES, _lanes(NUM_CTAS))
    seq_len = gl.load(lens_at, cache_modifier=".cg").to(gl.int32)
    num_pages, first_page = pages_of(gl.minimum(seq_len, table_tokens), Q_LEN, WINDOW)
    own_page = index // NUM_TIMES
    page = first_page + (own_page // PAGES * NUM_CTAS + rank) * PAGES + own_page % PAGES
    entry = table[0] + page * PAGE // SHAPE[0] * table[1]
    block = gl.load(entry, mask=page < num_pages, other=-1, cache_modifier=".cg").to(gl.int64)
    is_block = (block >= 0) & (block < num_blocks)
    first = place[0].to(gl.int64) * SHAPE[1] + place[1] + page * PAGE % SHAPE[0] * PLACES[2]
    first += index % NUM_TIMES * (NUM_ASKED // SHAPE[1] * PLACES[2])
    for cache in gl.static_range(2):
        _fetch(caches[cache] + (block * PLACES[0] + first), is_block, 2 * NUM_ASKED)


@gluon.jit
def _blocks_of_piece(table, first, num_pages, COUNT: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Ids of the blocks of COUNT pages; 0 past `num_pages`."""
    blocks = ()
    for index in gl.static_range(COUNT):
        page = first + index
        entry = table[0] + page * PAGE // BLOCK_SIZE * table[1]
        blocks += (gl.load(entry, mask=page < num_pages, other=0).to(gl.int32),)  # type: ignore[assignment]  # tuples grow
    return blocks


@gluon.jit
def _ask_piece(
    descs,
    ring,
    number,
    blocks,
    first,
    num_pages,
    place,
    NUM_NEW: gl.constexpr,  # of the two whose stages nobody has used yet
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    PLACES: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Asks for keys and values of the pages in `blocks`, of which `first` is the first."""
    stages, full, free = ring
    for half in gl.static_range(2):
        desc, stage = descs[half], (number + half) % STAGES
        if half >= NUM_NEW:
            mbarrier.wait(free.index(stage), ((number + half) // STAGES - 1) & 1)
        mbarrier.expect(full.index(stage), PAGES * PAGE * SHAPE[1] * 2)
        for index in gl.static_range(PAGES):
            page = first + index
            # A descriptor's rows are slots of a head, or of all heads.
            rows = blocks[index] * (PLACES[0] // PLACES[2])
            rows += place[0] + page * PAGE % SHAPE[0]
            rows = gl.where(page < num_pages, rows, desc.shape[0].to(gl.int32))
            tma.async_copy_global_to_shared(
                desc, [rows, place[1]], full.index(stage), stages.index(stage * PAGES + index)
            )


@gluon.jit
def feed(
    caches,  # pointers to keys and values
    descs,
    ring,
    num_blocks,
    lens_at,
    table,  # where the row's first entry is, and how far apart they are
    table_tokens,
    place,
    rank,
    NUM_CTAS: gl.constexpr,
    Q_LEN: gl.constexpr,
    OVERLAP: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,  # a power of two
    RELEASE: gl.constexpr,  # pieces that are asked for when the next kernel may begin
    PLACES: gl.constexpr,  # strides of a block, a head and a slot
    SHAPE: gl.constexpr,  # tokens of a block, and HEAD_DIM
):
    """Asks for all of the program's pieces, keys and values each when its stage is free."""
    NUM_FIRST: gl.constexpr = (STAGES + 1) // 2
    STRIDE: gl.constexpr = NUM_CTAS * PAGES
    gl.static_assert(RELEASE <= NUM_FIRST)
    arrive()
    if OVERLAP:
        _fetch_lines(lens_at, table[0], NUM_CTAS)
        _fetch_pages(
            caches,
            num_blocks,
            lens_at,
            table,
            table_tokens,
            place,
            rank,
            NUM_CTAS,
            Q_LEN,
            WINDOW,
            PAGES,
            AHEAD,
            PLACES,
            SHAPE,
        )
        gdc_wait()
        if RELEASE == 0:
            gdc_launch_dependents()
    seq_len = gl.load(lens_at).to(gl.int32)
    num_pages, first_page = pages_of(gl.minimum(seq_len, table_tokens), Q_LEN, WINDOW)
    first_page += rank * PAGES
    # Ids of the first pieces are asked for together; without a window beside the length.
    blocks = ()
    for index in gl.static_range(NUM_FIRST):
        first, num_held = first_page + index * STRIDE, table_tokens // PAGE
        blocks += (_blocks_of_piece(table, first, num_held, PAGES, SHAPE[0]),)  # type: ignore[assignment]  # tuples grow
    num_pieces = gl.cdiv(gl.maximum(num_pages - first_page, 0), STRIDE)
    for index in gl.static_range(NUM_FIRST):
        if index < num_pieces:
            _ask_piece(
                descs,
                ring,
                2 * index,
                blocks[index],
                first_page + index * STRIDE,
                num_pages,
                place,
                STAGES - 2 * index,
                PAGES,
                STAGES,
                PLACES,
                SHAPE,
            )
        if OVERLAP and index + 1 == RELEASE:
            # Not before: what the next kernel asks for ahead of its turn would come in between.
            gdc_launch_dependents()
    for index in range(NUM_FIRST, num_pieces):
        first = first_page + index * STRIDE
        _ask_piece(
            descs,
            ring,
            2 * index,
            _blocks_of_piece(table, first, num_pages, PAGES, SHAPE[0]),
            first,
            num_pages,
            place,
            0,
            PAGES,
            STAGES,
            PLACES,
            SHAPE,
        )
    leave()
