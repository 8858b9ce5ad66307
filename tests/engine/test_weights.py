"""Weights that are not plain BF16: what the cache costs is what it costs with plain weights. KL in nats."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

import pytest

pytestmark = pytest.mark.engine
TOKENS, CHUNK = 600, 16
REACH = 64 + 256  # up to here everything is read in BF16
OPTIONS = {"max_model_len": TOKENS + 16, "max_num_batched_tokens": TOKENS + 16, "max_num_seqs": 1}


def log_probabilities(engine: Engine, prompt: list[int]) -> torch.Tensor:
    engine.chunk_limit(CHUNK)
    engine.run({"one": prompt}, 1)
    return engine.log_probabilities("one", 0, TOKENS)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def test_awq_weights(
    any_engine: Callable[..., Engine], model_path: Path, sidecar_path: Path, prose: list[int], tmp_path: Path
) -> None:
    """A checkpoint in AWQ's format, made here, through vLLM's AWQ kernels; the sidecar is the original's.

    vLLM's CPU kernel rounds activations too, which makes two exact attentions differ by 0.035 nats; so both caches are
    compared with plain weights.
    """
    folder = tmp_path / "awq"
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "awq.py"))["convert"](model_path, folder)
    prompt = prose[1000 : 1000 + TOKENS]
    bf16 = {"kv_cache_dtype": "auto", "block_size": 32} | OPTIONS
    plain = log_probabilities(any_engine(model_path, None, **bf16), prompt)
    alone = divergence(plain, log_probabilities(any_engine(folder, None, **bf16), prompt))
    engine = any_engine(folder, sidecar_path, **OPTIONS)
    assert engine.model.quant_config.get_name() == "auto_awq"
    both = divergence(plain, log_probabilities(engine, prompt))
    for name, part in ("BF16", slice(REACH)), ("INT2", slice(REACH, None)):
        print(f"{name} reads: AWQ {float(alone[part].mean()):.3f}, with the cache {float(both[part].mean()):.3f}")
    assert alone.mean() > 0.05, "4-bit weights are served"
    assert both[:REACH].mean() < 1.1 * alone[:REACH].mean()
    assert both[REACH:].mean() < 1.1 * alone[REACH:].mean() + 0.02
