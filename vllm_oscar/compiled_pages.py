# mypy: disable-error-code="no-untyped-def"
"""Pages on CPU, by functions that numba compiles: `CacheLayer.write` and `attention.read_rows`, to the last bit, in one
pass over the tokens.

Importing this module raises ImportError where numba is missing; vLLM brings it.
"""

from functools import cache

import numpy as np
import torch

from vllm_oscar.attention import StoredRows, first_seen
from vllm_oscar.cache_layer import CacheLayer
from vllm_oscar.compiled_quantizer import compiled
from vllm_oscar.hot_pool import NO_SLOT, HotPool, SlotTable, page_words
from vllm_oscar.page_layout import KEY, VALUE, PageViews
from vllm_oscar.quantizer import sanitised


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    """All of a type of 16 bits, by their bits (65536,)."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@cache
def _values(dtype: torch.dtype) -> np.ndarray:
    """float32 (65536,): what 16 bits mean."""
    return _numbers(dtype).float().numpy()


@cache
def _sanitised_bits(dtype: torch.dtype) -> np.ndarray:
    """int16 (65536,): the bits of `sanitised` numbers, by the bits of the number."""
    return sanitised(_numbers(dtype))[0].to(dtype).view(torch.int16).numpy()


def _planes(views: PageViews, which: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Of keys' or values' codes: int16 (blocks, heads, P, D/8), the rest as uint8 (..., bytes) or none, the bits."""
    words, *rest = views.planes[which]
    return words.view(torch.int16).numpy(), (rest or [words[..., :0]])[0].numpy(), views.bits(which)


