"""Orthogonal building blocks and the general transform y = (x - m) T.

Sources: the rotation R = U H P is arXiv 2605.17757 (OSCAR); the general form (m, T, B) is docs/maths.md.
"""

import math
from dataclasses import dataclass

import torch

from vllm_oscar.errors import ConfigError
from vllm_oscar.turning import TurningMean

MAX_CONDITION = 100.0  # of T; measured calibrations stay below 6


def _paley(q: int) -> torch.Tensor:
    """Hadamard matrix of order q + 1 (Paley's first construction; q prime, q = 3 mod 4), first row all ones."""
    squares = {i * i % q for i in range(1, q)}
    chi = [0] + [1 if i in squares else -1 for i in range(1, q)]
    h = torch.ones(q + 1, q + 1, dtype=torch.float64)
    for i in range(q):
        h[i + 1, 0] = -1
        for j in range(q):
            h[i + 1, j + 1] = 1 if i == j else chi[(j - i) % q]
    h[1:] *= -1  # rows may be negated; the first column becomes ones too
    return h


def hadamard(order: int) -> torch.Tensor:
    """Normalised Hadamard matrix, float64 (order, order), first row constant.

    Sylvester's for powers of two, else 12 or 20 times a power of two.

    Raises:
        ConfigError: the order has none among these.
    """
    for base in (1, 12, 20):
        doublings, rest = divmod(order, base)
        if rest == 0 and doublings & (doublings - 1) == 0 and doublings > 0:
            h = torch.ones(1, 1, dtype=torch.float64) if base == 1 else _paley(base - 1)
            while h.shape[0] < order:
                h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
            return h / math.sqrt(order)
    raise ConfigError(f"no Hadamard matrix of order {order} is built in")


def grouped_hadamard(order: int, group_size: int) -> torch.Tensor:
    """Orthonormal float64 (order, order) whose first order/group_size rows are constant on each group.

    Whatever a basis puts into its first directions then lands in the groups' offsets. A Hadamard matrix where
    one is built in, else (one group only) the DCT-II, whose first row is constant as well.
    """
    groups = order // group_size
    try:
        h = hadamard(order)
    except ConfigError:
        if groups > 1:
            raise
        k = torch.arange(order, dtype=torch.float64)
        h = torch.cos(math.pi / order * (k[None] + 0.5) * k[:, None]) * math.sqrt(2 / order)
        h[0] /= math.sqrt(2)
        return h
    if groups == 1:
        return h
    first = [g * group_size for g in range(groups)]  # Sylvester: these rows depend on the high index bits only
    rest = [i for i in range(order) if i not in first]
    return h[first + rest]


def bit_reversal_permutation(order: int) -> torch.Tensor:
    """P of the paper, float64 (order, order): column j of X P is column order - 1 - bitrev(j) of X.

    Raises:
        ConfigError: order is no power of two; the `reference` method is not defined there.
    """
    bits = order.bit_length() - 1
    if order != 1 << bits:
        raise ConfigError(
            f"the reference rotation needs a power-of-two head size, not {order}; calibrate with --method aware"
        )
    source = [order - 1 - int(f"{j:0{bits}b}"[::-1], 2) for j in range(order)]
    return torch.eye(order, dtype=torch.float64)[:, source]


def reference_rotation(covariance: torch.Tensor) -> torch.Tensor:
    """R = U H P for a symmetric covariance (..., D, D), U its eigenvectors in ascending order. float64."""
    order = covariance.shape[-1]
    eigenvectors = torch.linalg.eigh(covariance.double()).eigenvectors
    return eigenvectors @ (hadamard(order) @ bit_reversal_permutation(order)).to(covariance.device)


def matrix_power(symmetric: torch.Tensor, exponent: float) -> torch.Tensor:
    """Power of a positive semi-definite matrix (..., D, D), eigenvalues floored at 1e-6 of the largest."""
    values, vectors = torch.linalg.eigh(symmetric)
    values = values.clamp(min=values.amax(-1, keepdim=True) * 1e-6)
    return (vectors * values.pow(exponent)[..., None, :]) @ vectors.mT


