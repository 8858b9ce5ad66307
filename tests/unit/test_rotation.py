"""Rotations and transforms against definitions written down independently."""

import math

import pytest
import torch

from vllm_oscar.errors import ConfigError
from vllm_oscar.rotation import (
    MAX_CONDITION,
    Transform,
    aware_transform,
    bit_reversal_permutation,
    geometric_mean,
    grouped_hadamard,
    hadamard,
    matrix_power,
    normalised,
    reference_rotation,
    regularised,
)

HEAD_SIZES = (64, 80, 96, 128, 192, 256)


def covariance(*shape: int, decay: float = 2.0, seed: int = 0) -> torch.Tensor:
    """Random positive definite float64 (..., D, D), eigenvalues exp(-decay) to exp(decay)."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(*shape, shape[-1], dtype=torch.float64, generator=generator)).Q
    values = torch.linspace(-decay, decay, shape[-1], dtype=torch.float64).exp()
    return (basis * values) @ basis.mT


def assert_orthonormal(matrix: torch.Tensor) -> None:
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    torch.testing.assert_close(matrix @ matrix.mT, eye.expand_as(matrix), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 4, 12, 16, 20, 24, 40, 48, *HEAD_SIZES])
def test_hadamard(order: int) -> None:
    h = hadamard(order)
    assert h.dtype == torch.float64
    assert_orthonormal(h)
    torch.testing.assert_close(h.abs(), torch.full_like(h, 1 / math.sqrt(order)))
    torch.testing.assert_close(h[0], torch.full_like(h[0], 1 / math.sqrt(order)))


def test_hadamard_of_a_power_of_two_is_sylvesters() -> None:
    """Entry (i, j) has the sign of (-1)^popcount(i & j)."""
    h = hadamard(64)
    for i in range(64):
        for j in range(64):
            assert h[i, j] == (-1) ** (i & j).bit_count() / 8


@pytest.mark.parametrize("order", [0, 3, 6, 28, 100])
def test_hadamard_refuses_other_orders(order: int) -> None:
    with pytest.raises(ConfigError, match=f"order {order}"):
        hadamard(order)


@pytest.mark.parametrize(
    ("order", "group_size"), [*((size, size) for size in HEAD_SIZES), (64, 32), (128, 64), (128, 32), (112, 112)]
)
def test_grouped_hadamard_starts_with_rows_constant_on_groups(order: int, group_size: int) -> None:
    """The first rows span exactly the vectors that are constant on each group: what offsets can hold."""
    h = grouped_hadamard(order, group_size)
    groups = order // group_size
    assert_orthonormal(h)
    first = h[:groups].unflatten(-1, (groups, group_size))
    torch.testing.assert_close(first, first[..., :1].expand_as(first), rtol=0, atol=1e-15)
    means = h[groups:].unflatten(-1, (groups, group_size)).mean(-1)
    torch.testing.assert_close(means, torch.zeros_like(means), rtol=0, atol=1e-14)


def test_grouped_hadamard_refuses_groups_without_hadamard() -> None:
    with pytest.raises(ConfigError, match="order 112"):
        grouped_hadamard(112, 56)


def test_bit_reversal() -> None:
    p = bit_reversal_permutation(8)
    x = torch.arange(8, dtype=torch.float64)
    # bitrev over 3 bits: 0 4 2 6 1 5 3 7; source column is 7 minus that
    assert (x @ p).tolist() == [7, 3, 5, 1, 6, 2, 4, 0]
    big = bit_reversal_permutation(128)
    assert_orthonormal(big)
    for order in (12, 80, 96, 192):
        with pytest.raises(ConfigError, match="aware"):
            bit_reversal_permutation(order)


@pytest.mark.parametrize("order", [64, 128])
def test_reference_rotation_element_by_element(order: int) -> None:
    """R[a, j] = sum_i U[a, i] (-1)^popcount(i & s_j) / sqrt(D), s_j = D - 1 - bitrev(j), U in ascending order."""
    sigma = covariance(2, order)
    rotation = reference_rotation(sigma.float())
    assert rotation.dtype == torch.float64
    assert_orthonormal(rotation)
    values, vectors = torch.linalg.eigh(sigma.float().double())
    assert torch.all(values.diff() >= 0)
    bits = order.bit_length() - 1
    for j in range(order):
        reversed_bits = sum(((j >> b) & 1) << (bits - 1 - b) for b in range(bits))
        source = order - 1 - reversed_bits
        signs = torch.tensor([(-1.0) ** (i & source).bit_count() for i in range(order)], dtype=torch.float64)
        torch.testing.assert_close(rotation[..., j], vectors @ signs / math.sqrt(order))


def test_reference_rotation_spreads_the_variance() -> None:
    """All rotated channels have the same variance: the mean eigenvalue."""
    sigma = covariance(64)
    rotation = reference_rotation(sigma)
    rotated = rotation.mT @ sigma @ rotation
    torch.testing.assert_close(rotated.diagonal(), sigma.trace().expand(64) / 64)


def test_matrix_power() -> None:
    a = covariance(2, 64)
    root = matrix_power(a, 0.5)
    torch.testing.assert_close(root @ root, a)
    torch.testing.assert_close(matrix_power(a, -0.5) @ root, torch.eye(64, dtype=torch.float64).expand(2, 64, 64))
    semidefinite = torch.diag(torch.tensor([0.0, -1e-12, 4.0], dtype=torch.float64))
    expected = torch.diag(torch.tensor([2e-3, 2e-3, 2.0], dtype=torch.float64))
    torch.testing.assert_close(matrix_power(semidefinite, 0.5), expected)


def test_geometric_mean() -> None:
    """G = A # B is the one positive definite solution of G A^-1 G = B; it is symmetric in A and B."""
    a, b = covariance(3, 64, seed=1), covariance(3, 64, seed=2, decay=3.0)
    g = geometric_mean(a, b)
    torch.testing.assert_close(g, g.mT)
    assert torch.all(torch.linalg.eigvalsh(g) > 0)
    torch.testing.assert_close(g @ torch.linalg.inv(a) @ g, b)
    torch.testing.assert_close(geometric_mean(b, a), g)
    torch.testing.assert_close(geometric_mean(a, a), a)


