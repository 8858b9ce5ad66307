"""RoPE as the calibration's tests turn rows."""

import torch

HEADS, SIZE, PAIRS = 2, 64, 32
FREQUENCY = 10000.0 ** (-torch.arange(PAIRS, dtype=torch.float32) / PAIRS)  # radians a token


def rope(rows: torch.Tensor, position: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rows (heads, T, D) turned by so many tokens (T,); pairs are neighbours or one from each half."""
    angle = position[:, None] * FREQUENCY.double()
    cos, sin = angle.cos(), angle.sin()
    if interleaved:
        first, second = rows[..., 0::2], rows[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    first, second = rows.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
