"""INT2 caches emulated inside transformers: every layer's attention reads stored keys and values, errors propagate.

A query sees the sink and the last `window` tokens as they are, all others as the cache would give them back; the model
runs in BF16 as in the engine, attention in float32. Cheaper than the engine, and free to try what pages cannot hold:
a window of passes of SmolLM2-135M takes some seconds. Causal layers only.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from vllm_oscar.cache_layer import CacheLayer, RowCodec
from vllm_oscar.calibrate.capture import attention_function
from vllm_oscar.evaluation.metrics import Scores
from vllm_oscar.quantizer import Encoded, decode
from vllm_oscar.sidecar import Sidecar

NAME = "vllm_oscar_emulation"  # of our attention function in transformers' registry
FIRST = 512  # first scored position, as in `oscar eval`
QUERIES = 256  # whose probabilities, or logits, are held at a time

# (layer, rows after RoPE (heads, T, D) float32) -> the rows that INT2 gives back
Storage = Callable[[int, torch.Tensor], torch.Tensor]


def exact(layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Nothing lost."""
    return rows


@dataclass(frozen=True)
class Cache:
    """What attention reads instead of the tokens that have left sink and window.

    Attributes:
        key, value: INT2
        sink, window: tokens that are read as they are
    """

    key: Storage = exact
    value: Storage = exact
    sink: int = 64
    window: int = 256


@dataclass
class Stored:
    """Keys or values of a sidecar's layers, encoded and decoded by the specification.

    Attributes:
        sidecar: the calibration
        letter: "k" or "v"
        plain: layers that are left as they are
    """

    sidecar: Sidecar
    letter: str
    plain: frozenset[int] = frozenset()
    _codecs: dict[int, RowCodec] = field(default_factory=dict)

    def __call__(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """(heads, T, D) -> the same rows out of INT2."""
        if layer in self.plain:
            return rows
        if layer not in self._codecs:
            made = CacheLayer.of(self.sidecar.layers[layer], 64, self.sidecar.group_size, torch.bfloat16)
            self._codecs[layer] = made.key if self.letter == "k" else made.value
        codec = self._codecs[layer]
        position = torch.arange(rows.shape[1])
        kept = self.stored(codec.encode(codec.transform.forward(rows.transpose(0, 1), position).bfloat16()))
        return codec.transform.backward(decode(kept.codes, kept.scale, kept.offset), position).transpose(0, 1)

    def stored(self, encoded: Encoded) -> Encoded:
        """What is kept of a row: all of it; variants lose something here."""
        return encoded


def cache_of(sidecar: Sidecar, **changes: Any) -> Cache:
    """A sidecar's cache with its own sink and window; `changes` replace fields."""
    own = Cache(Stored(sidecar, "k"), Stored(sidecar, "v"), sidecar.sink, sidecar.window)
    return replace(own, **changes)


def mixed_attention(
    query: torch.Tensor, near: tuple[torch.Tensor, torch.Tensor], far: tuple[torch.Tensor, torch.Tensor],
    scaling: float, sink: int, window: int,
) -> torch.Tensor:  # fmt: skip
    """Causal attention over two versions of the same tokens.

    Args:
        query: (query heads, T, D) float32
        near, far: keys and values, (KV heads, T, D) each: as they are, and out of INT2
        scaling: of the logits
        sink, window: query i reads key j of `far` where sink <= j <= i - window

    Returns:
        (query heads, T, D)
    """
    heads, length, size = query.shape
    kv_heads = near[0].shape[0]
    key, value = (torch.cat([a[:, :sink], b[:, sink:]], 1) for a, b in zip(near, far, strict=True))
    parts = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        first = max(0, start - window + 1)  # of the keys that some of these queries read as they are
        rows = (query[:, start:stop] * scaling).reshape(kv_heads, -1, size)
        i, j = torch.arange(start, stop)[:, None], torch.arange(first, stop)
        repeats = heads // kv_heads
        is_near, ahead = ((t).repeat(repeats, 1) for t in (j > i - window, j > i))
        logits = rows @ key[:, :stop].mT
        recent = rows @ near[0][:, first:stop].mT
        logits[..., first:] = torch.where(is_near, recent, logits[..., first:]).masked_fill_(ahead, float("-inf"))
        p = logits.softmax(-1)
        out = p @ value[:, :stop] + (p[..., first:] * is_near) @ (near[1] - value)[:, first:stop]
        parts.append(out.view(heads, stop - start, size))
    return torch.cat(parts, 1)


@contextmanager
def attention_through(model: nn.Module, cache: Cache) -> Iterator[None]:
    """While this is open, the model's attention reads the cache."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
        scaling: float | None = None, **ignored: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        q, k, v = (t[0].float() for t in (query, key, value))
        far = cache.key(module.layer_idx, k), cache.value(module.layer_idx, v)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        out = mixed_attention(q, (k, v), far, scale, cache.sink, cache.window)
        return out.transpose(0, 1)[None].to(query.dtype).contiguous(), None

    with attention_function(model.config, NAME, attend):
        yield


def load(path: str) -> Any:
    """A causal language model in BF16, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval(), AutoTokenizer.from_pretrained(path)


@torch.inference_mode()
def hidden_states(model: Any, windows: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Last hidden states of int64 (windows, context), one window at a time: (windows, context, hidden size)."""
    with attention_through(model, cache):
        return torch.stack([model.get_decoder()(input_ids=w[None], use_cache=False).last_hidden_state[0]
                            for w in windows])  # fmt: skip


@torch.inference_mode()
def compare(model: Any, windows: torch.Tensor, reference: torch.Tensor, hidden: torch.Tensor) -> Scores:
    """Score the positions from FIRST on, as `oscar eval` does."""
    head = model.get_output_embeddings()

    def window(ids: torch.Tensor, theirs: torch.Tensor, ours: torch.Tensor) -> Scores:
        cuts = [slice(a, min(a + QUERIES, len(ids) - 1)) for a in range(FIRST, len(ids) - 1, QUERIES)]
        return Scores.cat([Scores.of(head(theirs[c]), head(ours[c]), ids[c.start + 1 : c.stop + 1]) for c in cuts])

    return Scores.stack([window(*each) for each in zip(windows, reference, hidden, strict=True)])


def measure(model: Any, windows: torch.Tensor, caches: Mapping[str, Cache]) -> Iterator[tuple[str, dict[str, float]]]:
    """Each cache against the uncompressed one on the same windows, by name: `Scores.summary`."""
    reference = hidden_states(model, windows, Cache())
    for name, cache in caches.items():
        yield name, compare(model, windows, reference, hidden_states(model, windows, cache)).summary()


HEAD = f"{'':<44}{'KL':>9}{'+-':>9}{'KL p99':>9}{'ppl %':>8}{'top-1 %':>9}"


def line(name: str, r: Mapping[str, float]) -> str:
    """One cache's line of a table."""
    return (
        f"{name:<44}{r['kl']:>9.4f}{r['kl_error']:>9.4f}{r['kl_p99']:>9.3f}{100 * r['perplexity_change']:>+8.2f}"
        f"{100 * r['top1']:>9.2f}"
    )
