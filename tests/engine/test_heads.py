"""Drafting heads: their layers in 16 bits beside the target's in INT2, in one KV-cache group.

Answers are compared with those of an engine without drafts, forced to the same text, as in test_scheduling.py. Target
and heads are small and random, and a head drafts the token that it saw last, so that some drafts are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.models.checkpoints import add_sinks
from benchmarks.models.heads import head_weights, mimo_weights
from benchmarks.models.shapes import random_sidecar, random_weights
from tests.engine.conftest import TINY, divergence
from tests.engine.test_models import GEMMA2, GPT_OSS, MISTRAL
from vllm_oscar.errors import UnsupportedError

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
OPTIONS = {"sink": 16, "window": 32}
BLOCK = 32  # vLLM's own attention on CPUs takes no smaller ones
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
MIMO = {"hidden_size": 256, "hidden_act": "silu", "initializer_range": 0.07}
# KL in nats of a target with random weights whose history is read in INT2, as in test_scheduling.py
NOISE = 0.1


def text(length: int, shift: int) -> list[int]:
    return [(7 * i * i + 3 * i + shift) % 500 + 5 for i in range(length)]


def serve(engine: Callable[..., Engine], folder: Path, **options: Any) -> Engine:
    sidecar = random_sidecar(folder)
    return engine(folder, sidecar, OPTIONS, skip_tokenizer_init=True, dtype="bfloat16", block_size=BLOCK, **options)


@pytest.fixture
def target(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """A target, and --speculative-config without the number of drafts, by the method."""

    def make(method: str) -> tuple[Path, dict[str, Any]]:
        if method == "mtp":
            return mimo_weights(tmp_path / "mimo", TINY | MIMO), {"method": "mtp"}
        folder = tiny_model(LLAMA)
        return folder, {"method": method, "model": str(head_weights(folder, method))}

    return make


@pytest.mark.parametrize(
    ("method", "k"),
    [
        ("eagle", 1),
        ("eagle", 4),
        pytest.param("eagle3", 2, marks=pytest.mark.both_runners),
        ("eagle3", 5),
        pytest.param("mtp", 3, marks=pytest.mark.both_runners),
    ],
)
def test_a_head(
    target: Callable[[str], tuple[Path, dict[str, Any]]],
    any_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    k: int,
) -> None:
    """In a batch, after a prefix hit, and in requests that are preempted in mid-draft, which happens once to each of
    the last two: what is accepted is what the target says alone."""
    from vllm_oscar.integration import runtime

    said: list[str] = []
    monkeypatch.setattr(runtime.logger, "info", lambda text, *args: said.append(text % args))
    folder, speculative = target(method)
    speculative["num_speculative_tokens"] = k
    drafting = serve(
        any_engine, folder, speculative_config=speculative, enable_prefix_caching=True, num_gpu_blocks_override=25
    )
    texts: dict[str, tuple[list[int], torch.Tensor]] = {}

    def ask(prompts: dict[str, list[int]], tokens: int) -> dict[str, Any]:
        outputs = drafting.run(prompts, tokens)
        for name, prompt in prompts.items():
            answer = list(outputs[name].outputs[0].token_ids)
            last = len(prompt) + tokens - 1
            texts[name] = prompt + answer, drafting.log_probabilities(name, len(prompt) - 1, last)
        return outputs

    ask({"short": text(20, 0), "long": text(190, 1)}, 40)
    again = ask({"again": texts["long"][0] + text(3, 2)}, 20)["again"]
    assert again.num_cached_tokens >= 6 * BLOCK, "accepted tokens are found in the prefix cache"
    assert drafting.metric("vllm:num_preemptions") == 0
    ask({"one": text(350, 3), "other": text(350, 4)}, 60)
    assert drafting.metric("vllm:num_preemptions") > 0
    accepted, drafted = (drafting.metric(f"vllm:spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
    assert 5 < accepted < drafted - 5, f"{accepted} of {drafted} drafts accepted"

    layers = drafting.runner.compilation_config.static_forward_context
    dtypes = [layer.kv_cache.dtype for layer in layers.values()]
    assert dtypes == [torch.uint8] * 4 + [torch.bfloat16]
    (group,) = drafting.scheduler.kv_cache_config.kv_cache_groups
    assert group.layer_names == list(layers)
    ours, other = 4 * 2 * 40, 2 * 2 * 2 * 64
    assert drafting.runtime.statistics()["int2_sink_reads"] < drafting.runtime.statistics()["int2_reads"]
    assert any("leaves the draft's layers" in line and method in line for line in said)
    (line,) = [line for line in said if "an element" in line]
    assert f"4 layers with 2.5 bits an element, 1 not; {ours} bytes a token" in line
    assert f"and {other} in the latter" in line
    tokens, pool = 25 * BLOCK, drafting.runtime.pool_bytes
    ratio = tokens * (4 * other + other) / (tokens * (ours + other) + pool)
    assert f"room for {tokens} tokens ({ratio:.2f} times" in line

    plain = serve(any_engine, folder)
    for name, (whole, got) in texts.items():
        prompt = whole[: len(whole) - got.shape[0]]
        plain.run({name: prompt}, got.shape[0], forced={name: whole})
        alone = plain.log_probabilities(name, len(prompt) - 1, len(whole) - 1)
        kl = divergence(alone, got)
        print(f"{method} {k}, {name}: mean {float(kl.mean()):.2g}, worst {float(kl.max()):.2g}")
        assert float(kl.mean()) < NOISE
        assert float(kl.max()) < 12 * NOISE


@pytest.mark.parametrize("config", [GPT_OSS, MISTRAL], ids=lambda config: config["model_type"])
def test_a_head_beside_sliding_windows(
    tiny_model: Callable[..., Path], any_engine: Callable[..., Engine], config: dict[str, Any]
) -> None:
    """In one group, where layers that slide keep all tokens: in groups of their own, vLLM would pad INT2's pages. Where
    all of the target's slide, vLLM gives the head's the same window."""
    folder = tiny_model(config)
    options: dict[str, Any] = {}
    if config is GPT_OSS:
        add_sinks(folder)
        drafts = {"method": "eagle3", "model": str(head_weights(folder, "eagle3")), "num_speculative_tokens": 3}
        with pytest.raises(UnsupportedError, match=r"only some .* window.*use --disable-hybrid-kv-cache-manager"):
            serve(any_engine, folder, speculative_config=drafts)
        options["disable_hybrid_kv_cache_manager"] = True
    else:
        drafts = {"method": "eagle", "model": str(head_weights(folder, "eagle")), "num_speculative_tokens": 3}
    drafting = serve(any_engine, folder, speculative_config=drafts, **options)
    prompt = text(100, 0)
    answer = drafting.answer(prompt, 20)
    got = drafting.log_probabilities("one", 99, 119)
    accepted, drafted = (drafting.metric(f"vllm:spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
    assert accepted < drafted - 10
    assert len(drafting.scheduler.kv_cache_config.kv_cache_groups) == 1
    plain = serve(any_engine, folder)
    plain.run({"one": prompt}, 20, forced={"one": prompt + answer})
    kl = divergence(plain.log_probabilities("one", 99, 119), got)
    print(f"{accepted} of {drafted}, mean {float(kl.mean()):.2g}, worst {float(kl.max()):.2g}")
    assert float(kl.mean()) < NOISE
    assert float(kl.max()) < 12 * NOISE


def test_a_draft_model_for_which_vllm_would_pad_int2_pages_is_refused(
    tiny_model: Callable[..., Path], any_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """No configuration of the target shows it: of the draft's layers some slide."""
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(TINY | GEMMA2))
    random_weights(draft)
    folder = tiny_model(LLAMA)
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with pytest.raises(UnsupportedError, match=r"pages of 2560 bytes .* use --disable-hybrid-kv-cache-manager"):
        serve(any_engine, folder, speculative_config=drafts)
