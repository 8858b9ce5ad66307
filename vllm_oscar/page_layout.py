"""Where every byte of an INT2 page lies. The reference, the kernels and vLLM's page size all come from here.

One vLLM block holds, for each KV head, one contiguous region for its P tokens:

    [ key codes   P x D/4 bytes ]
    [ value codes P x D/4 bytes ]
    [ meta        P x {key, value} x groups x {scale, offset}, fp16 ]

A token owns whole bytes in each part, so an append is three stores and no read-modify-write.
Inside a row of codes, the 16-bit unit u holds channel u + (D/8)*j at bits 2j and 2j+1 (j = 0..7): masking two
bits of all units yields D/8 consecutive channels, and a group of channels is a whole number of bit positions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_oscar.errors import ConfigError

HEAD_SIZES = (64, 80, 96, 128, 192, 256)
GROUP_SIZES = {64: (32,), 128: (32, 64)}  # besides the whole head, which is the default for every head size
BLOCK_SIZES = "16, 32, 64, 128 or another power of two"  # tokens; what messages say
ALIGNMENT = 128  # bytes; a cache line of the GPU
KEY, VALUE = 0, 1


class PageViews(NamedTuple):
    """Typed views of one layer's pages; writing to them writes the pages.

    Attributes:
        codes: keys and values, each uint8 (blocks, heads, P, D/4)
        meta: float16 (blocks, heads, P, 2, groups, 2), the last axis being (scale, offset)
    """

    codes: tuple[torch.Tensor, torch.Tensor]
    meta: torch.Tensor


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
        ConfigError: no layout exists for the head size, group size or block size.
    """

    head_size: int
    block_size: int
    group_size: int = 0  # 0: the whole head

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

    @property
    def groups(self) -> int:
        """Quantization groups of a row."""
        return self.head_size // self.group_size

    @property
    def units(self) -> int:
        """16-bit units of a row of codes."""
        return self.head_size // 8

    @property
    def code_bytes(self) -> int:
        """Bytes of one token's codes, keys or values."""
        return self.head_size // 4

    @property
    def meta_bytes(self) -> int:
        """Bytes of one token's scales and offsets, keys and values."""
        return 2 * self.groups * 2 * 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one KV head."""
        return 2 * self.code_bytes + self.meta_bytes

    @property
    def key_codes_offset(self) -> int:
        return 0

    @property
    def value_codes_offset(self) -> int:
        return self.block_size * self.code_bytes

    @property
    def meta_offset(self) -> int:
        return 2 * self.block_size * self.code_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head's region; a multiple of ALIGNMENT for every supported size."""
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

        def codes(offset: int) -> torch.Tensor:
            return pages.as_strided(
                (blocks, heads, self.block_size, self.code_bytes),
                (block_stride, head_stride, self.code_bytes, 1),
                start + offset,
            )

        # the fp16 view needs strides in units of 2 bytes
        half = torch.empty(0, dtype=torch.float16, device=pages.device).set_(pages.untyped_storage())
        meta = half.as_strided(
            (blocks, heads, self.block_size, 2, self.groups, 2),
            (block_stride // 2, head_stride // 2, self.meta_bytes // 2, self.groups * 2, 2, 1),
            (start + self.meta_offset) // 2,
        )
        return PageViews((codes(self.key_codes_offset), codes(self.value_codes_offset)), meta)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes (..., D), any integer dtype, values 0..3 -> bytes uint8 (..., D/4) in the interleaved order."""
    shape = codes.shape
    units = codes.to(torch.int32).reshape(*shape[:-1], 8, shape[-1] // 8)
    shift = 2 * torch.arange(8, device=codes.device, dtype=torch.int32)
    words = (units << shift[:, None]).sum(-2, dtype=torch.int32)
    return torch.stack([words & 0xFF, words >> 8], -1).to(torch.uint8).reshape(*shape[:-1], shape[-1] // 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 (..., D/4) -> codes uint8 (..., D)."""
    shape = data.shape
    words = data.contiguous().view(torch.int16)
    shift = 2 * torch.arange(8, device=data.device, dtype=torch.int16)
    codes = (words[..., None, :] >> shift[:, None]) & 3  # the sign bits that an arithmetic shift brings are masked
    return codes.to(torch.uint8).reshape(*shape[:-1], shape[-1] * 4)
