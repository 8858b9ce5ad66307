"""What a layer's attention sees: queries and keys after RoPE and norms, values, mask, output projection.

Taken at the attention call, through transformers' registry of attention functions, so that no model is known by name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_oscar.errors import UnsupportedError

NAME = "vllm_oscar_calibration"  # of our attention function in the registry
BLOCK_ELEMENTS = 1 << 21  # probabilities held at a time: 8 MiB in float32, what a CPU's cache holds
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")


@dataclass(frozen=True)
class Attention:
    """One attention call of one sequence.

    Attributes:
        query: (query heads, T, D)
        key, value: (KV heads, T, D)
        output: (query heads, T, D), before the output projection
        mask: bool (T, T), True where attention goes; None: causal
        scaling: of the logits
        softcap: logits are softcap * tanh(logits / softcap); None: as they are
        sinks: (query heads,) extra logits in the softmax's denominator; None: none
        projection: (query heads, hidden, D), the output projection's columns of each head
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None
    projection: torch.Tensor

    def logits(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes into the softmax of some queries, and how a change of a raw logit passes through the soft cap.

        Args:
            rows: int64 (n,), ascending queries

        Returns:
            Logits, -inf where attention does not go, and slopes, float32 (float64 for float64 queries), (KV heads,
            group, n, keys): keys as far as the last of `rows` can see. Slopes are a scalar 1 without a soft cap.
        """
        kv_heads, _, head_size = self.key.shape
        stop = int(rows[-1]) + 1
        query = (exact(self.query[:, rows]) * self.scaling).reshape(kv_heads, -1, head_size)
        logits = (query @ exact(self.key[:, :stop]).mT).view(kv_heads, -1, len(rows), stop)
        slopes = logits.new_ones(())
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh_()
            slopes = 1 - logits.square()
            logits = logits * self.softcap
        if self.mask is not None:
            allowed = self.mask[rows, :stop]
        else:
            allowed = torch.arange(stop, device=rows.device) <= rows[:, None]
        return logits.masked_fill_(~allowed, float("-inf")), slopes

    def softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities from logits (KV heads, group, n, keys)."""
        if self.sinks is None:
            return logits.softmax(-1)
        sinks = exact(self.sinks).view(*logits.shape[:2], 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]

    def probabilities(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The softmax of some queries, and slopes, both as in `logits`."""
        logits, slopes = self.logits(rows)
        return self.softmax(logits), slopes

    def blocks(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Queries in pieces whose probabilities are at most BLOCK_ELEMENTS numbers."""
        heads, length = self.query.shape[:2]
        yield from rows.split(max(1, BLOCK_ELEMENTS // (heads * length)))


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@contextmanager
def capturing(config: Any, observe: Callable[[Attention], None]) -> Iterator[None]:
    """Call `observe` at every attention call of the models that share this transformers config."""
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if query.shape[0] != 1:
            raise ValueError("calibration runs one sequence at a time")
        attention = Attention(
            query=query[0],
            key=key[0],
            value=value[0],
            output=torch.empty_like(query[0]),
            mask=None if attention_mask is None else attention_mask[0, 0],
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.detach(),
            projection=output_projection(module, query.shape[1]),
        )
        attention.output.copy_(attention_output(attention))
        observe(attention)
        return attention.output.transpose(0, 1)[None].contiguous(), None

    AttentionMaskInterface.register(NAME, sdpa_mask)
    with attention_function(config, NAME, attend):
        yield


@contextmanager
def attention_function(config: Any, name: str, attend: Callable[..., Any]) -> Iterator[None]:
    """While this is open, the models that share this transformers config attend with `attend`.

    Args:
        name: of the function in transformers' registry
        attend: signature and result are those of transformers' attention functions
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, attend)
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def replaced_forwards(modules: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """While this is open, modules do something else instead of their forward."""
    before = [module.forward for module in modules]
    for module, forward in zip(modules, forwards, strict=True):
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            module.forward = forward


def attention_output(attention: Attention) -> torch.Tensor:
    """The attention itself, (query heads, T, D)."""
    if attention.softcap is None and attention.sinks is None:
        return nn.functional.scaled_dot_product_attention(
            attention.query[None],
            attention.key[None],
            attention.value[None],
            attn_mask=attention.mask,
            is_causal=attention.mask is None,
            scale=attention.scaling,
            enable_gqa=True,
        )[0]
    parts = []
    for rows in attention.blocks(torch.arange(attention.query.shape[1], device=attention.query.device)):
        probabilities = attention.probabilities(rows)[0]
        value = exact(attention.value[:, None, : probabilities.shape[-1]])
        parts.append((probabilities @ value).flatten(0, 1))
    return torch.cat(parts, 1)


def output_projection(attention: nn.Module, heads: int) -> torch.Tensor:
    """W_o of an attention module, by query head: (heads, hidden, D).

    Raises:
        UnsupportedError: the module has no projection under a known name.
    """
    for name in OUTPUT_PROJECTIONS:
        module = getattr(attention, name, None)
        if isinstance(module, nn.Module):
            weight = getattr(module, "weight", None)
            if weight is None or not weight.is_floating_point() or weight.dtype.itemsize < 2:
                weight = _dense(module)
            return weight.detach().unflatten(1, (heads, -1)).transpose(0, 1)
    raise UnsupportedError(
        f"{type(attention).__name__} has no output projection called one of {OUTPUT_PROJECTIONS}; please report it"
    )


def _dense(module: Any) -> torch.Tensor:
    """Weight of a quantised linear module, from what it does to unit vectors."""
    size = module.in_features
    device = next(iter([*module.parameters(), *module.buffers()])).device
    eye = torch.eye(size, device=device, dtype=torch.bfloat16)
    return (module(eye) - module(torch.zeros_like(eye[:1]))).T
