"""Keys over long contexts: means that turn are found where a bias is planted; moments are those at every position."""

import math
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.unit.rope import FREQUENCY, HEADS, PAIRS, SIZE, rope  # noqa: E402
from vllm_oscar.cache_layer import RowCodec  # noqa: E402
from vllm_oscar.calibrate.capture import Attention, attention_output  # noqa: E402
from vllm_oscar.calibrate.rope import (  # noqa: E402
    as_served,
    default_context,
    key_mean,
    key_moments,
    turning_frequencies,
)
from vllm_oscar.calibrate.solve import Recipe, solve  # noqa: E402
from vllm_oscar.calibrate.statistics import FarSet, LayerStatistics  # noqa: E402
from vllm_oscar.calibrate.streaming import Model, _fixed, _frequencies, _record  # noqa: E402
from vllm_oscar.quantizer import FP16_MAX, decode  # noqa: E402
from vllm_oscar.sidecar import TensorCalibration  # noqa: E402
from vllm_oscar.turning import TurningMean  # noqa: E402

CPU = torch.device("cpu")
TOKENS = 384
FAR = FarSet(sink=16, window=64)


def attention(
    bias: torch.Tensor, interleaved: bool = False, seed: int = 0, spread: torch.Tensor | float = 1.0, start: int = 0
) -> Attention:
    """Random rows; keys have a bias, float64 (heads, D), and a spread before RoPE, and positions from `start` on."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    key = rope(randn(HEADS, TOKENS, SIZE) * spread + bias[:, None], start + torch.arange(TOKENS), interleaved)
    query = randn(2 * HEADS, TOKENS, SIZE) * (1 / (1 + bias.abs())).repeat_interleave(2, 0)[:, None]
    value = randn(HEADS, TOKENS, SIZE)
    fields: dict[str, Any] = {"mask": None, "scaling": SIZE**-0.5, "softcap": None, "sinks": None}
    empty = Attention(query, key, value, torch.empty_like(query), projection=randn(2 * HEADS, 96, SIZE), **fields)
    return Attention(query, key, value, attention_output(empty), projection=empty.projection, **fields)


def planted(*pairs: int, interleaved: bool = False) -> torch.Tensor:
    bias = torch.zeros(HEADS, SIZE, dtype=torch.float64)
    for pair in pairs:
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + PAIRS)
        bias[:, first], bias[:, second] = torch.tensor([40.0, -30.0]), torch.tensor([20.0, 50.0])
    return bias


def statistics(*calls: Attention) -> LayerStatistics:
    sums = LayerStatistics()
    for call in calls:
        sums.add(call, FAR, FREQUENCY)
    return sums


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_planted_biases_are_found(interleaved: bool) -> None:
    """Pair 3 turns 27 times in these tokens, pair 12 twice. Their means are exact to the noise of the other rows."""
    bias = planted(3, 12, interleaved=interleaved)
    found = key_moments(statistics(*(attention(bias, interleaved, seed) for seed in (0, 1))), TOKENS).turning
    assert found is not None
    assert torch.equal(found.frequency, FREQUENCY[[3, 12]])
    turned = found.vectors[:, :, 0].sum(1)  # at position 0 it is the bias
    assert (turned - bias).abs().max() < 1.0


def test_without_a_bias_no_mean_turns() -> None:
    sums = statistics(*(attention(planted(), seed=seed) for seed in range(4)))
    assert key_moments(sums, 131_072).turning is None


def test_a_slow_bias_turns_only_in_long_contexts() -> None:
    """Pair 28 turns by 0.12 radians in 384 tokens: a constant is enough. In 131,072 it turns six times."""
    sums = statistics(attention(planted(28)))
    assert key_moments(sums, TOKENS).turning is None
    assert key_moments(sums, 131_072, pairs=0).turning is None
    found = key_moments(sums, 131_072).turning
    assert found is not None
    assert torch.equal(found.frequency, FREQUENCY[[28]])


def test_moments_are_those_of_rows_without_what_turns() -> None:
    call = attention(planted(3))
    sums = statistics(call)
    generator = torch.Generator().manual_seed(5)
    turning = TurningMean(FREQUENCY[[3, 7]], torch.randn(HEADS, 2, 2, SIZE, generator=generator, dtype=torch.float64))
    mean, covariance = sums.mean_and_covariance("key", turning)

    angle = torch.arange(TOKENS)[:, None] * FREQUENCY[[3, 7]].double()
    moving = torch.einsum("tpc,hpcd->htd", torch.stack([angle.cos(), angle.sin()], -1), turning.vectors)
    weight = key_weights(call)  # those of the whole rows
    rows = call.key - moving
    expected = (rows * weight[..., None]).sum(1) / weight.sum(1)[:, None]
    centred = rows - expected[:, None]
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(covariance, (centred * weight[..., None]).mT @ centred / weight.sum(1)[:, None, None])


def key_weights(call: Attention) -> torch.Tensor:
    """What each key counts, (heads, T), seen through `_add_moments`."""
    seen = []

    class Looking(LayerStatistics):
        def _add_moments(self, name: str, rows: torch.Tensor, weight: torch.Tensor) -> None:
            if name == "key":
                seen.append(weight)

    Looking().add(call, FAR)
    return seen[0]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("pairs", [0, 8])
def test_moments_hold_at_every_position(interleaved: bool, pairs: int) -> None:
    """Against rows and queries that are really turned, by every shift in contexts of one to eight more tokens."""
    context = TOKENS + 7
    call = attention(planted(3, 25, interleaved=interleaved), interleaved)
    sums = statistics(call)
    found = key_moments(sums, context, pairs)
    assert (found.turning is not None) == (pairs > 0)
    mean, covariance = sums.mean_and_covariance("key", found.turning)

    expected = [torch.zeros_like(part) for part in (mean, covariance, covariance)]
    unit = rope(torch.eye(SIZE, dtype=torch.float64)[:, None].expand(-1, 8, -1), torch.arange(8), interleaved)
    for step in range(32):
        longest = math.ceil(TOKENS * (context / TOKENS) ** ((step + 0.5) / 32)) - TOKENS + 1
        for shift in range(longest):
            turn = unit[:, shift]  # a row x becomes x turn
            second = turn.T @ (covariance + mean[..., :, None] * mean[..., None, :]) @ turn
            for total, part in zip(
                expected, (mean @ turn, second, turn.T @ sums.tensors["key_error"] @ turn), strict=True
            ):
                total += part / longest / 32
    torch.testing.assert_close(found.mean, expected[0])
    torch.testing.assert_close(found.covariance, expected[1] - found.mean[..., :, None] * found.mean[..., None, :])
    torch.testing.assert_close(found.error, expected[2])
    torch.testing.assert_close(key_mean(sums, context, found.turning), found.mean)


def test_keys_far_behind_the_calibrations_positions_keep_their_quality() -> None:
    """Slow pairs whose first channel has most of the spread, and means: at 100,000 tokens they point elsewhere."""
    spread = torch.ones(SIZE, dtype=torch.float64)
    spread[20:PAIRS], spread[20 + PAIRS :] = 6.0, 0.3
    bias = torch.where(spread == 6, 5.0, 0.0).double().expand(HEADS, -1)
    sums = statistics(*(attention(bias, seed=seed, spread=spread) for seed in range(3)))

    def error(context: int, start: int) -> float:
        recipe = Recipe.of("aware", per="head", group_size=SIZE, context=context, turning_pairs=0)
        return stored_error(solve(sums, recipe)[0].key, attention(bias, seed=9, spread=spread, start=start), start)

    assert error(0, 100_000) > 3 * error(0, 0)
    assert error(131_072, 100_000) < 0.3 * error(0, 100_000)
    assert error(131_072, 0) < error(0, 0)


def stored_error(calibration: TensorCalibration, call: Attention, start: int) -> float:
    """Mean square of what INT2 does to the keys of a call."""
    codec = RowCodec.of(calibration, SIZE, torch.bfloat16, FP16_MAX, None)
    position = start + torch.arange(TOKENS)
    rows = call.key.transpose(0, 1).float()
    encoded = codec.encode(codec.transform.forward(rows, position).bfloat16())
    stored = decode(encoded.codes, encoded.scale, encoded.offset)
    return float((codec.transform.backward(stored, position) - rows)[FAR.sink :].square().mean())


def test_without_frequencies_moments_are_those_of_the_sequences() -> None:
    sums = LayerStatistics()
    sums.add(attention(planted()), FAR)
    mean, covariance = sums.mean_and_covariance("key")
    found = key_moments(sums, 131_072)
    assert torch.equal(found.mean, mean)
    assert torch.equal(found.covariance, covariance)


def test_int2_does_not_see_what_turns() -> None:
    """The keys' error with the turning mean is that of unbiased keys; with a constant one many times it."""

    def error(bias: torch.Tensor, pairs: int) -> float:
        call = attention(bias)
        recipe = Recipe.of("aware", per="head", group_size=SIZE, turning_pairs=pairs)
        return stored_error(solve(statistics(call), recipe)[0].key, call, 0)

    plain, turning, constant = error(planted(), 8), error(planted(3, 12), 8), error(planted(3, 12), 0)
    assert turning < 2 * plain
    assert constant > 10 * plain


