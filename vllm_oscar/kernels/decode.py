# mypy: disable-error-code="no-untyped-def,var-annotated"
# ruff: noqa: RET505  (Triton compiles what follows a return as well)
"""Decode attention over INT2 pages and their BF16 copies.

Three launches: `prepare` (queries, and where the copies are), the kernel here (partials of segments), `merge`
(output). One program reads one segment of one KV head with one warp. Everything is transposed: tokens, then channels,
are the rows of the tensor-core tiles, the (query, head) pairs of the KV head are the columns.

    scores   s = sum over bit positions J of unpack_J(key units [T, U]) . q_J [U, N]
             logit = (s * scale + offset * (sum of q)) * factor
    values   o_J [U, N] += unpack_J(value units [U, T]) . (p * scale)     and, aside, sum of p * offset

The units of a row are one operand (D = 128: 16 units, 16 deep), so nothing is shuffled. At D = 64 two neighbouring
tokens make one such row; the columns are then (parity of the token, pair) and the query is block-diagonal.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_oscar.errors import ConfigError
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable
from vllm_oscar.kernels import merge as merging
from vllm_oscar.kernels import prepare as preparing
from vllm_oscar.kernels.dependent import release, supported
from vllm_oscar.kernels.merge import merge_segments
from vllm_oscar.kernels.prepare import (
    copies_capacity,
    given_starts,
    prepare,
    queries_of,
    sink_capacity,
    window_origin,
)
from vllm_oscar.kernels.product import scaled
from vllm_oscar.kernels.reads import ReadCounter
from vllm_oscar.kernels.segments import FIELDS, Segments, granule, registers, segments_of, tile_tokens
from vllm_oscar.kernels.turning import add_waves, cos_sin, depth, halves, wave_tables, waves
from vllm_oscar.kernels.unpack import POSITIONS, in_bytes, ninth_bit, offset_of, scale_of, unpack, weight, weights
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.quantizer import FP16_MAX
from vllm_oscar.rotation import Transform

_NEVER: tl.constexpr = tl.constexpr(1 << 30)  # position of a token that no query sees
_FP16_MAX: tl.constexpr = tl.constexpr(FP16_MAX)
_HIDDEN: tl.constexpr = tl.constexpr(-1e6)  # its logit, in units of log 2
_STAGES = 5  # of the plain loop: the block-table load takes two of them
_COPY_STAGES = 3


@dataclass(frozen=True)
class _Form:
    """What the kernel is compiled for, one constant. Page offsets are in bytes.

    Attributes:
        columns, tiles: of a column tile, and how many there are
        ratio, q_len: query heads of a KV head, queries of a sequence
        head_size, units: of a row
        width, parities: of an operand, padded units of `parities` neighbouring tokens
        groups: that share a scale and an offset
        block_size, value_codes, meta: of the page
        key_bits, value_bits: of a code
        sliding_window: or 0
        capped: whether logits are
        sinks, window, capacity: of `copies`, see `prepare`
        tile, granule: tokens at a time, INT2 and copies
        depth: of the turning mean's product, or 0
    """

    columns: int
    tiles: int
    ratio: int
    q_len: int
    head_size: int
    units: int
    width: int
    parities: int
    groups: int
    block_size: int
    value_codes: int
    meta: int
    key_bits: int
    value_bits: int
    sliding_window: int
    capped: bool
    sinks: int
    window: int
    capacity: int
    tile: int
    granule: int
    depth: int


class _Query(NamedTuple):
    """A KV head's columns, C of them: those of the tile, for each parity.

    Attributes:
        folded: for each position fp16 [width, C], in the order of the operand's units, see `_operand`
        by_words: of 3-bit keys the last position's in the order of the words, for the codes' ninth bit
        sums: for each group [C], see `prepare`
        factor: scalar, likewise
        constant: [C], likewise
        cap: of logits, in units of log 2
        last: [C], the last token that the column's query sees
        turning: own and partner's coefficients of `waves`, each [DEPTH, C], see `_decode`
        steps: of the waves, [DEPTH, 1]
    """

    folded: Any
    by_words: Any
    sums: Any
    factor: Any
    constant: Any
    cap: Any
    last: Any
    turning: Any
    steps: Any


class _Sums(NamedTuple):
    """Of the softmax so far.

    Attributes:
        m: [C], the largest score
        total: [8, C], of probabilities
        offsets: for each group [8, C], of probability * offset
        o: for each position [width, C], of probability * scale * code
    """

    m: Any
    total: Any
    offsets: Any
    o: Any


class _Place(NamedTuple):
    """Where a tile's tokens are: element offsets.

    Attributes:
        key, value: of the units' first words, [R, width] and [width, R]
        key_rest, value_rest: of the words with what else the units have, likewise; of 3-bit keys a word has two units'
            bytes, and the operand's two halves are the lower and the upper bytes of the same words
        meta: for each parity [R], of the first word
    """

    key: Any
    key_rest: Any
    value: Any
    value_rest: Any
    meta: Any


@triton.jit
def _spread(x, N: tl.constexpr, PARITIES: tl.constexpr):
    """Per-token values, one [R] a parity -> something that broadcasts with [R, parities * N]."""
    if PARITIES == 1:
        return x[0][:, None]
    else:
        return tl.where((tl.arange(0, 2 * N) < N)[None, :], x[0][:, None], x[1][:, None])


@triton.jit
def _spread_t(x, N: tl.constexpr, PARITIES: tl.constexpr):
    """The same transposed."""
    if PARITIES == 1:
        return x[0][None, :]
    else:
        return tl.where((tl.arange(0, 2 * N) < N)[:, None], x[0][None, :], x[1][None, :])


@triton.jit
def _visible(x, position, last, unit, N: tl.constexpr, PARITIES: tl.constexpr, SLIDING_WINDOW: tl.constexpr):
    """Scores with those hidden that a column's query, at position `last`, does not see."""
    at = _spread(position, N, PARITIES)
    seen = at <= last[None, :]
    if SLIDING_WINDOW:
        seen = seen & (at > last[None, :] - SLIDING_WINDOW)
    return tl.where(seen, x, _HIDDEN / unit)