def test_geometric_mean_balances() -> None:
    """M = A^-1 # B maps data to error: M A M = B, which is why the transform is built from it."""
    a, b = covariance(64, seed=1), covariance(64, seed=2)
    m = geometric_mean(torch.linalg.inv(a), b)
    torch.testing.assert_close(m @ a @ m, b)


def test_regularised() -> None:
    a = torch.diag(torch.tensor([1.0, 3.0]))
    assert torch.equal(regularised(a, 0.5), torch.diag(torch.tensor([2.0, 4.0])))
    torch.testing.assert_close(regularised(a), torch.diag(torch.tensor([1.04, 3.04])))


@pytest.mark.parametrize(("order", "group_size"), [(64, 64), (64, 32), (80, 80), (128, 128), (128, 32)])
def test_aware_transform(order: int, group_size: int) -> None:
    """Built from DESIGN's formulas step by step, up to the sign of each eigenvector."""
    data, error = covariance(2, order, seed=3), covariance(2, order, seed=4, decay=3.0)
    transform = aware_transform(data, error, group_size)

    variance = (transform.mT @ data @ transform).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(variance.mean(-1), torch.ones(2, dtype=torch.float64))
    assert torch.all(torch.linalg.cond(transform) < MAX_CONDITION / 10)

    h = grouped_hadamard(order, group_size)
    for head in range(2):
        eye = torch.eye(order, dtype=torch.float64)
        data_r = data[head] + 0.02 * data[head].trace() / order * eye
        error_r = error[head] + 0.02 * error[head].trace() / order * eye
        # the same matrix by another formula: A^-1 # B = A^-1 (A B)^1/2
        values, vectors = torch.linalg.eig(data_r @ error_r)
        root_ab = (vectors * values.sqrt()) @ torch.linalg.inv(vectors)
        balance = (torch.linalg.inv(data_r).to(root_ab.dtype) @ root_ab).real
        # T = T0 U H, hence T T' = T0 T0' = M^1/2 up to the scale
        gram = transform[head] @ transform[head].mT
        expected = matrix_power((balance + balance.mT) / 2, 0.5)
        torch.testing.assert_close(gram / gram.trace(), expected / expected.trace(), rtol=1e-6, atol=1e-10)
        # in the basis H' the transformed data is diagonal, its largest variance first
        spectrum = h @ transform[head].mT @ data[head] @ transform[head] @ h.mT
        diagonal = spectrum.diagonal()
        torch.testing.assert_close(spectrum, torch.diag(diagonal), rtol=0, atol=1e-9 * float(diagonal.max()))
        assert torch.all(diagonal.diff() <= 1e-9)


def test_normalised_leaves_a_head_without_variance_alone() -> None:
    data = torch.stack([torch.eye(4, dtype=torch.float64) * 4, torch.zeros(4, 4, dtype=torch.float64)])
    eye = torch.eye(4, dtype=torch.float64)
    assert torch.equal(normalised(eye.expand(2, 4, 4), data), torch.stack([eye / 2, eye]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_transform_round_trip(dtype: torch.dtype) -> None:
    """B inverts the rounded T, so the round trip is exact to fp32 whatever the run dtype."""
    heads, order = 3, 64
    matrix = aware_transform(covariance(heads, order, seed=5), covariance(heads, order, seed=6), order)
    mean = torch.randn(heads, order, generator=torch.Generator().manual_seed(7)) * 100
    transform = Transform.rounded(mean.double(), matrix, dtype)
    assert torch.equal(transform.matrix, matrix.to(dtype).float())
    product = transform.matrix.double() @ transform.inverse.double()
    torch.testing.assert_close(product, torch.eye(order, dtype=torch.float64).expand_as(product), rtol=0, atol=1e-6)

    x = (torch.randn(5, 7, heads, order, generator=torch.Generator().manual_seed(8)) + mean).to(dtype)
    y = transform.forward(x)
    assert y.dtype == torch.float32
    for head in range(heads):  # row by row, the mean taken off first
        torch.testing.assert_close(
            y[2, 3, head].double(),
            (x[2, 3, head].double() - mean[head].double()) @ transform.matrix[head].double(),
            rtol=1e-4,
            atol=1e-4,
        )
    torch.testing.assert_close(transform.backward(y), x.float(), rtol=1e-5, atol=1e-4)


def test_transform_scores() -> None:
    """q . k = (q B') . y + q . m, the identity that attention over stored rows rests on."""
    matrix = aware_transform(covariance(2, 64, seed=9), covariance(2, 64, seed=10), 64)
    generator = torch.Generator().manual_seed(11)
    mean = torch.randn(2, 64, generator=generator)
    transform = Transform.rounded(mean, matrix, torch.bfloat16)
    q, k = torch.randn(2, 64, generator=generator), torch.randn(2, 64, generator=generator)
    rotated = torch.einsum("hd,hed->he", q, transform.inverse)
    score = (rotated * transform.forward(k)).sum(-1) + (q * mean).sum(-1)
    torch.testing.assert_close(score, (q * k).sum(-1), rtol=1e-4, atol=1e-4)
