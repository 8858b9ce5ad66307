"""Where every byte of a page lies. The reference, the kernels and vLLM's page size all come from here.

One vLLM block holds, for each KV head, one contiguous region for its P tokens:

    [ key codes    P x D/4 bytes, of 3 bits P x D/8 more, of 4 bits P x D/4 more ]
    [ value codes  likewise ]
    [ meta         P x {key, value} x groups x {scale, offset}, fp16 ]

A token owns whole bytes in each part, so an append is a few stores and no read-modify-write.

A row of codes has D/8 units, and unit u the channels u + (D/8)*j (j = 0..7), so that one position j of all units is D/8
consecutive channels, and a group of channels is a whole number of positions. A unit of b-bit codes is a 16-bit word,
which holds its first 16 // b codes, code j at bit b*j, and behind all words of the block, in a second plane, the rest:

    2 bits   nothing
    3 bits   a byte: codes 5, 6 and 7 at bits 0, 3 and 6; the ninth bit is bit 15 of the word
    4 bits   a word: codes 4 to 7 at bits 0, 4, 8 and 12
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_oscar.errors import ConfigError

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
GROUP_SIZES = {64: (32,), 128: (32, 64)}  # besides the whole head, which is the default for every head size
BLOCK_SIZES = "16, 32, 64, 128 or another power of two"  # tokens; what messages say
ALIGNMENT = 128  # bytes; a cache line of the GPU
KEY, VALUE = 0, 1
KEY_BITS = (2, 3, 4)
VALUE_BITS = (2, 4)  # kernels read values transposed, for which a plane of bytes is no good


class PageViews(NamedTuple):
    """Typed views of one layer's pages; writing to them writes the pages.

    Attributes:
        planes: of the codes of keys and values, each one or two of uint8 (blocks, heads, P, bytes)
        meta: float16 (blocks, heads, P, 2, groups, 2), the last axis being (scale, offset)
    """

    planes: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
    meta: torch.Tensor

    def bits(self, which: int) -> int:
        """Of a code."""
        first, *rest = (plane.shape[-1] for plane in self.planes[which])
        return 2 + 2 * sum(rest) // first

    def codes(self, which: int, index: Any) -> torch.Tensor:
        """Codes uint8 (..., D) of the rows at an index of (blocks, heads, P)."""
        return unpack([plane[index] for plane in self.planes[which]])

    def store(self, which: int, index: Any, codes: torch.Tensor) -> None:
        """Write codes (..., D) to the rows at an index of (blocks, heads, P)."""
        for plane, packed in zip(self.planes[which], pack(codes, self.bits(which)), strict=True):
            plane[index] = packed


def group_sizes(head_size: int) -> tuple[int, ...]:
    """Numbers of channels that may share a scale and an offset."""
    return (head_size, *GROUP_SIZES.get(head_size, ()))


def is_block_size(tokens: int) -> bool:
    """Whether pages can have blocks of so many tokens, see BLOCK_SIZES."""
    return tokens >= 16 and not tokens & (tokens - 1)


@dataclass(frozen=True)
class PageLayout:
    """Sizes and offsets, in bytes, of one KV head's region in a page.

    Raises:
        ConfigError: no layout exists for the head size, group size, block size or numbers of bits.
    """

    head_size: int
    block_size: int
    group_size: int = 0  # 0: the whole head
    key_bits: int = 2
    value_bits: int = 2

    def __post_init__(self) -> None:
        if self.head_size not in HEAD_SIZES:
            raise ConfigError(
                f"head size {self.head_size} has no INT2 page layout (supported: {HEAD_SIZES}); "
                "serve this model with --kv-cache-dtype fp8 or auto"
            )
        if self.group_size == 0:
            object.__setattr__(self, "group_size", self.head_size)
        if self.group_size not in group_sizes(self.head_size):
            raise ConfigError(
                f"group_size {self.group_size} at head size {self.head_size}: use one of {group_sizes(self.head_size)}"
            )
        if not is_block_size(self.block_size):
            raise ConfigError(f"block size {self.block_size}: use {BLOCK_SIZES}")
        if self.key_bits not in KEY_BITS or self.value_bits not in VALUE_BITS:
            raise ConfigError(
                f"keys of {self.key_bits} bits and values of {self.value_bits}: use one of {KEY_BITS} for keys, "
                f"{VALUE_BITS} for values"
            )
        if self.head_bytes % ALIGNMENT:
            fitting = next(p for p in (32, 64) if p * self.token_bytes % ALIGNMENT == 0)
            raise ConfigError(
                f"block size {self.block_size} with head size {self.head_size}, keys of {self.key_bits} and values of "
                f"{self.value_bits} bits: use --block-size {fitting} or larger"
            )

    @property
    def groups(self) -> int:
        """Quantization groups of a row."""
        return self.head_size // self.group_size

    @property
    def units(self) -> int:
        """16-bit units of a row of codes."""
        return self.head_size // 8

    def plane_bytes(self, which: int) -> tuple[int, ...]:
        """Bytes of one token's codes in each plane; `which` is KEY or VALUE."""
        bits = (self.key_bits, self.value_bits)[which]
        words, rest = 2 * self.units, (bits - 2) * self.units
        return (words, rest) if rest else (words,)

    @property
    def meta_bytes(self) -> int:
        """Bytes of one token's scales and offsets, keys and values."""
        return 2 * self.groups * 2 * 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one KV head."""
        return (self.key_bits + self.value_bits) * self.units + self.meta_bytes

    @property
    def value_codes_offset(self) -> int:
        """Those of keys are at 0; the second plane of either lies P * D/4 bytes behind the first."""
        return self.block_size * self.key_bits * self.units

    @property
    def meta_offset(self) -> int:
        return self.block_size * (self.token_bytes - self.meta_bytes)

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head's region; a multiple of ALIGNMENT."""
        return self.block_size * self.token_bytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits for each key or value element, scales and offsets counted."""
        return self.token_bytes * 8 / (2 * self.head_size)

    def page_bytes(self, num_kv_heads: int) -> int:
        """Bytes of one block of one layer."""
        return num_kv_heads * self.head_bytes

    def views(self, pages: torch.Tensor) -> PageViews:
        """Views of a layer's pages.

        Args:
            pages: uint8 (blocks, heads, at least head_bytes), the last axis contiguous. Blocks and heads may be
                padded or strided in any way that keeps ALIGNMENT: only strides are used, never the shape.

        Raises:
            ConfigError: the tensor is not of that form.
        """
        blocks, heads = pages.shape[:2]
        block_stride, head_stride = pages.stride()[:2]
        if pages.dtype != torch.uint8 or pages.stride(2) != 1 or pages.shape[2] < self.head_bytes:
            raise ConfigError(
                f"pages must be uint8 (blocks, heads, >= {self.head_bytes}), got {pages.dtype} {tuple(pages.shape)}"
            )
        start = pages.storage_offset()
        if any(distance % ALIGNMENT for distance in (start, block_stride, head_stride)):
            raise ConfigError(
                f"pages must lie at multiples of {ALIGNMENT} bytes, "
                f"got offset {start} and strides {(block_stride, head_stride)}"
            )

        def planes(which: int) -> tuple[torch.Tensor, ...]:
            first = start + (0, self.value_codes_offset)[which]
            return tuple(
                pages.as_strided(
                    (blocks, heads, self.block_size, size),
                    (block_stride, head_stride, size, 1),
                    first + number * self.block_size * self.head_size // 4,
                )
                for number, size in enumerate(self.plane_bytes(which))
            )

        # the fp16 view needs strides in units of 2 bytes
        half = torch.empty(0, dtype=torch.float16, device=pages.device).set_(pages.untyped_storage())
        meta = half.as_strided(
            (blocks, heads, self.block_size, 2, self.groups, 2),
            (block_stride // 2, head_stride // 2, self.meta_bytes // 2, self.groups * 2, 2, 1),
            (start + self.meta_offset) // 2,
        )
        return PageViews((planes(KEY), planes(VALUE)), meta)


def pack(codes: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Codes (..., D), any integer dtype, below 2^bits -> their planes, uint8 (..., bytes)."""
    units = codes.to(torch.int32).unflatten(-1, (8, -1))
    first = 16 // bits

    def joined(part: torch.Tensor) -> torch.Tensor:
        shift = bits * torch.arange(part.shape[-2], device=part.device, dtype=torch.int32)
        return (part << shift[:, None]).sum(-2, dtype=torch.int32)

    def as_bytes(units: torch.Tensor, count: int) -> torch.Tensor:
        return torch.stack([(units >> 8 * i) & 0xFF for i in range(count)], -1).to(torch.uint8).flatten(-2)

    words, rest = joined(units[..., :first, :]), joined(units[..., first:, :])
    if bits == 3:
        words = words | (rest >> 8 << 15)
    return (as_bytes(words, 2), as_bytes(rest, bits - 2)) if bits > 2 else (as_bytes(words, 2),)


def unpack(planes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Planes uint8 (..., bytes) -> codes uint8 (..., D)."""
    bits = 2 + 2 * planes[1].shape[-1] // planes[0].shape[-1] if len(planes) > 1 else 2
    first = 16 // bits

    def parts(units: torch.Tensor, count: int) -> torch.Tensor:
        shift = bits * torch.arange(count, device=units.device, dtype=torch.int32)
        return (units[..., None, :] >> shift[:, None]) & ((1 << bits) - 1)

    def words(plane: torch.Tensor) -> torch.Tensor:
        return plane.contiguous().view(torch.int16).to(torch.int32)  # masks take the sign bits away again

    units = words(planes[0])
    codes = [parts(units, first)]
    if bits == 3:
        codes.append(parts(planes[1].to(torch.int32) | ((units >> 7) & 0x100), 8 - first))
    elif bits == 4:
        codes.append(parts(words(planes[1]), 8 - first))
    return torch.cat(codes, -2).to(torch.uint8).flatten(-2)
