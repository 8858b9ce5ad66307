"""What the attention layer reads, step by step in a real engine, against a reference written from the contract.

The reference shares no code with the plugin: it reads the sidecar file and the page's bytes itself, restores every
token to x = y B + m and does plain attention in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = [pytest.mark.engine, pytest.mark.both_runners]
BLOCK, HEAD_SIZE = 16, 64
SINK, WINDOW = 16, 32
LAYERS = (0, 17)
# Of a head's output row, in norm. The output is rounded to bfloat16: at most 2^-9. The rest is for y, computed in
# another order and rounded to bfloat16 as well: an element of some token may come out one step (2^-8) apart.
TOLERANCE = 2**-8
WRONG = {"sink - 1": (SINK - 1, WINDOW), "sink + 1": (SINK + 1, WINDOW),
         "window - 1": (SINK, WINDOW - 1), "window + 1": (SINK, WINDOW + 1)}  # fmt: skip


def dequantised(page: np.ndarray, which: int, bits: tuple[int, int] = (2, 2)) -> np.ndarray:
    """One head's region of a page, uint8 (bytes,), -> rows float64 (16, 64); which: 0 keys, 1 values; bits: of both."""
    row, own = HEAD_SIZE // 8, bits[which]
    codes = page[which * bits[0] * BLOCK * row :][: own * BLOCK * row].astype(np.uint32)
    first, rest = codes[: 2 * BLOCK * row].reshape(BLOCK, -1), codes[2 * BLOCK * row :].reshape(BLOCK, -1)
    units = first[:, 0::2] | first[:, 1::2] << 8
    if own == 3:  # codes 5, 6 and 7, whose last bit is in the word
        units = (units & 0x7FFF) | rest << 15 | (units >> 15) << 23
    if own == 4:
        units |= (rest[:, 0::2] | rest[:, 1::2] << 8) << 16
    rows = np.empty((BLOCK, HEAD_SIZE))
    for channel in range(HEAD_SIZE):
        rows[:, channel] = units[:, channel % 8] >> (own * (channel // 8)) & ((1 << own) - 1)
    meta = page[sum(bits) * BLOCK * row :][: BLOCK * 8].view(np.float16).astype(np.float64).reshape(BLOCK, 2, 2)
    return rows * meta[:, which, :1] + meta[:, which, 1:]


class Tensor:
    """Keys or values of one layer as the sidecar file describes them."""

    def __init__(self, sidecar: dict[str, torch.Tensor], name: str) -> None:
        self.mean = sidecar[f"{name}.mean"]
        self.matrix = sidecar[f"{name}.transform"].bfloat16().float()
        self.inverse = torch.linalg.inv(self.matrix.double())

    def copies(self, x: torch.Tensor) -> torch.Tensor:
        """What the BF16 copies of raw rows (tokens, heads, D) hold."""
        return torch.einsum("thd,hde->the", x.float() - self.mean, self.matrix).bfloat16().double()

    def restored(self, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum("thd,hde->the", y, self.inverse) + self.mean.double()


@dataclass
class Spy:
    """Wraps one layer's forward; compares each step's output with the reference.

    Attributes:
        bits: of the layer's keys and values
        errors: by contract, largest relative difference of a head's output row, for each (before, after)
    """

    engine: Engine
    layer: Any
    tensors: tuple[Tensor, Tensor]
    bits: tuple[int, int] = (2, 2)
    raw: dict[str, list[list[torch.Tensor]]] = field(default_factory=lambda: defaultdict(lambda: [[], []]))
    errors: dict[str, dict[tuple[int, int], float]] = field(default_factory=lambda: defaultdict(dict))

    def install(self) -> None:
        original = self.layer.impl.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = original(*args, **kwargs)
            query, key, value, _, step = args[1:6]
            self.compare(step, query, key, value, kwargs["output"] if "output" in kwargs else args[6])
            return result

        self.layer.impl.forward = forward

    def compare(
        self, step: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        impl = self.layer.impl
        for row, (name, start, end) in enumerate(self.engine.segments()):
            history = self.raw[name]
            before, after = len(history[0]), len(history[0]) + end - start
            for rows, new in zip(history, (key, value), strict=True):
                rows += list(new[start:end].reshape(-1, impl.num_kv_heads, HEAD_SIZE).clone())
            blocks = step.block_table[row, : -(-after // BLOCK)].long()
            pages = self.layer.kv_cache[blocks].flatten(2).numpy()  # (blocks, heads, bytes)
            q = query[start:end].reshape(-1, impl.num_heads, HEAD_SIZE).double()
            got = output[start:end].reshape(-1, impl.num_heads, HEAD_SIZE).double()
            for contract, limits in {"right": (SINK, WINDOW), **WRONG}.items():
                k, v = (self.read(which, history[which], pages, before, after, *limits) for which in (0, 1))
                wanted = attention(q, k, v, before, impl.scale)
                error = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
                self.errors[contract][before, after] = float(error.max())

    def read(
        self, which: int, raw: list[torch.Tensor], pages: np.ndarray, before: int, after: int, sink: int, window: int
    ) -> torch.Tensor:
        """Keys or values float64 (tokens, heads, D) as the contract lets the step read them."""
        tensor, x = self.tensors[which], torch.stack(raw)
        copies = tensor.copies(x)
        heads = [np.concatenate([dequantised(p[head], which, self.bits) for p in pages]) for head in range(x.shape[1])]
        int2 = torch.from_numpy(np.stack(heads, 1))
        restored = []
        decodes = after - before == 1
        for j in range(after):
            if not decodes and j >= before:
                restored.append(x[j].double())  # a prefill reads its own tokens exactly
                continue
            hot = j < sink or j >= before + 1 - window
            restored.append(tensor.restored((copies if hot else int2)[j : j + 1])[0])
        return torch.stack(restored)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """Plain causal attention, float64 (n, query heads, D); query i is at position first + i."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("nhd,jhd->hnj", q, k) * scale
    hidden = torch.arange(k.shape[0])[None] > first + torch.arange(q.shape[0])[:, None]
    return torch.einsum("hnj,jhd->nhd", logits.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine({"sink": SINK, "window": WINDOW, "key_encoder": "ls"})


@pytest.fixture(scope="module")
def spies(engine: Engine, sidecar_path: Path) -> list[Spy]:
    sidecar = load_file(sidecar_path)
    layers = list(engine.runner.compilation_config.static_forward_context.values())
    made = []
    for index in LAYERS:
        tensors = Tensor(sidecar, f"layers.{index}.k"), Tensor(sidecar, f"layers.{index}.v")
        made.append(Spy(engine, layers[index], tensors))
        made[-1].install()
    return made


def check(spies: list[Spy], steps: list[tuple[int, int]]) -> None:
    """Every step agrees with the contract, and with no contract that is off by one token."""
    for spy in spies:
        assert sorted(spy.errors["right"]) == sorted(steps)
        worst = max(spy.errors["right"].values())
        assert worst < TOLERANCE, max(spy.errors["right"].items(), key=lambda item: item[1])
        for contract in WRONG:
            assert max(spy.errors[contract].values()) > 2 * TOLERANCE, contract


@pytest.fixture(autouse=True)
def forget(spies: list[Spy]) -> None:
    for spy in spies:
        spy.raw.clear()
        spy.errors.clear()


def test_decode_at_every_length(engine: Engine, spies: list[Spy], prose: list[int]) -> None:
    last = SINK + WINDOW + 3 * BLOCK
    engine.run({"one": prose[:1]}, last, forced={"one": prose[: last + 1]})
    check(spies, [(n, n + 1) for n in range(last)])


@pytest.mark.parametrize("chunk", [7, 16, 40])
def test_prefill_in_chunks(engine: Engine, spies: list[Spy], prose: list[int], chunk: int) -> None:
    last = max(SINK + WINDOW + 3 * BLOCK, 8 * chunk)
    engine.chunk_limit(chunk)
    engine.run({"one": prose[:last]}, 1)
    engine.chunk_limit(512)
    check(spies, [(n, min(n + chunk, last)) for n in range(0, last, chunk)])


def test_mixed_batch(engine: Engine, spies: list[Spy], prose: list[int]) -> None:
    """Two requests decode while a third one prefills in chunks."""
    engine.chunk_limit(42)
    prompts = {"a": prose[:70], "b": prose[100:190], "c": prose[200:330]}
    engine.run(prompts, 12)
    engine.chunk_limit(512)
    together = [name for name in prompts if len(engine.chunks[name]) > 12]  # some prefilled in several chunks
    assert together
    check(spies, sorted({chunk for name in prompts for chunk in engine.chunks[name]}))