def geometric_mean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A # B = A^1/2 (A^-1/2 B A^-1/2)^1/2 A^1/2, for positive definite (..., D, D)."""
    root, inverse_root = matrix_power(a, 0.5), matrix_power(a, -0.5)
    return root @ matrix_power(inverse_root @ b @ inverse_root, 0.5) @ root


def regularised(matrix: torch.Tensor, amount: float = 0.02) -> torch.Tensor:
    """matrix + amount * tr(matrix)/D * I."""
    order = matrix.shape[-1]
    mean_diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    return matrix + amount * mean_diagonal[..., None, None] * torch.eye(order, dtype=matrix.dtype, device=matrix.device)


def aware_transform(data: torch.Tensor, error: torch.Tensor, group_size: int) -> torch.Tensor:
    """T of the `aware` calibration: half-way between a rotation and the transform that balances data and error.

    Args:
        data: float64 (..., D, D), weighted covariance Cx of the rows.
        error: float64 (..., D, D), what an error in a row costs, Ce.
        group_size: quantization group.

    Returns:
        float64 (..., D, D), normalised so that tr(T' Cx T)/D = 1.
    """
    order = data.shape[-1]
    balance = geometric_mean(torch.linalg.inv(regularised(data)), regularised(error))
    root = matrix_power(balance, 0.25)
    eigenvectors = torch.linalg.eigh(root.mT @ data @ root).eigenvectors.flip(-1)
    transform = root @ eigenvectors @ grouped_hadamard(order, group_size).to(data.device)
    return normalised(transform, data)


def normalised(transform: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Scale T so that transformed rows have unit variance on average; unchanged where there is no variance."""
    variance = (transform.mT @ data @ transform).diagonal(dim1=-2, dim2=-1).mean(-1)
    return transform / torch.where(variance > 0, variance, 1.0).sqrt()[..., None, None]


@dataclass(frozen=True)
class Transform:
    """Stored rows are y = (x - m) T, and x = y B + m, where m may have a part that turns with the row's position.

    Attributes:
        mean: float32 (heads, D)
        matrix: T, (heads, D, D), holding values that the run dtype can represent, as float32
        inverse: B, float32 (heads, D, D), the inverse of the rounded T computed in float64
        turning: what m has besides `mean`; None: nothing
    """

    mean: torch.Tensor
    matrix: torch.Tensor
    inverse: torch.Tensor
    turning: TurningMean | None = None

    @classmethod
    def rounded(
        cls, mean: torch.Tensor, matrix: torch.Tensor, dtype: torch.dtype, turning: TurningMean | None = None
    ) -> "Transform":
        """Round T to the run dtype, then invert exactly what will be multiplied with."""
        kept = matrix.to(dtype)
        inverse = torch.linalg.inv(kept.double())
        return cls(mean.float(), kept.float(), inverse.float(), turning)

    def centre(self, position: torch.Tensor | None) -> torch.Tensor:
        """m of rows at int64 positions (tokens,): float32 (tokens, heads, D), or (heads, D) where none of it turns."""
        if self.turning is None:
            return self.mean
        assert position is not None, "a mean that turns with the position"
        return self.mean + self.turning.at(position)

    def forward(self, x: torch.Tensor, position: torch.Tensor | None = None) -> torch.Tensor:
        """Rows x (tokens, heads, D) at those positions -> y float32; m is taken off in fp32 before the product."""
        return torch.einsum("...hd,hde->...he", x.float() - self.centre(position), self.matrix)

    def backward(self, y: torch.Tensor, position: torch.Tensor | None = None) -> torch.Tensor:
        """Rows y (tokens, heads, D) -> x float32."""
        return torch.einsum("...hd,hde->...he", y.float(), self.inverse) + self.centre(position)
