"""Other methods' ways to store keys and values, as what reading gives back. Torch only."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_oscar.errors import ConfigError
from vllm_oscar.rotation import hadamard

_PAIR = 32  # bits of a scale and an offset in fp16
_SCALE = 16  # bits of a scale in fp16


class Codec(Protocol):
    """A way to store rows.

    Attributes:
        tokens: stored together; the newest of a request wait in BF16 until there are as many
    """

    @property
    def tokens(self) -> int: ...

    def bits(self, head_size: int) -> float:
        """Of a stored element, scales and offsets counted.

        Raises:
            ConfigError: no such rows.
        """
        ...

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """What reading gives back, of float32 (a multiple of `tokens`, heads, D)."""
        ...

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """The same of values."""
        ...


def min_max(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest of 2^bits even steps from a group's least value to its greatest, float32 (..., group size).

    Scale and offset are in fp16.
    """
    low = groups.amin(-1, keepdim=True).half().float()
    scale = ((groups.amax(-1, keepdim=True) - low) / (2**bits - 1)).half().float()
    codes = ((groups - low) / scale).nan_to_num(0).round().clamp(0, 2**bits - 1)
    return low + scale * codes


@dataclass(frozen=True)
class Kivi:
    """KIVI's INT2 (arXiv 2402.02750): a scale for `group` tokens of a key channel, and for `group` channels of a value.

    KIVI keeps the last 128 tokens in BF16 and no first ones; here it gets the sink and the window of all methods.
    """

    group: int

    @property
    def tokens(self) -> int:
        return self.group

    def bits(self, head_size: int) -> float:
        if head_size % self.group:
            raise ConfigError(f"KIVI's groups of {self.group} do not divide head size {head_size}; leave it out")
        return 2 + _PAIR / self.group

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        channels = rows.movedim(0, -1).unflatten(-1, (-1, self.group))
        return min_max(channels, 2).flatten(-2).movedim(-1, 0)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        return min_max(rows.unflatten(-1, (-1, self.group)), 2).flatten(-2)


@dataclass(frozen=True)
class RotatedInt4:
    """SAW-INT4 (arXiv 2604.19157): rows mixed by a Hadamard matrix, then INT4 with a scale for each token and head."""

    tokens: int = 1

    def bits(self, head_size: int) -> float:
        return 4 + _PAIR / head_size

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        mixing = hadamard(rows.shape[-1]).to(rows)
        return min_max(rows @ mixing, 4) @ mixing.mT

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        return self.keys(rows)


@dataclass(frozen=True)
class KVarN:
    """KVarN (arXiv 2606.03458) as its vLLM fork's `kvarn_k4v2_g128` stores tiles of 128 tokens of a head.

    Rows are mixed by a Hadamard matrix; then the tile is divided by scales of its tokens and of its channels, found in
    turns so that the standard deviations of all become alike; then keys are rounded by channel and values by token,
    from least to greatest. KVarN keeps the first 128 tokens and the last incomplete tile in fp16; here it gets the sink
    and the window of all methods.
    """

    key_bits: int = 4
    value_bits: int = 2
    tokens: int = 128

    def bits(self, head_size: int) -> float:
        codes = (self.key_bits + self.value_bits) / 2
        # scale and offset of a channel's or a token's codes, and the scale of the other; for keys and for values
        return codes + (_PAIR + _SCALE) * (1 / self.tokens + 1 / head_size) / 2

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        return self._stored(rows, self.key_bits, by_channel=True)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        return self._stored(rows, self.value_bits, by_channel=False)

    def _stored(self, rows: torch.Tensor, bits: int, by_channel: bool) -> torch.Tensor:
        mixing = hadamard(rows.shape[-1]).to(rows)
        # (tiles, heads, tokens, channels), or the last two the other way round: what is rounded together is a row
        tiles = (rows @ mixing).unflatten(0, (-1, self.tokens)).transpose(1, 2)
        tiles = tiles.mT if by_channel else tiles
        row, column = balanced(tiles)
        even = tiles / row / column
        low = even.amin(-1, keepdim=True)
        step = ((even.amax(-1, keepdim=True) - low) / (2**bits - 1)).clamp(min=1e-10)
        codes = ((even - low) / step).round().clamp(0, 2**bits - 1)
        scale, offset, column = (t.half().float() for t in (row * step, row * low, column))
        stored = (codes * scale + offset) * column
        return (stored.mT if by_channel else stored).transpose(1, 2).flatten(0, 1) @ mixing.mT


_TURNS = 16  # of KVarN's normalisation


def balanced(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of rows and columns that make the standard deviations of all rows alike, and of all columns.

    Of all turns of dividing columns, then rows, by their standard deviations, those scales are taken that leave the
    least sum of the ratios of the greatest to the least deviation. The bounds are KVarN's.

    Args:
        tiles: float32 (..., rows, columns)

    Returns:
        (..., rows, 1) and (..., 1, columns)
    """

    def deviations(turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return turn.std(-1, keepdim=True), turn.std(-2, keepdim=True)

    def imbalance(turn: torch.Tensor) -> torch.Tensor:
        both = ((d.amax((-2, -1), keepdim=True), d.amin((-2, -1), keepdim=True)) for d in deviations(turn))
        row, column = (most / least.clamp(min=1e-8) for most, least in both)
        return row + column

    row, column = (torch.ones_like(d) for d in deviations(tiles))
    best, least = (row, column), imbalance(tiles)
    low, high = math.exp(-0.3), math.exp(10)
    for _ in range(_TURNS):
        column = (column * deviations(tiles / row / column)[1].clamp(1e-3, 1e3)).clamp(low, high)
        row = (row * deviations(tiles / row / column)[0].clamp(1e-3, 1e3)).clamp(low, high)
        now = imbalance(tiles / row / column)
        best = (torch.where(now <= least, row, best[0]), torch.where(now <= least, column, best[1]))
        least = torch.minimum(now, least)
    return best