def rope_config(kind: str, **more: Any) -> Any:
    small = {
        "vocab_size": 30, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "sliding_window": 20,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **small | more)


def found_frequencies(config: Any, dtype: torch.dtype = torch.float32, length: int = 24) -> list[torch.Tensor | None]:
    """What calibration finds out about each layer of a random model."""
    torch.manual_seed(0)
    model = Model(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval().get_decoder(), CPU)
    ids = torch.arange(length)[None] % 30
    with torch.inference_mode():
        calls, states = _record(model, ids)
        return [
            _frequencies(model, layer, call, states) if fixed else None
            for layer, call, fixed in zip(model.layers, calls, _fixed(model, calls, ids), strict=True)
        ]


def has_rope(found: list[torch.Tensor | None]) -> list[bool]:
    assert all(frequency is not None for frequency in found)
    return [bool(len(frequency)) for frequency in found if frequency is not None]


SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
AFMOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "num_dense_layers": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("smollm3", {"hidden_size": 128}),
        ("exaone4", {"layer_types": SLIDING}),
        ("afmoe", {"layer_types": SLIDING, **AFMOE}),
        ("cohere2", {"layer_types": SLIDING, "hidden_size": 128}),
    ],
)
def test_layers_that_do_not_use_the_angles_they_are_given_have_no_rope(
    kind: str, more: dict[str, Any], dtype: torch.dtype
) -> None:
    """All of these have RoPE in three layers of four; transformers hands the angles to every layer."""
    assert has_rope(found_frequencies(rope_config(kind, **more), dtype)) == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_those_of_the_layers_own_rope(dtype: torch.dtype) -> None:
    """Gemma-3 has two; each layer's keys say which is its own."""
    config = rope_config("gemma3_text", num_hidden_layers=2, layer_types=SLIDING[2:])
    sliding, full = found_frequencies(config, dtype)
    assert sliding is not None and full is not None
    torch.testing.assert_close(sliding.float(), FREQUENCY)
    torch.testing.assert_close(full.float(), 1e6 ** (-torch.arange(PAIRS, dtype=torch.float32) / PAIRS))


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        # neighbours turn together, and the angles come in neighbours too
        ("cohere", {"hidden_size": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, FREQUENCY),
        ("glm4", {"partial_rotary_factor": 0.5}, FREQUENCY[::2]),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}}, FREQUENCY / 8),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_found_in_every_layout(
    kind: str, more: dict[str, Any], expected: torch.Tensor | None, dtype: torch.dtype
) -> None:
    config = rope_config(kind, num_hidden_layers=1, **more)
    (found,) = found_frequencies(config, dtype)
    assert found is not None
    if expected is None:
        expected = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config)[0]
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=0.0)


