"""The part of the keys' mean that turns with the position, as RoPE turns the bias of a key projection.

A bias b leaves RoPE as RoPE(b, t): on a pair of channels that turns by w radians a token it is c cos(w t) + s sin(w t).
The mean over positions holds what hardly turns; the rest is as large as the bias itself, and INT2 has to spend its four
levels on it, unless it is taken off: y = (k - m - m(t)) T, with q . m(t) added to the logit. docs/maths.md has the
formulas.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

TURN = 1 << 32  # units of a whole turn


@dataclass(frozen=True)
class TurningMean:
    """m(t) = sum over pairs of cos(w t) vectors[:, pair, 0] + sin(w t) vectors[:, pair, 1].

    Angles are counted in whole 2^-32 of a turn, modulo one turn. Whoever adds up angles of a tile's first token and of
    a token inside the tile then has exactly the angle of the token's position, at any context length.

    Attributes:
        frequency: w, float32 (pairs,), radians a token
        vectors: float32 (heads, pairs, 2, D); float64 in calibration, which makes them
    """

    frequency: torch.Tensor
    vectors: torch.Tensor

    @cached_property
    def step(self) -> torch.Tensor:
        """int64 (pairs,), units that a pair turns a token."""
        return (self.frequency.double() * (TURN / (2 * math.pi))).round().long()

    def shard(self, start: int, stop: int, device: torch.device | None) -> "TurningMean":
        """KV heads start to stop - 1, on a device."""
        return TurningMean(self.frequency.to(device), self.vectors[start:stop].to(device))

    def waves(self, position: torch.Tensor) -> torch.Tensor:
        """cos and sin of each pair's angle, float32 (tokens, pairs, 2), at int64 positions (tokens,)."""
        units = position.long()[:, None] * self.step % TURN
        angle = units.double() * (2 * math.pi / TURN)
        return torch.stack([angle.cos(), angle.sin()], -1).float()

    def at(self, position: torch.Tensor) -> torch.Tensor:
        """m(t), float32 (tokens, heads, D)."""
        return torch.einsum("tpc,hpcd->thd", self.waves(position), self.vectors)