@triton.jit
def _softmax_step(x, m, total, unit):
    """Probabilities of a tile times 256 (tiny ones then keep their bits in fp16), and how much older sums shrink.

    Scores and their maximum are in units of `unit` * log 2; total is kept as [8, C]. Hidden scores must not be so
    large that the rounding of x * unit matters: their own difference has to come out near 0.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    new = tl.maximum(m, tl.max(x, 0))
    decay = tl.exp2((m - new) * unit)
    p = tl.exp2(x * unit - (new * unit - 8.0)[None, :])
    total = total * decay[None, :] + tl.sum(tl.reshape(p, (R // 8, 8, C)), 0)
    return p, decay, new, total


@triton.jit
def _capped(x, cap):
    """cap * tanh(x / cap), all in units of log 2."""
    return cap - 2.0 * cap / (tl.exp2(x * (2.8853900817779268 / cap)) + 1.0)


@triton.jit
def _units(pages16, words, rest, kept, kept_rest, BITS: tl.constexpr):
    """What `unpack` takes, from element offsets. kept, kept_rest: which exist, or None if all do."""
    units = (tl.load(pages16 + words, mask=kept, other=None if kept is None else 0),)
    if BITS > 2:
        units = (units[0], tl.load(pages16 + rest, mask=kept_rest, other=None if kept_rest is None else 0))
    return units


@triton.jit
def _scores(keys, query, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Of a group's COUNT positions from FIRST on, fp32 [R, C]."""
    s = tl.zeros([keys[0].shape[0], query.last.shape[0]], tl.float32)
    for j in tl.static_range(FIRST, FIRST + COUNT):
        s = tl.dot(unpack(keys, j, BITS), query.folded[j], s)
        if BITS == 3 and j == POSITIONS - 1:
            s = tl.dot(ninth_bit(keys[0]), query.by_words, s)
    return s


