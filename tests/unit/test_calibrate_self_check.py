"""What is calibrated is the checkpoint's model: layer by layer and in its logits, or nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.unit.tiny_models import BASE, tiny, tokens  # noqa: E402
from vllm_oscar import errors  # noqa: E402
from vllm_oscar.calibrate import streaming  # noqa: E402
from vllm_oscar.calibrate.capture import Attention  # noqa: E402
from vllm_oscar.calibrate.self_check import PlainRun  # noqa: E402
from vllm_oscar.calibrate.statistics import FarSet  # noqa: E402
from vllm_oscar.calibrate.streaming import Model, State, collect  # noqa: E402

FAR = FarSet(sink=4, window=8, stride=1)


def wrapped() -> Any:
    """A decoder inside a model of text and images."""
    text = BASE | {"sliding_window": 20, "model_type": "gemma3_text"}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def wrapped_only() -> Any:
    """A decoder that transformers knows inside a model of text and images only."""
    text = BASE | {"model_type": "llama", "tie_word_embeddings": False}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Idefics3Config(text_config=text, vision_config=vision, image_token_id=3, pad_token_id=257)
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config).float().eval()


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "untied head": (lambda: tiny("llama", tie_word_embeddings=False), {}),
    "tied head": (lambda: tiny("llama", tie_word_embeddings=True), {}),
    "scaled embedding, soft caps, tied": (lambda: tiny("gemma2"), {}),
    "shards": (lambda: tiny("qwen2"), {"max_shard_size": "100KB"}),
    "fused experts": (lambda: tiny("qwen3_moe"), {}),
    "experts with biases, sinks": (lambda: tiny("gpt_oss"), {}),
    "text and images": (wrapped, {}),
    "images first of all": (wrapped_only, {}),
}


def run(folder: Path, name: str = "model", dtype: torch.dtype | None = torch.float32) -> None:
    ids = tokens(2, 48)
    with (
        State(folder / "state", {}) as state,
        Model.opened(str(folder / name), torch.device("cpu"), dtype) as model,
    ):
        collect(model, ids, FAR, state, lambda count: None)


@pytest.mark.parametrize("kind", list(MODELS))
def test_streamed_models_are_their_checkpoints(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 and in BF16; each layer was compared, and logits that are those of a model loaded as a whole."""
    make, options = MODELS[kind]
    make().save_pretrained(tmp_path / "model", **options)
    if options:
        assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    compared: list[int] = []
    seen: list[torch.Tensor] = []
    layer, logits = PlainRun.compare_layer, PlainRun.compare_logits

    def compare_layer(self: PlainRun, number: int, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        compared.append(number)
        layer(self, number, run)

    def compare_logits(self: PlainRun, found: torch.Tensor) -> None:
        seen.append(found)
        logits(self, found)

    monkeypatch.setattr(PlainRun, "compare_layer", compare_layer)
    monkeypatch.setattr(PlainRun, "compare_logits", compare_logits)
    run(tmp_path)
    assert compared == [0, 1, 2]
    auto = transformers.AutoModelForImageTextToText if "images" in kind else transformers.AutoModelForCausalLM
    plain = auto.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = plain.eval()(input_ids=tokens(2, 48)[:1]).logits[0]
    torch.testing.assert_close(seen[0], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    (tmp_path / "state").rename(tmp_path / "before")
    run(tmp_path, dtype=torch.bfloat16)
    assert len(compared) == 6 and len(seen) == 2


def changed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's values are read wrongly."""
    plain, count = streaming._materialise, []

    def wrongly(layer: torch.nn.Module, device: torch.device) -> None:
        plain(layer, device)
        count.append(1)
        if len(count) == 2:
            layer.get_parameter("self_attn.v_proj.weight").neg_()

    monkeypatch.setattr(streaming, "_materialise", wrongly)


def changed_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token sees all others."""

    def everywhere(attention: Attention) -> torch.Tensor:
        query, key, value = attention.query[None], attention.key[None], attention.value[None]
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)[0]

    monkeypatch.setattr("vllm_oscar.calibrate.capture.attention_output", everywhere)


def changed_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes into the file of hidden states."""
    plain = streaming.HiddenStates.write
    monkeypatch.setattr(
        streaming.HiddenStates, "write", lambda self, index, states: plain(self, index, states + states.flip(1))
    )


@pytest.mark.parametrize(
    ("fault", "says"),
    [(changed_weights, "layer 1"), (changed_mask, "layer 0"), (changed_states, "behind all layers")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_not_the_checkpoints_is_not_calibrated(
    fault: Callable[[pytest.MonkeyPatch], None],
    says: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    fault(monkeypatch)
    with pytest.raises(errors.CalibrationError, match=says):
        run(tmp_path, dtype=dtype)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.self_attn.v_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        errors.CalibrationError, match=r"lacks 1 weights .* model\.layers\.1\.self_attn\.v_proj\.weight"
    ):
        run(tmp_path)


def test_models_that_guess_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that are no model's, or another model's tokenizer: nothing else shows it."""
    tiny("llama").save_pretrained(tmp_path / "model")
    with caplog.at_level("WARNING"):
        run(tmp_path)
    assert "hardly better than by guessing" in caplog.text


def test_a_run_that_goes_on_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    finish = State.finish

    def killed(self: State, layer: int, *rest: Any) -> None:
        finish(self, layer, *rest)
        if layer == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(State, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    changed_weights(monkeypatch)  # of the third layer, the second that is loaded from here on
    with pytest.raises(errors.CalibrationError, match="layer 2"):
        run(tmp_path)
