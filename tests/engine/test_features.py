"""Ways of asking that vLLM offers on top of plain completions, within sink + window, where BF16's answer is ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
LIMIT = 509  # of a request's tokens: no multiple of the block size
OPTIONS = {"max_model_len": LIMIT, "num_gpu_blocks_override": 200}
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def bf16(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(kv_cache_dtype="auto", **OPTIONS | {"block_size": 32})


@pytest.fixture(scope="module")
def oscar(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(**OPTIONS)


def test_structured_output(oscar: Engine) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = SamplingParams(
        temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex=r"(Paris|Lyon|Rome) \d{4}")
    )
    answers = oscar.llm.chat([CAPITAL, CAPITAL], asked, use_tqdm=False)
    for answer in answers:
        assert re.fullmatch(r"(Paris|Lyon|Rome) \d{4}", answer.outputs[0].text)


def test_beam_search(bf16: Engine, oscar: Engine, prose: list[int]) -> None:
    """Beams share blocks, split and are dropped; the best is as likely as the best over BF16."""
    from vllm.sampling_params import BeamSearchParams

    asked = BeamSearchParams(beam_width=3, max_tokens=10)
    prompt = {"prompt_token_ids": prose[:150]}
    exact, ours = (engine.llm.beam_search([prompt], asked)[0].sequences for engine in (bf16, oscar))
    assert len({tuple(sequence.tokens) for sequence in ours}) == 3
    assert ours[0].cum_logprob == pytest.approx(exact[0].cum_logprob, abs=0.4)  # ten tokens' worth of BF16 noise


@pytest.mark.parametrize("prompt", [1, 63, 64, 65])
def test_one_token_after_a_prompt_around_the_sink(bf16: Engine, oscar: Engine, prose: list[int], prompt: int) -> None:
    answer = oscar.answer(prose[:prompt], 1)
    bf16.answer(prose[:prompt], 1)
    likely = bf16.log_probabilities("one", prompt - 1, prompt)[0]
    assert len(answer) == 1
    assert likely[answer[0]] >= likely.max() - 0.375  # three steps of a bfloat16 logit, see test_scheduling


def test_a_request_may_fill_the_models_length(oscar: Engine, prose: list[int]) -> None:
    output = oscar.run({"long": prose[: LIMIT - 5]}, 100)["long"].outputs[0]
    assert len(output.token_ids) == 5
    assert output.finish_reason == "length"


@pytest.mark.parametrize("block", [32, 128])
def test_other_block_sizes(make_engine: Callable[..., Engine], bf16: Engine, prose: list[int], block: int) -> None:
    """Far beyond the window, where most is read in INT2, first computed and then found in the prefix cache."""
    engine = make_engine(max_model_len=LIMIT, block_size=block, num_gpu_blocks_override=20, enable_prefix_caching=True)
    prompt, tokens, span = prose[:490], 12, (480, 490 + 11)
    forced = {"one": prompt + prose[490 : 490 + tokens]}
    bf16.run({"one": prompt}, tokens, forced=forced)
    exact = bf16.log_probabilities("one", *span)
    engine.chunk_limit(48)
    for cached in (0, 490 // block * block):
        assert engine.run({"one": prompt}, tokens, forced=forced)["one"].num_cached_tokens == cached
        kl = (exact.exp() * (exact - engine.log_probabilities("one", *span))).sum(-1)
        print(f"blocks of {block}, {cached} tokens found: {float(kl.mean()):.4f}")
        assert 1e-4 < kl.mean() < 0.02  # measured: 0.004
