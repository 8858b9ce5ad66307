"""The mean that turns with the position: angles at any context length, and attention that does not notice it."""

import math

import pytest
import torch

from vllm_oscar.attention import StoredRows, attend
from vllm_oscar.rotation import Transform
from vllm_oscar.turning import TURN, TurningMean

HEADS, SIZE = 2, 64
FREQUENCY = torch.tensor([1.0, 0.0749894, 1.3e-4])  # radians a token


def turning(magnitude: float = 50.0) -> TurningMean:
    generator = torch.Generator().manual_seed(1)
    return TurningMean(FREQUENCY, magnitude * torch.randn(HEADS, 3, 2, SIZE, generator=generator))


def transform(mean: TurningMean | None) -> Transform:
    generator = torch.Generator().manual_seed(2)
    matrix = torch.eye(SIZE) + 0.05 * torch.randn(HEADS, SIZE, SIZE, generator=generator)
    return Transform.rounded(torch.randn(HEADS, SIZE, generator=generator), matrix, torch.bfloat16, mean)


@pytest.mark.parametrize("position", [0, 1, 2047, 131_072, 1_000_000])
def test_angles_hold_at_long_contexts(position: int) -> None:
    """Half a unit of 2^-32 turn a token: 0.0008 radians at a million tokens."""
    waves = turning().waves(torch.tensor([position]))[0].double()
    angle = FREQUENCY.double() * position
    bound = position * math.pi / TURN + 1e-6
    assert waves.dtype == torch.float64 and waves.shape == (3, 2)
    torch.testing.assert_close(waves, torch.stack([angle.cos(), angle.sin()], -1), rtol=0, atol=bound)


def test_angles_of_two_parts_add_up_exactly() -> None:
    """A kernel adds the angle of a tile's first token and that of a token inside it."""
    step = turning().step
    first, inside = torch.tensor([987_648]), torch.tensor([63])
    assert torch.equal((first * step % TURN + inside * step % TURN) % TURN, (first + inside) * step % TURN)


def test_a_row_comes_back_with_what_turned_at_its_position() -> None:
    moving = transform(turning())
    position = torch.tensor([3, 70_000, 12])
    x = 10 * torch.randn(3, HEADS, SIZE, generator=torch.Generator().manual_seed(3))
    y = moving.forward(x, position)
    plain = transform(None)
    torch.testing.assert_close(y, plain.forward(x - turning().at(position)), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(moving.backward(y, position), x, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fresh", [False, True], ids=["decode", "prefill"])
def test_attention_is_that_over_the_keys_themselves(fresh: bool) -> None:
    """Logits have q . m(j) of every stored token j: with biases of 50 nothing is right without it."""
    generator = torch.Generator().manual_seed(4)
    stored, n = 40, 5
    moving, values = transform(turning()), transform(None)
    y_key, y_value = (torch.randn(stored, HEADS, SIZE, generator=generator) for _ in range(2))
    query = torch.randn(n, 3 * HEADS, SIZE, generator=generator)
    raw = (torch.randn(n, HEADS, SIZE, generator=generator), torch.randn(n, HEADS, SIZE, generator=generator))
    rows = StoredRows(y_key, y_value, torch.zeros(stored, HEADS, dtype=torch.bool))
    first = stored if fresh else stored - n
    got = attend(query, rows, moving, values, 0.01, first, raw if fresh else None)

    position = torch.arange(stored)
    angle = FREQUENCY.double() * position[:, None]
    vectors = turning().vectors.double()
    turned = torch.einsum("tpc,hpcd->thd", torch.stack([angle.cos(), angle.sin()], -1), vectors)
    inverse = torch.linalg.inv(moving.matrix.double())
    key = torch.einsum("thd,hde->the", y_key.double(), inverse) + moving.mean.double() + turned
    value = values.backward(y_value).double()
    if fresh:
        key, value = (torch.cat([old, new.double()]) for old, new in zip((key, value), raw, strict=True))
    key, value = (part.repeat_interleave(3, 1) for part in (key, value))
    logits = torch.einsum("nhd,jhd->hnj", query.double(), key) * 0.01
    ahead = torch.arange(len(key)) > first + torch.arange(n)[:, None]
    wanted = torch.einsum("hnj,jhd->nhd", logits.masked_fill(ahead, float("-inf")).softmax(-1), value)
    assert (got.double() - wanted).abs().max() < 1e-3 * wanted.abs().max()
