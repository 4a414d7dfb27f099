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
from syncline.model_ops_rocm.triton.kernels.early import OF_DESCRIPTOR, fetch_tiles, kept

PAGE: gl.constexpr = gl.constexpr(64)  # tokens


@gluon.constexpr_function
def _lanes(num_ctas):
    return gl.BlockedLayout([1], [32], [1], [0], cga_layout=each_whole(num_ctas, 1))


@gluon.jit
def pages_of(seq_len, Q_LEN: gl.constexpr, WINDOW: gl.constexpr):
    """(how many pages hold the sequence, the first that is attended)."""
    num_pages = gl.cdiv(gl.maximum(seq_len, 0), PAGE)
    first_page = 0 * num_pages
    if WINDOW > 0:
        first_page = gl.maximum(seq_len - Q_LEN - WINDOW + 1, 0) // PAGE
    return num_pages, first_page


@gluon.jit
def _rows_of(blocks, pages, place, PLACES: gl.constexpr, SHAPE: gl.constexpr):
    """Where pages begin, in blocks, of a descriptor's rows: slots of a head, or of all heads."""
    return blocks * (PLACES[0] // PLACES[2]) + place[0] + pages * PAGE % SHAPE[0]


@gluon.jit
def _fetch_pages(
    KERNEL: gl.constexpr,
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
    gl.static_assert(AHEAD <= 32)
    lane = gl.arange(0, 32, _lanes(NUM_CTAS))
    seq_len = gl.load(lens_at, cache_modifier=".cg").to(gl.int32)
    num_pages, first_page = pages_of(gl.minimum(seq_len, table_tokens), Q_LEN, WINDOW)
    page = first_page + (lane // PAGES * NUM_CTAS + rank) * PAGES + lane % PAGES
    entry = table[0] + page * PAGE // SHAPE[0] * table[1]
    is_page = (lane < AHEAD) & (page < num_pages)
    block = gl.load(entry, mask=is_page, other=-1, cache_modifier=".cg")
    is_block = (block >= 0) & (block < num_blocks)
    rows = _rows_of(block.to(gl.int32), page, place, PLACES, SHAPE)
    fetch_tiles(KERNEL, 0, rows, place[1], is_block)
    fetch_tiles(KERNEL, OF_DESCRIPTOR, rows, place[1], is_block)


@gluon.jit
def _entries(table, first, num_pages, COUNT: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Where the ids of the blocks of COUNT pages are; 0 past `num_pages`."""
    entries = ()
    for index in gl.static_range(COUNT):
        page = first + index
        entry = kept(table[0], page * PAGE // BLOCK_SIZE * table[1], page < num_pages)
        entries += (entry,)  # type: ignore[assignment]  # tuples grow
    return entries


@gluon.jit
def _entries_of_pieces(
    table,
    first,
    num_pages,
    COUNT: gl.constexpr,
    STRIDE: gl.constexpr,
    PAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """The entries of COUNT pieces, STRIDE pages apart."""
    entries = ()
    for index in gl.static_range(COUNT):
        entries += (_entries(table, first + index * STRIDE, num_pages, PAGES, BLOCK_SIZE),)  # type: ignore[assignment]  # tuples grow
    return entries


@gluon.jit
def _blocks(table, entries, COUNT: gl.constexpr):
    """Ids of the blocks; 0 where there is no entry."""
    blocks = ()
    for index in gl.static_range(COUNT):
        entry = entries[index].to(table[0].dtype)
        blocks += (gl.load(entry, mask=entries[index] != 0, other=0).to(gl.int32),)  # type: ignore[assignment]  # tuples grow
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
            rows = _rows_of(blocks[index], page, place, PLACES, SHAPE)
            rows = gl.where(page < num_pages, rows, desc.shape[0].to(gl.int32))
            tma.async_copy_global_to_shared(
                desc, [rows, place[1]], full.index(stage), stages.index(stage * PAGES + index)
            )


@gluon.jit
def feed(
    descs,
    KERNEL: gl.constexpr,  # its name; the descriptors are its first parameters
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
        _fetch_pages(
            KERNEL,
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
    # What no length says is known before the wait.
    first_page, num_held = rank * PAGES, table_tokens // PAGE
    entries = _entries_of_pieces(table, first_page, num_held, NUM_FIRST, STRIDE, PAGES, SHAPE[0])
    if OVERLAP:
        gdc_wait()
        if RELEASE == 0:
            gdc_launch_dependents()
    seq_len = gl.load(lens_at).to(gl.int32)
    num_pages, first_seen = pages_of(gl.minimum(seq_len, table_tokens), Q_LEN, WINDOW)
    first_page += first_seen
    if WINDOW > 0:
        entries = _entries_of_pieces(
            table, first_page, num_held, NUM_FIRST, STRIDE, PAGES, SHAPE[0]
        )
    # Ids of the first pieces are asked for together; without a window beside the length.
    blocks = ()
    for index in gl.static_range(NUM_FIRST):
        blocks += (_blocks(table, entries[index], PAGES),)  # type: ignore[assignment]  # tuples grow
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
        of_piece = _entries(table, first, num_pages, PAGES, SHAPE[0])
        _ask_piece(
            descs,
            ring,
            2 * index,
            _blocks(table, of_piece, PAGES),
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
