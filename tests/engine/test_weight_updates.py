"""Weights that change under a running engine, memory that is lost while it sleeps, a prefix cache that is emptied: what
is in the BF16 pool then belongs to nobody, and nothing of it reaches an answer. Every step is audited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.conftest import divergence
from vllm_oscar import audit

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
OPTIONS = {"sink": 16, "window": 32}
PROMPT, TOKENS = 150, 8
SPAN = (0, PROMPT + TOKENS - 1)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(audit.ENVIRONMENT_VARIABLE, "1")
        return make_engine(OPTIONS, enable_prefix_caching=True)


@pytest.fixture(autouse=True)
def forget(engine: Engine) -> None:
    assert engine.llm.reset_prefix_cache()


def served(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """Log probabilities along a prompt that no block of the prefix cache has, and along its answer."""
    engine.chunk_limit(40)
    assert engine.run({"one": prompt}, TOKENS)["one"].num_cached_tokens == 0
    engine.chunk_limit(512)
    return engine.log_probabilities("one", *SPAN)


def memory(engine: Engine) -> list[int]:
    """Where everything of ours lies that CUDA graphs would hold on to."""
    tensors = [(impl.pool.rows, impl.pool.words, impl.cache_layer.key.transform.inverse) for impl in engine.impls]
    return [tensor.data_ptr() for layer in tensors for tensor in layer]


def lose_memory(engine: Engine) -> None:
    """What sleeping does on a GPU to memory that holds no weights: anything may be in it afterwards."""
    generator = torch.Generator().manual_seed(0)
    layers = engine.runner.compilation_config.static_forward_context.values()
    with torch.inference_mode():
        for layer in layers:
            for tensor in (layer.kv_cache, layer.impl.pool.rows, layer.impl.pool.words):
                flat = tensor.view(torch.uint8)
                flat.copy_(torch.randint(0, 256, flat.shape, generator=generator, dtype=torch.uint8))


def test_new_weights_read_nothing_that_the_old_ones_wrote(engine: Engine, model_path: Path, prose: list[int]) -> None:
    """Other weights into the running model, as in reinforcement learning, and the old ones again from the disk. The
    truth is the same model with pages and pool full of noise; pool and calibration stay where graphs would look."""

    def changed() -> Iterator[tuple[str, torch.Tensor]]:
        for file in model_path.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                yield name, tensor * 1.05 if name.endswith(("k_proj.weight", "v_proj.weight")) else tensor

    def reload(**given: Any) -> None:
        engine.llm.collective_rpc("reload_weights", kwargs=given)
        assert engine.llm.reset_prefix_cache()
        assert memory(engine) == places

    prompt, places = prose[:PROMPT], memory(engine)
    old = served(engine, prompt)
    reload(weights_iterator=changed())
    new = served(engine, prompt)
    engine.llm.reset_prefix_cache()
    lose_memory(engine)
    assert torch.equal(served(engine, prompt), new)
    assert divergence(old, new).mean() > 1e-3
    reload()
    assert torch.equal(served(engine, prompt), old)


@pytest.mark.parametrize("level", [1, 2])
def test_answers_after_sleep_are_those_before(engine: Engine, prose: list[int], level: int) -> None:
    """vLLM's CPU worker keeps its memory when it sleeps; a GPU's loses the pages, and at level 2 the pool as well."""
    prompt = prose[:PROMPT]
    before = served(engine, prompt)
    engine.llm.sleep(level)
    lose_memory(engine)
    engine.llm.wake_up()
    assert torch.equal(served(engine, prompt), before)
    assert engine.runtime.statistics()["saturated_rows"] == 0


def test_counts_survive_a_deep_sleep(engine: Engine) -> None:
    """After level 2 vLLM brings buffers back, and nothing else."""
    buffers = {buffer.data_ptr() for buffer in engine.model.buffers()}
    assert {counts.data_ptr() for counts in vars(engine.runtime.counters).values()} <= buffers


@pytest.mark.parametrize("preempt", [False, True])
def test_resetting_the_prefix_cache_in_the_middle_of_work(engine: Engine, prose: list[int], preempt: bool) -> None:
    """Refused by vLLM while requests run, unless it may preempt them: then all is computed again, in other blocks."""
    prompts = {"a": prose[:PROMPT], "b": [*prose[:PROMPT], *prose[900:930]]}
    span, done = (PROMPT + 29, PROMPT + 41), []
    answers = {name: engine.answer(prompt, 12, name) for name, prompt in prompts.items()}
    alone = engine.log_probabilities("b", *span)

    def on_step(step: int) -> None:
        if step in (2, 5):
            done.append(engine.llm.reset_prefix_cache(reset_running_requests=preempt))

    forced = {name: [*prompt, *answers[name]] for name, prompt in prompts.items()}
    engine.run(prompts, 12, forced=forced, on_step=on_step)
    assert done == [preempt, preempt]
    starts = [first for first, _ in engine.chunks["b"]]
    assert (sorted(starts) != starts) == preempt, "computed again, or not"
    kl = divergence(alone, engine.log_probabilities("b", *span))
    assert float(kl.mean()) < 0.1  # see NOISE in test_scheduling