def test_rope_that_depends_on_the_length_has_no_fixed_frequencies() -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    assert found_frequencies(rope_config("llama", num_hidden_layers=2, rope_parameters=parameters)) == [None, None]


def longrope() -> Any:
    factors = {"short_factor": [1.0] * PAIRS, "long_factor": [1.0 + index for index in range(PAIRS)]}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32} | factors
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "max_position_embeddings": 128}
    return rope_config("phi3", original_max_position_embeddings=32, rope_parameters=parameters, **sizes)


@pytest.mark.parametrize("length", [24, 48])
@pytest.mark.parametrize(("context", "long"), [(32, False), (33, True)])
def test_longrope_is_calibrated_with_the_factors_that_vllm_takes(context: int, long: bool, length: int) -> None:
    """By the longest context served, whatever the length of the sequences."""
    (found,) = found_frequencies(as_served(longrope(), context), length=length)
    factor = torch.arange(1, PAIRS + 1) if long else torch.ones(PAIRS)
    assert found is not None
    torch.testing.assert_close(found, FREQUENCY / factor)


def test_longrope_as_transformers_has_it_is_not_taken_for_fixed() -> None:
    assert found_frequencies(longrope()) == [None]


def test_the_context_is_vllms_unless_asked_for() -> None:
    assert default_context(longrope()) == 32
    assert default_context(rope_config("llama", max_position_embeddings=77)) == 77


def test_keys_that_turn_in_no_known_way_have_no_known_frequencies() -> None:
    """Another speed of one pair, and a norm with weights after RoPE."""
    before = torch.randn(HEADS, 64, SIZE, generator=torch.Generator().manual_seed(0))
    after = rope(before.double(), torch.arange(64), interleaved=False).float()
    assert turning_frequencies(before, after, [FREQUENCY[::2], FREQUENCY]) is FREQUENCY
    assert turning_frequencies(before, after.bfloat16(), [FREQUENCY]) is FREQUENCY
    assert (
        turning_frequencies(before, after, [torch.cat([FREQUENCY[:9], FREQUENCY[9:10] * 1.1, FREQUENCY[10:]])]) is None
    )
    assert turning_frequencies(before, after * torch.linspace(0.5, 1.5, SIZE), [FREQUENCY]) is None
    assert turning_frequencies(before, 1.3 * after, [FREQUENCY]) is FREQUENCY  # YaRN


def test_without_rope_moments_are_those_of_the_sequences() -> None:
    sums, plain = LayerStatistics(), LayerStatistics()
    sums.add(attention(planted(3)), FAR, torch.zeros(0))
    plain.add(attention(planted(3)), FAR)
    found, expected = key_moments(sums, 131_072), key_moments(plain, 131_072)
    assert found.turning is None
    assert torch.equal(found.covariance, expected.covariance)
    assert torch.equal(key_mean(sums, 131_072, None), expected.mean)
