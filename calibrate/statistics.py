"""Sums over tokens that rotations are made from: docs/maths.md has the formulas. All float64, per KV head."""

from dataclasses import dataclass

import torch

from vllm_oscar.calibrate.capture import Attention, exact
from vllm_oscar.turning import TurningMean


@dataclass(frozen=True)
class FarSet:
    """Which (query, key) pairs read INT2: queries i >= sink + window, keys sink <= j <= i - window.

    Attributes:
        sink, window: tokens that stay in BF16
        stride: every stride-th of these queries is looked at
    """

    sink: int
    window: int
    stride: int = 4

    def queries(self, length: int) -> torch.Tensor:
        """int64 (n,), empty where the sequence is not longer than sink + window."""
        return torch.arange(self.sink + self.window, max(length, self.sink + self.window), self.stride)

    def pairs(self, rows: torch.Tensor) -> tuple[slice, torch.Tensor]:
        """Keys that any of the queries `rows` reads as INT2, and bool (rows, those keys): which reads which."""
        keys = torch.arange(self.sink, int(rows[-1]) - self.window + 1, device=rows.device)
        return slice(self.sink, self.sink + len(keys)), keys <= rows[:, None] - self.window


class LayerStatistics:
    """Sums of one layer over all sequences.

    Attributes:
        tensors: float64, by name. `reference`: query_covariance, value_plain, value_weighted, value_output
            (heads, D, D), sequences (). `aware`: key_error, key_second, value_error, value_second (heads, D, D),
            key_first, value_first (heads, D), key_weight, value_weight (heads,), and where RoPE is known its frequency
            (pairs,), empty for a layer without RoPE, the sequences' length (), and, over cosines and sines of RoPE's
            angles, wave_first (heads, 2 pairs), wave_second (heads, 2 pairs, 2 pairs), wave_key (heads, 2 pairs, D).
            residual (), see `add_residual`. Beside them what `refit` found: key_refit_transform (heads, D, D) and
            key_loss (), or these for several numbers of bits (`allocation`); and what `search` found: key_gain,
            value_gain, key_clip, value_clip ().
    """

    def __init__(self, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.tensors = tensors or {}

    def _add(self, name: str, amount: torch.Tensor) -> None:
        amount = amount.double()
        self.tensors[name] = self.tensors[name] + amount if name in self.tensors else amount

    def add(
        self, attention: Attention, far: FarSet | None, frequency: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """One sequence.

        Args:
            far: the pairs for the sums of `aware`; None: the sums of `reference`
            frequency: float32 (pairs,), of RoPE in radians a token; empty: there is none; None: not known

        Returns:
            For `aware`: float64 (heads, T), what an error in each key's logits costs.
        """
        if far is None:
            self._add_reference(attention)
            return None
        return self._add_aware(attention, far, frequency)

    def add_residual(self, states: torch.Tensor) -> None:
        """The residual stream (1, length, hidden) that the layer's output is added to: its squared norm, the median of
        tokens, as a few are hundreds of times larger in many models."""
        self._add("residual", states.double().square().sum(-1).median())

    def _add_reference(self, attention: Attention) -> None:
        kv_heads, length, head_size = attention.key.shape
        key, value = attention.key.double(), attention.value.double()
        query = attention.query.double().reshape(kv_heads, -1, head_size)
        covariance = query.mT @ query / query.shape[1]
        self._add("sequences", torch.ones((), dtype=torch.float64))
        self._add("query_covariance", covariance)
        self._add("value_plain", value.mT @ value / length)
        # with S the causal softmax of a query head, V'S'SV = (SV)'(SV): no T x T matrix is needed
        output = attention.output.double().reshape(kv_heads, -1, head_size)
        self._add("value_output", output.mT @ output / output.shape[1])
        weight = ((key @ covariance) * key).sum(-1)
        weight = weight / weight.sum(-1, keepdim=True)
        self._add("value_weighted", (value * weight[..., None]).mT @ value)

    def _add_aware(self, attention: Attention, far: FarSet, frequency: torch.Tensor | None) -> torch.Tensor:
        kv_heads, length, head_size = attention.key.shape
        device = attention.key.device
        projection = exact(attention.projection)
        gram = (projection.mT @ projection).view(kv_heads, -1, head_size, head_size)  # M_r
        centre = exact(attention.value).mean(1, keepdim=True)  # v - o does not change, and cancels less
        value = exact(attention.value)[:, None] - centre[:, None]
        output = exact(attention.output).reshape(kv_heads, -1, length, head_size) - centre[:, None]
        query = attention.query.reshape(kv_heads, -1, length, head_size)
        # (v - o)' M (v - o) = [-2 o, o'Mo, 1] [Mv, 1, v'Mv]': one product for each pair
        left, right = output @ gram, value @ gram
        left = torch.cat([-2 * output, (left * output).sum(-1, keepdim=True), torch.ones_like(output[..., :1])], -1)
        right = torch.cat([right, torch.ones_like(right[..., :1]), (right * value).sum(-1, keepdim=True)], -1).mT

        key_weight = torch.zeros(kv_heads, length, dtype=torch.float64, device=device)  # sum of u over queries
        value_weight = torch.zeros_like(key_weight)  # sum of p^2
        key_error = torch.zeros(kv_heads, head_size, head_size, dtype=torch.float64, device=device)
        head_weight = torch.zeros(gram.shape[:2], dtype=torch.float64, device=device)
        for rows in attention.blocks(far.queries(length).to(device)):
            keys, pairs = far.pairs(rows)
            probabilities, slopes = attention.probabilities(rows)
            squared = probabilities[..., keys].square_().mul_(pairs)
            harm = (left[:, :, rows] @ right[..., keys]).clamp_(min=0).mul_(squared)  # u
            if slopes.dim():
                harm *= slopes[..., keys].square_()
            rows_query = query[:, :, rows].double().flatten(1, 2)
            key_error += (rows_query * harm.sum(-1).double().flatten(1)[..., None]).mT @ rows_query
            key_weight[:, keys] += harm.sum((1, 2)).double()
            value_weight[:, keys] += squared.sum((1, 2)).double()
            head_weight += squared.sum((2, 3)).double()
        self._add("key_error", key_error)
        self._add("value_error", (head_weight[..., None, None] * gram.double()).sum(1))
        self._add_moments("key", attention.key.double(), key_weight)
        self._add_moments("value", attention.value.double(), value_weight)
        if frequency is not None:
            self._add_waves(frequency.to(device), attention.key.double(), key_weight)
        return key_weight

    def _add_moments(self, name: str, rows: torch.Tensor, weight: torch.Tensor) -> None:
        """Weighted sums of rows (heads, T, D), weights (heads, T)."""
        weighted = rows * weight[..., None]
        self._add(f"{name}_weight", weight.sum(-1))
        self._add(f"{name}_first", weighted.sum(1))
        self._add(f"{name}_second", weighted.mT @ rows)

    def _add_waves(self, frequency: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
        """Weighted sums of the cosines and sines of RoPE's angles, and of their products with rows (heads, T, D)."""
        angle = torch.arange(rows.shape[1], device=rows.device)[:, None] * frequency.double()
        waves = torch.cat([angle.cos(), angle.sin()], 1)
        weighted = waves * weight[..., None]
        self.tensors["frequency"] = frequency
        self.tensors["length"] = torch.tensor(rows.shape[1])
        self._add("wave_first", weighted.sum(1))
        self._add("wave_second", weighted.mT @ waves)
        self._add("wave_key", weighted.mT @ rows)

    def mean_and_covariance(self, name: str, turning: TurningMean | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted mean (heads, D) and covariance (heads, D, D) of "key" or "value"; NaN for heads without weight.

        Args:
            turning: of keys, taken off every row first; its frequencies are some of the statistics'
        """
        weight = self.tensors[f"{name}_weight"][:, None]
        mean = self.tensors[f"{name}_first"] / weight
        second = self.tensors[f"{name}_second"] / weight[..., None]
        if turning is not None:
            known = self.tensors["frequency"]
            pair = (turning.frequency[:, None] == known).int().argmax(1)
            column = torch.cat([pair, pair + len(known)])
            vectors = turning.vectors.double().transpose(1, 2).flatten(1, 2)  # (heads, 2 pairs, D)
            cross = vectors.mT @ self.tensors["wave_key"][:, column] / weight[..., None]
            own = vectors.mT @ self.tensors["wave_second"][:, column][:, :, column] @ vectors / weight[..., None]
            mean = mean - (self.tensors["wave_first"][:, None, column] @ vectors)[:, 0] / weight
            second = second - cross - cross.mT + own
        return mean, second - mean[..., :, None] * mean[..., None, :]

    def average(self, name: str) -> torch.Tensor:
        """A covariance of `reference`, averaged over sequences."""
        return self.tensors[name] / self.tensors["sequences"]
