# mypy: disable-error-code="no-untyped-def"
"""The keys' turning mean in kernels: m(t) = waves(t) @ vectors, a product of depth 16.

Columns of `waves` are the cosines of all pairs, then their sines. A layer with fewer than MAX_TURNING_PAIRS pairs gets
pairs of zeros, so that kernels come in two variants: DEPTH is 16 where a layer's mean turns, and 0 where it does not.
Both factors go through the tensor cores as two fp16 numbers, whose sum has fp32's precision or nearly: biases of
hundreds are off by a ten-thousandth.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from vllm_oscar.errors import ConfigError
from vllm_oscar.sidecar import MAX_TURNING_PAIRS
from vllm_oscar.turning import TurningMean

_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_RADIANS: tl.constexpr = tl.constexpr(1.4629180792671596e-09)  # 2 pi / 2^32


def depth(turning: bool) -> int:
    """DEPTH: what tensor cores take at once, or 0."""
    return 2 * MAX_TURNING_PAIRS if turning else 0


def wave_tables(turning: TurningMean | None) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """What kernels read.

    Returns:
        step: int32 (16,), units of 2^-32 turn a token of each column of `waves`
        vectors: float16 (2, heads, 16, D), what each column is multiplied with, as two numbers

    Raises:
        ConfigError: vectors so large that fp16 does not have them.
    """
    if turning is None:
        return None, None
    heads, pairs, _, size = turning.vectors.shape
    step = turning.step.new_zeros(2, MAX_TURNING_PAIRS)
    step[:, :pairs] = turning.step
    vectors = turning.vectors.new_zeros(heads, 2, MAX_TURNING_PAIRS, size)
    vectors[:, :, :pairs] = turning.vectors.transpose(1, 2)
    high = vectors.half()
    if not high.isfinite().all():
        raise ConfigError("a turning mean is too large for fp16; calibrate again")
    both = torch.stack([high, (vectors - high).half()])
    return ((step + 2**31) % 2**32 - 2**31).int().flatten(), both.flatten(2, 3)


@triton.jit
def cos_sin(step, token):
    """Of the angle at int32 tokens, within 2^-20. The product wraps: that is modulo one turn, and exact."""
    angle = tl.mul(step, token, sanitize_overflow=False).to(tl.float32) * _RADIANS
    if _INTERPRETED:
        return tl.cos(angle), tl.sin(angle)
    # tl.cos is good at any angle, and has many times the instructions; this one lies between -pi and pi
    return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)


@triton.jit
def halves(x):
    """fp32 -> two fp16 numbers whose sum it is, or nearly."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def waves(step, token, DEPTH: tl.constexpr):
    """int32 (T,) tokens -> two fp16 (T, DEPTH)."""
    column = tl.arange(0, DEPTH)
    cos, sin = cos_sin(tl.load(step + column)[None, :], token[:, None])
    return halves(tl.where((column < DEPTH // 2)[None, :], cos, sin))


@triton.jit
def add_waves(x, wave, vectors):
    """x + wave (T, DEPTH) @ vectors (DEPTH, N), each as two numbers."""
    x = tl.dot(wave[1], vectors[0], x)
    x = tl.dot(wave[0], vectors[1], x)
    return tl.dot(wave[0], vectors[0], x)


@triton.jit
def load_vectors(vectors, head, column, heads, D: tl.constexpr, DEPTH: tl.constexpr):
    """A head's vectors at some channels, two fp16 (DEPTH, columns)."""
    at = vectors + (head * DEPTH + tl.arange(0, DEPTH))[:, None] * D + column[None, :]
    real = (column < D)[None, :]
    return tl.load(at, mask=real, other=0.0), tl.load(at + heads * (DEPTH * D), mask=real, other=0.0)
