"""Other methods' ways to store keys and values, as what reading gives back. Torch only."""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_oscar.errors import ConfigError
from vllm_oscar.rotation import hadamard

_PAIR = 32  # bits of a scale and an offset in fp16


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
