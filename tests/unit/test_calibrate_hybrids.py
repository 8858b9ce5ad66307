"""Hybrid models: their attention layers are calibrated, by their own RoPE, and the self-check holds with the others
between them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from benchmarks.models.hybrids import HYBRIDS  # noqa: E402
from tests.unit.tiny_models import BASE, tokens  # noqa: E402
from vllm_oscar.calibrate.self_check import PlainRun  # noqa: E402
from vllm_oscar.calibrate.statistics import FarSet  # noqa: E402
from vllm_oscar.calibrate.streaming import Model, State, collect  # noqa: E402
from vllm_oscar.errors import UnsupportedError  # noqa: E402

PAIRS = {"qwen3_next": 8, "qwen3_5": 16, "lfm2": 32, "granitemoehybrid": 0, "nemotron_h": 0}  # that RoPE turns


def measured(family: str, folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Statistics of the layers that have some, of a small model."""
    config = BASE | {"hidden_size": 128, "num_hidden_layers": 2} | HYBRIDS[family](128, 2)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    model.float().save_pretrained(folder)
    with (
        State(folder / "state", {}) as state,
        Model.opened(str(folder), torch.device("cpu"), torch.float32) as opened,
    ):
        collect(opened, tokens(2, 48), FarSet(sink=4, window=8, stride=1), state, lambda count: None)
        layers = range(len(opened.layers))
        return {index: found for index in layers if (found := state.statistics(index).tensors)}


@pytest.mark.parametrize("family", list(PAIRS))
def test_attention_layers_are_measured_and_the_others_left_out(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    original = PlainRun.compare_layer

    def compare_layer(self: PlainRun, number: int, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        compared.append(number)
        original(self, number, run)

    monkeypatch.setattr(PlainRun, "compare_layer", compare_layer)
    found = measured(family, tmp_path)
    assert compared == list(range(3 if family == "nemotron_h" else 2))
    assert list(found) == [1]
    assert len(found[1]["frequency"]) == PAIRS[family]


def test_falcon_h1_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"FalconH1Model does not hand .* cannot be calibrated; .*hadamard"):
        measured("falcon_h1", tmp_path)
