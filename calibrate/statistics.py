"""Sums over tokens that rotations are made from: docs/maths.md has the formulas. All float64, per KV head."""

from dataclasses import dataclass

import torch

from vllm_oscar.calibrate.capture import Attention, exact


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
            key_first, value_first (heads, D), key_weight, value_weight (heads,). Beside them what `search` found:
            key_gain, value_gain, key_clip, value_clip ().
    """

    def __init__(self, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.tensors = tensors or {}

    def _add(self, name: str, amount: torch.Tensor) -> None:
        amount = amount.double()
        self.tensors[name] = self.tensors[name] + amount if name in self.tensors else amount

    def add(self, attention: Attention, far: FarSet | None) -> None:
        """One sequence. far: the pairs for the sums of `aware`; None: the sums of `reference`."""
        if far is None:
            self._add_reference(attention)
        else:
            self._add_aware(attention, far)

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

    def _add_aware(self, attention: Attention, far: FarSet) -> None:
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

    def _add_moments(self, name: str, rows: torch.Tensor, weight: torch.Tensor) -> None:
        """Weighted sums of rows (heads, T, D), weights (heads, T)."""
        weighted = rows * weight[..., None]
        self._add(f"{name}_weight", weight.sum(-1))
        self._add(f"{name}_first", weighted.sum(1))
        self._add(f"{name}_second", weighted.mT @ rows)

    def mean_and_covariance(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted mean (heads, D) and covariance (heads, D, D) of "key" or "value"; NaN for heads without weight."""
        weight = self.tensors[f"{name}_weight"][:, None]
        mean = self.tensors[f"{name}_first"] / weight
        second = self.tensors[f"{name}_second"] / weight[..., None]
        return mean, second - mean[..., :, None] * mean[..., None, :]

    def average(self, name: str) -> torch.Tensor:
        """A covariance of `reference`, averaged over sequences."""
        return self.tensors[name] / self.tensors["sequences"]