def write(
    layer: CacheLayer,
    views: PageViews,
    pool: HotPool,
    key: torch.Tensor,
    value: torch.Tensor,
    position: torch.Tensor,
    slot_mapping: torch.Tensor,
    hot_slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See CacheLayer.write; everything lies on the CPU."""
    if not bool((slot_mapping >= 0).all()):
        stored = slot_mapping >= 0
        key, value, position = key[stored], value[stored], position[stored]
        slot_mapping, hot_slot_mapping = slot_mapping[stored], hot_slot_mapping[stored]
    saturated = torch.zeros((), dtype=torch.int64)
    for which, codec, rows in ((KEY, layer.key, key), (VALUE, layer.value, value)):
        y = codec.transform.forward(rows, position).to(pool.rows.dtype).contiguous()
        encoded = codec.encode(y)
        _write_rows(
            which,
            encoded.codes.numpy(),
            torch.stack([encoded.scale, encoded.offset], -1).view(torch.int32)[..., 0].numpy(),
            y.view(torch.int16).numpy(),
            slot_mapping.numpy(),
            hot_slot_mapping.numpy(),
            *_planes(views, which),
            page_words(views.meta).numpy(),
            pool.rows.view(torch.int16).numpy(),
            pool.words.numpy(),
            _sanitised_bits(pool.rows.dtype),
        )
        saturated += encoded.saturated
    return saturated


@compiled
def _write_rows(
    which, codes, pairs, y, slots, hot_slots, page_codes, rest, bits, words, copies, copied_words, sanitised_bits
):
    """Args:
    codes: uint8 (tokens, heads, D)
    pairs: int32 (tokens, heads, groups), scale and offset as float16
    y: int16 (tokens, heads, D), bits of the rows that become copies
    slots, hot_slots: int64 (tokens,), places in pages and copies; -1 for none in the latter
    page_codes, rest, words, copies, copied_words: written, see `_read_rows`
    bits: of a code
    """
    tokens, heads, size = codes.shape
    in_words = 16 // bits
    block_size, groups, units = words.shape[2], pairs.shape[2], size // 8
    for token in range(tokens):
        block, at = slots[token] // block_size, slots[token] % block_size
        for head in range(heads):
            for unit in range(units):
                word = 0
                for position in range(min(8, in_words)):
                    word |= np.int64(codes[token, head, unit + units * position]) << (bits * position)
                more = 0
                for position in range(in_words, 8):
                    more |= np.int64(codes[token, head, unit + units * position]) << (bits * (position - in_words))
                if bits == 3:
                    word |= more >> 8 << 15
                page_codes[block, head, at, unit] = np.int16(word)
                for i in range(bits - 2):
                    rest[block, head, at, (bits - 2) * unit + i] = np.uint8((more >> (8 * i)) & 0xFF)
            for group in range(groups):
                words[block, head, at, which * groups + group] = pairs[token, head, group]
            if hot_slots[token] >= 0:
                slot, hot_at = hot_slots[token] // block_size, hot_slots[token] % block_size
                for group in range(groups):
                    copied_words[slot, head, hot_at, which * groups + group] = pairs[token, head, group]
                for i in range(size):
                    copies[slot, head, which, hot_at, i] = sanitised_bits[y[token, head, i] & 0xFFFF]


def read_rows(
    views: PageViews,
    pool: HotPool,
    table: SlotTable,
    blocks: torch.Tensor,
    tokens: int,
    before: int,
    sliding_window: int | None = None,
) -> StoredRows:
    """See attention.read_rows; everything lies on the CPU."""
    sink, window = table.limits.tolist()
    heads, size = pool.rows.shape[1], pool.rows.shape[-1]
    rows = torch.zeros(2, heads, tokens, size)
    hot = torch.zeros(tokens, heads, dtype=torch.bool)
    _read_rows(
        _planes(views, KEY),
        _planes(views, VALUE),
        page_words(views.meta).numpy(),
        pool.rows.view(torch.int16).numpy(),
        pool.words.numpy(),
        blocks.numpy(),
        table.slot_of_block.numpy(),
        table.written.numpy(),
        first_seen(before, sliding_window),
        sink,
        before + 1 - window,
        _values(torch.float16),
        _values(pool.rows.dtype),
        rows.numpy(),
        hot.numpy(),
    )
    return StoredRows(rows[KEY].transpose(0, 1), rows[VALUE].transpose(0, 1), hot)


@compiled
def _read_rows(
    key_codes,
    value_codes,
    words,
    copies,
    copied_words,
    blocks,
    slots,
    written,
    first,
    sink,
    recent,
    half_values,
    values,
    rows,
    hot,
):
    """Args:
    key_codes, value_codes: see `_planes`
    words, copied_words: int32 (blocks or slots, heads, P, 2 * groups), scale and offset as float16
    copies: int16 (slots, heads, 2, P, D)
    blocks: int64, those of the request in order
    slots: int32, of each block
    written: uint8 (slots + 1, P), see SlotTable
    first: token from which on rows are read
    sink, recent: tokens before the one and from the other on are read from copies
    half_values, values: see `_values`
    rows, hot: the results, float32 (2, heads, tokens, D) and bool (tokens, heads)
    """
    heads, tokens, size = rows.shape[1:]
    block_size, pairs = words.shape[2:]
    units = size // 8
    group_size = 2 * size // pairs  # `pairs` counts keys' and values' groups
    unit_of_row = np.empty(units, np.int64)  # contiguous, for vector instructions
    for head in range(heads):
        for token in range(first, tokens):
            block, at = blocks[token // block_size], token % block_size
            slot = slots[block]
            proven = slot != NO_SLOT and written[slot, at] > 0 and (token < sink or token >= recent)
            for pair in range(pairs):
                proven = proven and words[block, head, at, pair] == copied_words[slot, head, at, pair]
            hot[token, head] = proven
            for which in range(2):
                row = rows[which, head, token]
                if proven:
                    for i in range(size):
                        row[i] = values[copies[slot, head, which, at, i] & 0xFFFF]
                    continue
                words_of, rest_of, bits = key_codes if which == 0 else value_codes
                codes, rest = words_of[block, head, at], rest_of[block, head, at]
                for unit in range(units):
                    first_word = np.int64(codes[unit]) & 0xFFFF
                    if bits == 3:  # the word's last bit belongs to the last code
                        more = np.int64(rest[unit]) | ((first_word >> 15) << 8)
                        unit_of_row[unit] = (first_word & 0x7FFF) | (more << 15)
                    elif bits == 4:
                        more = np.int64(rest[2 * unit]) | (np.int64(rest[2 * unit + 1]) << 8)
                        unit_of_row[unit] = first_word | (more << 16)
                    else:
                        unit_of_row[unit] = first_word
                for position in range(8):
                    channel = position * units
                    word = words[block, head, at, (which * pairs) // 2 + channel // group_size]
                    scale, offset = half_values[word & 0xFFFF], half_values[(word >> 16) & 0xFFFF]
                    for unit in range(units):
                        code = (unit_of_row[unit] >> (bits * position)) & ((1 << bits) - 1)
                        row[channel + unit] = np.float32(code) * scale + offset