@triton.jit
def _plain_step(pages, at, query, turning, position, sums, FORM: tl.constexpr, MASKED: tl.constexpr):
    """One tile of INT2 tokens.

    pages: as int32 and int16; at: `_Place`; turning: see `_turning`; position: of the tokens if MASKED, for each
    parity [R].
    """
    N: tl.constexpr = FORM.columns
    U: tl.constexpr = FORM.units
    WIDTH: tl.constexpr = FORM.width
    PARITIES: tl.constexpr = FORM.parities
    GROUPS: tl.constexpr = FORM.groups
    KEY_BITS: tl.constexpr = FORM.key_bits
    VALUE_BITS: tl.constexpr = FORM.value_bits
    R: tl.constexpr = at.key.shape[0]
    IN_GROUP: tl.constexpr = POSITIONS // GROUPS
    PADDED: tl.constexpr = WIDTH != PARITIES * U
    kept = tl.arange(0, WIDTH) < U
    key_kept = kept[None, :] if PADDED else None
    rest_kept = key_kept
    if PADDED and KEY_BITS == 3:
        rest_kept = (tl.arange(0, WIDTH) % (WIDTH // 2) < PARITIES * U // 2)[None, :]
    value_kept = kept[:, None] if PADDED else None
    keys = _units(pages[1], at.key, at.key_rest, key_kept, rest_kept, KEY_BITS)
    values = _units(pages[1], at.value, at.value_rest, value_kept, value_kept, VALUE_BITS)

    for g in tl.static_range(GROUPS):
        s = _scores(keys, query, g * IN_GROUP, IN_GROUP, KEY_BITS)
        scale = ()
        offset = ()
        for parity in tl.static_range(PARITIES):
            word = tl.load(pages[0] + at.meta[parity] + g)
            scale = scale + (scale_of(word),)
            offset = offset + (offset_of(word),)
        term = s * _spread(scale, N, PARITIES)
        term += _spread(offset, N, PARITIES) * query.sums[g][None, :]
        x = term if g == 0 else x + term  # type: ignore[has-type]  # noqa: F821
    p, decay, m, total = _softmax(x, query, turning, position, sums, FORM, MASKED)

    offsets = ()
    o = ()
    for g in tl.static_range(GROUPS):
        scale = ()
        offset = ()
        for parity in tl.static_range(PARITIES):
            word = tl.load(pages[0] + at.meta[parity] + GROUPS + g)
            if MASKED:  # a token that nobody sees may have anything here
                word = tl.where(position[parity] < _NEVER, word, 0)
            scale = scale + (scale_of(word),)
            offset = offset + (offset_of(word),)
        weighted = tl.reshape(p * _spread(offset, N, PARITIES), (R // 8, 8, PARITIES * N))
        offsets = offsets + (sums.offsets[g] * decay[None, :] + tl.sum(weighted, 0),)
        ph = (p * _spread(scale, N, PARITIES)).to(tl.float16)
        for j in tl.static_range(IN_GROUP):
            scaled = sums.o[g * IN_GROUP + j] * decay[None, :]
            o = o + (tl.dot(unpack(values, g * IN_GROUP + j, VALUE_BITS), ph, scaled),)
    return _Sums(m, total, offsets, o)


@triton.jit
def _softmax(x, query, turning, position, sums, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Scores of a tile, without what the turning mean adds -> `_softmax_step`."""
    N: tl.constexpr = FORM.columns
    PARITIES: tl.constexpr = FORM.parities
    SLIDING_WINDOW: tl.constexpr = FORM.sliding_window
    CAPPED: tl.constexpr = FORM.capped
    DEPTH: tl.constexpr = FORM.depth
    if DEPTH:
        x = add_waves(x, turning[0], turning[1])
    unit = query.factor
    if CAPPED:
        x = _capped(x * query.factor + query.constant[None, :], query.cap)
        unit = 1.0
    if MASKED:
        x = _visible(x, position, query.last, unit, N, PARITIES, SLIDING_WINDOW)
    return _softmax_step(x, sums.m, sums.total, unit)


@triton.jit
def _copies_step(rows, key, value, hot, query, turning, position, sums, FORM: tl.constexpr):
    """One granule of BF16 copies.

    key, value: element offsets [R, width], [width, R] of channel 0 of each unit; hot: tokens that have one, a [R] a
    parity; the rest as for `_plain_step`.
    """
    N: tl.constexpr = FORM.columns
    U: tl.constexpr = FORM.units
    WIDTH: tl.constexpr = FORM.width
    PARITIES: tl.constexpr = FORM.parities
    GROUPS: tl.constexpr = FORM.groups
    KEY_BITS: tl.constexpr = FORM.key_bits
    VALUE_BITS: tl.constexpr = FORM.value_bits
    R: tl.constexpr = key.shape[0]
    C: tl.constexpr = PARITIES * N
    u = tl.arange(0, WIDTH)
    # a row that proves nothing may hold NaN, which not even a weight of zero would stop; fp16 has all bits of BF16,
    # and transformed rows, normalised to unit variance, stay far inside its range
    used = u < PARITIES * U
    keep = _spread(hot, WIDTH // PARITIES, PARITIES) & used[None, :]
    keep_t = _spread_t(hot, WIDTH // PARITIES, PARITIES) & used[:, None]
    # q_J carries 1/weight: Horner's scheme over the weights, largest first
    s = tl.zeros([R, C], tl.float32)
    for i in tl.static_range(weights(KEY_BITS) - 1, -1, -1):
        s *= 1 << KEY_BITS
        for j in tl.static_range(POSITIONS):
            if weight(KEY_BITS, j) == 1 << i * KEY_BITS:
                k = tl.load(rows + key + j * U, mask=keep, other=0.0).to(tl.float16)
                s = tl.dot(k, query.folded[j], s)
    x = s * 5.9604644775390625e-08  # 2^-24, which the codes have and the copies have not
    p, decay, m, total = _softmax(x, query, turning, position, sums, FORM, True)
    ph = p.to(tl.float16)
    offsets = ()
    for g in tl.static_range(GROUPS):
        offsets = offsets + (sums.offsets[g] * decay[None, :],)
    o = ()
    for j in tl.static_range(POSITIONS):
        v = tl.load(rows + value + j * U, mask=keep_t, other=0.0).to(tl.float16)
        o = o + (sums.o[j] * decay[None, :] + tl.dot(v, ph) * (weight(VALUE_BITS, j) / 16777216),)
    return _Sums(m, total, offsets, o)


@triton.jit
def _operand(folded, J: tl.constexpr, FORM: tl.constexpr, BY_BYTES: tl.constexpr):
    """A tile's folded queries for one position, fp16 [width, C]; block-diagonal where a row has two tokens.

    Units are in the order of their words, or BY_BYTES in that of `_Place.key_rest`: even ones first, then odd ones.
    """
    N: tl.constexpr = FORM.columns
    U: tl.constexpr = FORM.units
    WIDTH: tl.constexpr = FORM.width
    u = tl.arange(0, WIDTH)
    if BY_BYTES:
        u = u % (WIDTH // 2) * 2 + u // (WIDTH // 2)
    c = tl.arange(0, FORM.parities * N)
    at = folded + (u % U + J * U)[:, None] * N + (c % N)[None, :]
    return tl.load(at, mask=(u // U)[:, None] == (c // N)[None, :], other=0.0)


@triton.jit
def _turning(wave, query, t0, DEPTH: tl.constexpr):
    """What the turning mean adds to the scores of a tile from token t0 on, as two factors (see `add_waves`).

    wave: `waves` of the tile's tokens, counted from its first
    """
    factors = ()
    if DEPTH:
        cos, sin = cos_sin(query.steps, t0)
        factors = (wave, halves(query.turning[0] * cos + query.turning[1] * sin))
    return factors


@triton.jit
def _tile(table, t0, r, length, page_block_stride, inside, FORM: tl.constexpr, PARTIAL: tl.constexpr):
    """`_Place` of a tile's tokens t0 + r, t0 a multiple of the tile unless PARTIAL.

    If PARTIAL, tokens may lie past the end of the sequence.
    """
    U: tl.constexpr = FORM.units
    WIDTH: tl.constexpr = FORM.width
    PARITIES: tl.constexpr = FORM.parities
    GROUPS: tl.constexpr = FORM.groups
    P: tl.constexpr = FORM.block_size
    VALUE_CODES: tl.constexpr = FORM.value_codes
    META: tl.constexpr = FORM.meta
    KEY_BITS: tl.constexpr = FORM.key_bits
    VALUE_BITS: tl.constexpr = FORM.value_bits
    T: tl.constexpr = FORM.tile
    W: tl.constexpr = 2 * GROUPS  # words of a token
    u = tl.arange(0, WIDTH)
    if P % T == 0 and not PARTIAL:  # in one page
        base = tl.load(table + t0 // P).to(tl.int64) * page_block_stride + inside
        off = t0 % P
        key = base * 2 + off * U + r[:, None] * U + u[None, :]
        key_rest = key
        if KEY_BITS == 3:
            key_rest = base * 2 + P * U + off * (U // 2) + r[:, None] * (U // 2) + (u % (WIDTH // 2))[None, :]
        value = base * 2 + VALUE_CODES // 2 + off * U + r[None, :] * U + u[:, None]
        word = base + META // 4 + off * W + r * W
    else:
        token = t0 + r
        page = token // P
        off = token % P
        if PARTIAL:
            page = tl.minimum(page, (length - 1) // P)
        elif T % P == 0:  # whole pages
            page = t0 // P + r // P
            off = r % P
        base = tl.load(table + page).to(tl.int64) * page_block_stride + inside
        key = (base * 2 + off * U)[:, None] + u[None, :]
        key_rest = key
        if KEY_BITS == 3:
            key_rest = (base * 2 + P * U + off * (U // 2))[:, None] + (u % (WIDTH // 2))[None, :]
        value = (base * 2 + VALUE_CODES // 2 + off * U)[None, :] + u[:, None]
        word = base + META // 4 + off * W
    if KEY_BITS == 4:
        key_rest = key + P * U
    value_rest = value
    if VALUE_BITS == 4:
        value_rest = value + P * U
    meta = (word,)
    if PARITIES == 2:
        meta = (word, word + W)
    return _Place(key, key_rest, value, value_rest, meta)


@triton.jit
def _slot(copies, token, origin, end, SINKS: tl.constexpr):
    """Slot of each token's copy, or -1; -1 too from `end` on."""
    entry = tl.where(token < SINKS, token, token - origin + SINKS)
    return tl.load(copies + entry, mask=(token < end) & ((token < SINKS) | (token >= origin)), other=-1)


@triton.jit(do_not_specialize=["ragged", "table_stride"])
def _decode(
    folded, sums_ptr, starts, ragged, step, copies, pages32, pages16, rows, block_table, seq_lens, segments, partial,
    lse, cap, page_block_stride, page_head_stride, rows_slot_stride, rows_head_stride, table_stride,
    FORM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, COPY_STAGES: tl.constexpr,
    SINK_LOGITS: tl.constexpr, RELEASES: tl.constexpr,
):  # fmt: skip
    """Strides of pages are in int32 words."""
    N: tl.constexpr = FORM.columns
    TILES: tl.constexpr = FORM.tiles
    RATIO: tl.constexpr = FORM.ratio
    Q_LEN: tl.constexpr = FORM.q_len
    D: tl.constexpr = FORM.head_size
    U: tl.constexpr = FORM.units
    WIDTH: tl.constexpr = FORM.width
    PARITIES: tl.constexpr = FORM.parities
    GROUPS: tl.constexpr = FORM.groups
    P: tl.constexpr = FORM.block_size
    VALUE_BITS: tl.constexpr = FORM.value_bits
    CAPPED: tl.constexpr = FORM.capped
    SINKS: tl.constexpr = FORM.sinks
    WINDOW: tl.constexpr = FORM.window
    CAPACITY: tl.constexpr = FORM.capacity
    T: tl.constexpr = FORM.tile
    G: tl.constexpr = FORM.granule
    DEPTH: tl.constexpr = FORM.depth
    KEY_BITS: tl.constexpr = FORM.key_bits
    place = tl.program_id(0)
    segment = tl.program_id(1)
    head = (place // TILES).to(tl.int64)
    entry = segments + segment * COLUMNS
    seq = tl.load(entry)
    if seq < 0:
        return
    queries = queries_of(starts, ragged, seq, seq >= 0, Q_LEN)[1]
    if (place % TILES) * N >= queries * RATIO:
        return
    lo = tl.load(entry + 1)
    fast_lo = tl.load(entry + 2)
    fast_hi = tl.load(entry + 3)
    hi = tl.load(entry + 4)
    length = tl.load(seq_lens + seq)
    table = block_table + seq.to(tl.int64) * table_stride

    C: tl.constexpr = PARITIES * N
    u = tl.arange(0, WIDTH)
    c = tl.arange(0, C)
    index = seq * tl.num_programs(0) + place
    own_folded = folded + index.to(tl.int64) * (D * N)
    q = ()
    for j in tl.static_range(POSITIONS):
        q = q + (_operand(own_folded, j, FORM, in_bytes(KEY_BITS, j)),)
    by_words = q[POSITIONS - 1]
    if KEY_BITS == 3:
        by_words = _operand(own_folded, POSITIONS - 1, FORM, False)
    own = sums_ptr + index * (1 + N * (GROUPS + 1 + DEPTH))
    factor = tl.load(own)
    sums_of_q = ()
    for g in tl.static_range(GROUPS):
        sums_of_q = sums_of_q + (tl.load(own + 1 + g * N + c % N),)
    constant = tl.zeros([C], tl.float32)
    if CAPPED:
        constant = tl.load(own + 1 + GROUPS * N + c % N)
    # coefficients of `waves`, and those of each column's partner: cos(a + b) = cos a cos b - sin a sin b, so tokens
    # counted from a tile's first are multiplied with own cos + partner sin of that token's angles
    turning = ()
    steps = 0
    if DEPTH:
        k = tl.arange(0, DEPTH)[:, None]
        steps = tl.load(step + k)
        at = own + 1 + N * (GROUPS + 1) + (c % N)[None, :]
        a = tl.load(at + k * N)
        b = tl.load(at + (k ^ (DEPTH // 2)) * N)
        b = tl.where(k < DEPTH // 2, b, -b)
        cos, sin = cos_sin(steps, (c // N)[None, :])  # the second parity is one token ahead
        turning = (a * cos + b * sin, b * cos - a * sin)
    # the last token that a column's query sees
    last = length - queries + ((place % TILES) * N + c % N) // RATIO
    query = _Query(q, by_words, sums_of_q, factor, constant, cap, last, turning, steps)

    m = tl.zeros([C], tl.float32) + (_HIDDEN if CAPPED else _HIDDEN / factor)
    total = tl.zeros([8, C], tl.float32)
    offsets = ()
    for g in tl.static_range(GROUPS):
        offsets = offsets + (tl.zeros([8, C], tl.float32),)
    o = ()
    for j in tl.static_range(POSITIONS):
        o = o + (tl.zeros([WIDTH, C], tl.float32),)
    sums = _Sums(m, total, offsets, o)

    # whole tiles of plain INT2, no mask
    pages = (pages32, pages16)
    inside = head * page_head_stride
    r = tl.arange(0, T // PARITIES) * PARITIES
    wave = ()
    if DEPTH:
        wave = waves(step, r, DEPTH)
    for t0 in tl.range(fast_lo, fast_hi, T, num_stages=STAGES):
        tile = _tile(table, t0, r, length, page_block_stride, inside, FORM, False)
        sums = _plain_step(pages, tile, query, _turning(wave, query, t0, DEPTH), (), sums, FORM, False)

    release(RELEASES)
    # the rest: first what has no copy, which is little or nothing. What lies before the window of every query is not
    # looked at: its blocks may be gone, with anything in their place
    first_seen = 0
    SLIDING_WINDOW: tl.constexpr = FORM.sliding_window
    if SLIDING_WINDOW:
        first_seen = length - queries + 1 - SLIDING_WINDOW
    copies += (seq * (tl.num_programs(0) // TILES) + place // TILES) * CAPACITY
    origin = window_origin(length, Q_LEN, WINDOW, T)
    before = tl.cdiv(fast_lo - lo, T)
    for i in tl.range(0, before + tl.cdiv(hi - fast_hi, T), num_stages=1):
        t0 = tl.where(i < before, lo + i * T, fast_hi + (i - before) * T)
        end = tl.where(i < before, fast_lo, hi)
        position = ()
        most = 0
        for parity in tl.static_range(PARITIES):
            token = t0 + r + parity
            cold = (token >= first_seen) & (token < end) & (_slot(copies, token, origin, end, SINKS) < 0)
            position = position + (tl.where(cold, token, _NEVER),)
            most += tl.sum(cold.to(tl.int32), 0)
        if most > 0:
            tile = _tile(table, t0, r, length, page_block_stride, inside, FORM, True)
            sums = _plain_step(pages, tile, query, _turning(wave, query, t0, DEPTH), position, sums, FORM, True)

    # then the copies, whose channels are in the order of the words
    if KEY_BITS == 3:
        q = ()
        for j in tl.static_range(POSITIONS):
            q = q + (_operand(own_folded, j, FORM, False),)
        query = _Query(q, by_words, sums_of_q, factor, constant, cap, last, turning, steps)
    r = tl.arange(0, G // PARITIES) * PARITIES
    wave = ()
    if DEPTH:
        wave = waves(step, r, DEPTH)
    TO_VALUE: tl.constexpr = P * D  # from a token's key
    inner = u // U % PARITIES * D + u % U
    before = tl.cdiv(fast_lo - lo, G)
    for i in tl.range(0, before + tl.cdiv(hi - fast_hi, G), num_stages=COPY_STAGES):
        t0 = tl.where(i < before, lo + i * G, fast_hi + (i - before) * G)
        end = tl.where(i < before, fast_lo, hi)
        position = ()
        hot = ()
        slot = tl.zeros([G // PARITIES], tl.int32)
        for parity in tl.static_range(PARITIES):
            token = t0 + r + parity
            found = _slot(copies, token, origin, end, SINKS)
            hot = hot + (found >= 0,)
            position = position + (tl.where(found >= 0, token, _NEVER),)
            slot = tl.maximum(slot, found)  # both tokens of a pair are in one block
        copy = slot.to(tl.int64) * rows_slot_stride + head * rows_head_stride
        copy += (t0 + r) % P * D
        key = copy[:, None] + inner[None, :]
        value = (copy + TO_VALUE)[None, :] + inner[:, None]
        sums = _copies_step(rows, key, value, hot, query, _turning(wave, query, t0, DEPTH), position, sums, FORM)

    # normalise, undo the weights; at D = 64 join the two parities
    m = sums.m
    if not CAPPED:
        m *= factor
    sum_c = tl.sum(sums.total, 0)
    share = tl.full([C], 1.0, tl.float32)
    top = m
    sum_n = sum_c
    if PARITIES == 2:
        top = tl.max(tl.reshape(m, (2, N)), 0)
        share = tl.exp2(m - tl.reshape(tl.broadcast_to(top[None, :], (2, N)), (C,)))
        sum_n = tl.sum(tl.reshape(sum_c * share, (2, N)), 0)
    sum_n = tl.maximum(sum_n, 1e-30)
    share_n = 1.0 / sum_n
    n = tl.arange(0, N)
    row = (segment.to(tl.int64) * tl.num_programs(0) + place) * N + n
    used = (place % TILES) * N + n < Q_LEN * RATIO
    for j in tl.static_range(POSITIONS):
        offset = tl.sum(sums.offsets[j // (POSITIONS // GROUPS)], 0)
        y = sums.o[j] * (16777216.0 / weight(VALUE_BITS, j))  # 2^24 of the denormals
        if PARITIES == 2:
            y = tl.where((u // U)[:, None] == (c // N)[None, :], y * share[None, :], 0.0)
            y = tl.sum(tl.sum(tl.reshape(y, (2, U, 2, N)), 2), 0)
            offset = tl.sum(tl.reshape(offset * share, (2, N)), 0)
        y = (y + offset[None, :]) * share_n[None, :]
        y = tl.minimum(tl.maximum(y, -_FP16_MAX), _FP16_MAX)  # INT2 of a row at the bound may lie beyond it
        v = tl.arange(0, WIDTH // PARITIES)
        to = partial + row[None, :] * D + (j * U + v)[:, None]
        tl.store(to, y.to(tl.float16), mask=(v < U)[:, None] & used[None, :])
    log = top + tl.log2(sum_n) - 8.0
    if SINK_LOGITS and not CAPPED:  # what is common to all tokens' logits, and not to the one beside them
        log += tl.load(own + 1 + GROUPS * N + n)
    tl.store(lse + row, log)


@dataclass(frozen=True)
class DecodeTables:
    """A layer's matrices as the decode kernels read them, made once at load.

    fp16 has more bits than the queries and outputs that the matrices are multiplied with. What it cannot hold of a
    small B_K is nothing to a logit; values may be small as a whole, so B_V has a unit.

    Attributes:
        key_inverse: B_K, float16 (KV heads, D, D)
        key_mean: m_K, float32 (KV heads, D)
        value_inverse_t: B_V transposed, in units of `value_unit`, float16 (KV heads, D, D)
        value_unit: float32 (KV heads,), powers of two
        value_mean: m_V, float32 (KV heads, D)
        step, vectors: of the keys' turning mean (see `turning`), if there is one
    """

    key_inverse: torch.Tensor
    key_mean: torch.Tensor
    value_inverse_t: torch.Tensor
    value_unit: torch.Tensor
    value_mean: torch.Tensor
    step: torch.Tensor | None = None
    vectors: torch.Tensor | None = None

    @classmethod
    def of(cls, key: Transform, value: Transform) -> "DecodeTables":
        """Tables for a layer's transforms.

        Raises:
            ConfigError: keys so large that fp16 does not have them.
        """
        tables = cls(
            key.inverse.half().contiguous(), key.mean.contiguous(), *scaled(value.inverse.mT, torch.float16),
            value.mean.contiguous(), *wave_tables(key.turning),
        )  # fmt: skip
        if not tables.key_inverse.isfinite().all():
            raise ConfigError("the inverse of a transform of keys is too large for fp16; calibrate again")
        return tables


def column_tiles(q_len: int, ratio: int) -> tuple[int, int]:
    """(N, tiles) for the (query, head) pairs of one KV head: columns of a tile, and tiles."""
    columns = q_len * ratio
    n = 8 if columns <= 8 else 16
    return n, triton.cdiv(columns, n)


def compiled_for(
    seqs: int, q_len: int, heads: int, ratio: int, layout: PageLayout, device: torch.device
) -> tuple[int, ...]:
    """What the kernels are specialised on that depends on the batch: batches with equal values share compiled code.

    Args:
        ratio: query heads of a KV head
    """
    n, tiles = column_tiles(q_len, ratio)
    segments = segments_of(seqs, heads * tiles, layout, device)
    columns = triton.next_power_of_2(min(n, q_len * ratio))
    return (
        *preparing.shares(seqs, heads * tiles),
        *merging.shares(seqs, heads * tiles, columns, triton.next_power_of_2(layout.head_size), segments),
        triton.next_power_of_2(seqs),
    )


@dataclass(frozen=True)
class DecodeWorkspace:
    """Intermediate results, shared by all layers of one shape. Contents do not outlive a call.

    Attributes:
        folded, sums, copies: see `prepare`
        partial, lse: see `merge`
    """

    folded: torch.Tensor
    sums: torch.Tensor
    copies: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(
        cls,
        layout: PageLayout,
        kv_heads: int,
        ratio: int,
        max_seqs: int,
        max_q_len: int,
        device: torch.device,
        contract: HotContract | None = None,
        turning: bool = False,
    ) -> "DecodeWorkspace":
        """Room for decode batches of up to max_seqs sequences of up to max_q_len queries each.

        Args:
            layout: any number of bits will do
            ratio: query heads of a KV head
            contract: which tokens may have copies; by default up to 64 sinks and a window of 256
            turning: whether any layer's keys have a turning mean
        """
        contract = contract or HotContract(64, 256, layout.block_size)
        shapes = [column_tiles(q_len, ratio) for q_len in range(1, max_q_len + 1)]
        columns = kv_heads * max(n * tiles for n, tiles in shapes)
        fewest_bits = replace(layout, key_bits=2, value_bits=2)  # have most programs
        partials = max(
            segments_of(max_seqs, kv_heads * tiles, fewest_bits, device) * kv_heads * tiles * n for n, tiles in shapes
        )

        def floats(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        return cls(
            folded=torch.empty(max_seqs * columns * layout.head_size, dtype=torch.float16, device=device),
            sums=floats(max_seqs * columns * (layout.groups + 2 + depth(turning))),
            copies=torch.empty(
                max_seqs * kv_heads * copies_capacity(contract, layout, max_q_len), dtype=torch.int32, device=device
            ),
            partial=torch.empty(partials * layout.head_size, dtype=torch.float16, device=device),
            lse=floats(partials),
        )


def decode_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    pool: HotPool,
    table: SlotTable,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_len: int,
    segments: Segments,
    tables: DecodeTables,
    scale: float,
    soft_cap: float,
    sliding_window: int | None,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    reads: ReadCounter | None = None,
    behind_write: bool = False,
    sink_logits: torch.Tensor | None = None,
    query_starts: torch.Tensor | None = None,
) -> None:
    """Attention of a decode batch, every token of it stored; the same semantics as `attention.attend`.

    Three launches, no allocation, no sync. What changes from step to step is read from device tensors only.

    Args:
        query: BF16 or FP16 (tokens, query heads, D), after RoPE
        pages: uint8 (blocks, KV heads, >= head_bytes), any block and head stride that is a multiple of 128
        block_table: int32 (sequences, >= blocks of the longest)
        seq_lens: int32 (sequences,), tokens after this step; 0 for padding, whose output is then m_V, or 0 with
            sink_logits
        q_len: queries of each sequence, or the most that one has; query i sees its own token and everything before
        segments: built by `build_segments` for this step, these sequences, q_len and sliding window
        scale: softmax scale
        soft_cap: 0 for none
        out: like query
        reads: where the layer counts
        behind_write: see `prepare`
        sink_logits: any float dtype (query heads,), contiguous, see `attention.attend`
        query_starts: int32 (sequences + 1,), where each sequence's queries begin; None where all have q_len
    """
    heads, ratio = pages.shape[1], query.shape[1] // pages.shape[1]
    n, tiles = column_tiles(q_len, ratio)
    capacity = copies_capacity(table.contract, layout, q_len)
    if workspace.copies.numel() < seq_lens.shape[0] * heads * capacity:
        raise ConfigError(f"the decode workspace was allocated for a smaller contract than {table.contract}")
    words = pages[..., : layout.head_bytes].view(torch.int32)
    prepare(
        query, tables.key_inverse, tables.key_mean, tables.vectors, scale, q_len, (n, tiles),
        soft_cap > 0 or sink_logits is not None, words, layout, pool, table, block_table, seq_lens, workspace.folded,
        workspace.sums, workspace.copies, query_starts, sliding_window, reads, behind_write,
    )  # fmt: skip
    parities = 2 if layout.head_size == 64 else 1
    form = _Form(
        columns=n, tiles=tiles, ratio=ratio, q_len=q_len, head_size=layout.head_size, units=layout.units,
        width=triton.next_power_of_2(parities * layout.units), parities=parities, groups=layout.groups,
        block_size=layout.block_size, value_codes=layout.value_codes_offset, meta=layout.meta_offset,
        key_bits=layout.key_bits, value_bits=layout.value_bits,
        sliding_window=sliding_window or 0, capped=soft_cap > 0,
        sinks=sink_capacity(table.contract, layout), window=table.contract.window, capacity=capacity,
        tile=tile_tokens(layout.head_size), granule=granule(layout.head_size), depth=depth(tables.step is not None),
    )  # fmt: skip
    starts = given_starts(query_starts, seq_lens)
    _decode[(heads * tiles, segments.table.shape[0])](
        workspace.folded, workspace.sums, *starts, tables.step, workspace.copies, words, words.view(torch.int16),
        pool.rows, block_table, seq_lens, segments.table, workspace.partial, workspace.lse,
        soft_cap * 1.4426950408889634,
        words.stride(0), words.stride(1), pool.rows.stride(0), pool.rows.stride(1), block_table.stride(0),
        FORM=form, COLUMNS=FIELDS.value, STAGES=_STAGES, COPY_STAGES=_COPY_STAGES,
        SINK_LOGITS=sink_logits is not None, RELEASES=supported(query.device), num_warps=1,
        maxnreg=registers(layout),
    )  # fmt: skip
    merge_segments(
        workspace.partial, workspace.lse, segments, tables.value_inverse_t, tables.value_unit, tables.value_mean, q_len,
        (n, tiles), out, *starts, sink_logits,
    )  # fmt: skip
