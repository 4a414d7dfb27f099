"""A warp that asks for pages of a paged KV cache by sm_90's tensor memory accelerator (TMA).

Unit: one program's pages of 64 tokens of a key/value head, in pieces of PAGES pages: keys, or their
values. A chunk is the keys of TEAMS pieces, then their values; pieces have numbers, those of a
chunk one after another, and take turns in STAGES stages of shared memory, which have a barrier that
completes when all of the pages have come, and one that does when the team they are for has read
them. Pages past the last are asked for outside of the cache: there are zeros, and no memory is
read. In Gluon, which no interpreter runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PAGE: gl.constexpr = gl.constexpr(64)  # tokens
TEAMS: gl.constexpr = gl.constexpr(2)  # of warps, which take the pieces of a chunk


@gluon.jit
def pages_of(seq_len, Q_LEN: gl.constexpr, WINDOW: gl.constexpr):
    """(how many pages hold the sequence, the first that is attended)."""
    num_pages = gl.cdiv(gl.maximum(seq_len, 0), PAGE)
    first_page = 0 * num_pages
    if WINDOW > 0:
        first_page = gl.maximum(seq_len - Q_LEN - WINDOW + 1, 0) // PAGE
    return num_pages, first_page


@gluon.jit
def _blocks_of_chunk(table, first, num_pages, COUNT: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Ids of the blocks of COUNT pages; past `num_pages`, where a table may hold anything, 0."""
    blocks = ()
    for index in gl.static_range(COUNT):
        page = first + index
        entry = table[0] + page * PAGE // BLOCK_SIZE * table[1]
        blocks += (gl.load(entry, mask=page < num_pages, other=0).to(gl.int32),)  # type: ignore[assignment]  # tuples grow
    return blocks


@gluon.jit
def _ask_chunk(
    descs,
    ring,
    number,
    blocks,
    first,
    num_pages,
    place,
    NUM_NEW: gl.constexpr,  # pieces whose stages nobody has used yet
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    PLACES: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Asks for the chunk whose pages lie in `blocks`, the first page `first`, piece by piece."""
    stages, full, free = ring
    for piece in gl.static_range(2 * TEAMS):
        desc = descs[piece // TEAMS]
        stage = (number + piece) % STAGES
        if piece >= NUM_NEW:
            mbarrier.wait(free.index(stage), ((number + piece) // STAGES - 1) & 1)
        mbarrier.expect(full.index(stage), PAGES * PAGE * SHAPE[1] * 2)
        for index in gl.static_range(PAGES):
            page = first + (piece % TEAMS * PAGES + index)
            # A descriptor's rows are slots of a head, or of all heads.
            rows = blocks[piece % TEAMS * PAGES + index] * (PLACES[0] // PLACES[2])
            rows += place[0] + page * PAGE % SHAPE[0]
            rows = gl.where(page < num_pages, rows, desc.shape[0].to(gl.int32))
            tma.async_copy_global_to_shared(
                desc, [rows, place[1]], full.index(stage), stages.index(stage * PAGES + index)
            )


@gluon.jit
def _fetch_lines(lens_at, table_at):
    """Asks L2 for what the first loads after the wait read."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    at = gl.where(lane == 0, lens_at.to(gl.int64), table_at.to(gl.int64))
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, 2; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [at, lane],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def feed(
    k_desc,
    v_desc,
    ring,
    lens_at,
    table_at,
    table_last,
    table_tokens,
    place,
    Q_LEN: gl.constexpr,
    OVERLAP: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    PLACES: gl.constexpr,  # strides of a block, a head and a slot
    SHAPE: gl.constexpr,  # tokens of a block, and HEAD_DIM
):
    """Asks for all chunks, each piece when its stage is free."""
    CHUNK: gl.constexpr = TEAMS * PAGES
    PIECES: gl.constexpr = 2 * TEAMS
    NUM_FIRST: gl.constexpr = (STAGES + PIECES - 1) // PIECES
    descs, table = (k_desc, v_desc), (table_at, table_last)
    if OVERLAP:
        _fetch_lines(lens_at, table_at)
        gdc_wait()
    seq_len = gl.load(lens_at).to(gl.int32)
    # Ids of the first chunks are asked for together; without a window beside the length.
    blocks = ()
    if WINDOW == 0:
        for index in gl.static_range(NUM_FIRST):
            num_held = table_tokens // PAGE
            blocks += (_blocks_of_chunk(table, index * CHUNK, num_held, CHUNK, SHAPE[0]),)  # type: ignore[assignment]  # tuples grow
    num_pages, first_page = pages_of(gl.minimum(seq_len, table_tokens), Q_LEN, WINDOW)
    if WINDOW > 0:
        for index in gl.static_range(NUM_FIRST):
            first = first_page + index * CHUNK
            blocks += (_blocks_of_chunk(table, first, num_pages, CHUNK, SHAPE[0]),)  # type: ignore[assignment]  # tuples grow
    num_chunks = gl.cdiv(num_pages - first_page, CHUNK)
    for index in gl.static_range(NUM_FIRST):
        if index < num_chunks:
            _ask_chunk(
                descs,
                ring,
                index * PIECES,
                blocks[index],
                first_page + index * CHUNK,
                num_pages,
                place,
                STAGES - index * PIECES,
                PAGES,
                STAGES,
                PLACES,
                SHAPE,
            )
    for index in range(NUM_FIRST, num_chunks):
        first = first_page + index * CHUNK
        _ask_chunk(
            descs,
            ring,
            index * PIECES,
            _blocks_of_chunk(table, first, num_pages, CHUNK, SHAPE[0]),
            first,
            num_pages,
            place,
            0,
            PAGES,
            STAGES,
            PLACES,
            SHAPE,
        )
    if OVERLAP:
        # Not before: what the next kernel reads ahead of its turn would come in between.
        gdc_launch_dependents()
