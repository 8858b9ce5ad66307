"""Drift: how far a text is from what a sidecar was calibrated on."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from vllm_oscar.calibrate.__main__ import calibrate  # noqa: E402
from vllm_oscar.calibrate.data import Sequences  # noqa: E402
from vllm_oscar.calibrate.solve import Recipe  # noqa: E402
from vllm_oscar.calibrate.statistics import FarSet  # noqa: E402
from vllm_oscar.calibrate.streaming import Model, State  # noqa: E402
from vllm_oscar.evaluation.drift import RECALIBRATE, Drift, drifts  # noqa: E402
from vllm_oscar.sidecar import ModelFingerprint, Sidecar  # noqa: E402

CONFIG = {
    "vocab_size": 300, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "initializer_range": 0.2,
    "dtype": "bfloat16",
}  # fmt: skip
SINK, WINDOW = 4, 8


def tokens(low: int, high: int, seed: int) -> torch.Tensor:
    """Two windows of 96 random tokens of a part of the vocabulary."""
    return torch.randint(low, high, (2, 96), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **CONFIG)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    return folder


def sidecar(model: Path, folder: Path, method: str = "aware") -> Sidecar:
    """Calibrated on tokens below 30."""
    fingerprint = ModelFingerprint.of(transformers.AutoConfig.from_pretrained(model))
    recipe = Recipe.of(method, per="head", group_size=64)
    data = Sequences.of(tokens(0, 30, 1), "below 30")
    with (
        State(folder / "state", {"method": method}) as state,
        Model.opened(str(model), torch.device("cpu"), None) as opened,
    ):
        return calibrate(opened, fingerprint, data, recipe, FarSet(SINK, WINDOW), state)


def test_drift_is_nothing_on_the_calibration_text_and_grows_with_the_distance(model: Path, tmp_path: Path) -> None:
    """Tokens of the calibration, others of the same kind, and a kind that it never saw."""
    texts = {"same": tokens(0, 30, 1), "alike": tokens(0, 30, 2), "strange": tokens(200, 230, 3)}
    same, alike, strange = drifts(str(model), sidecar(model, tmp_path), texts)
    assert same.moved < 1e-6
    assert same.moved < alike.moved < strange.moved
    assert strange.recalibrate
    assert not same.recalibrate


def test_drift_needs_statistics_and_rows_that_are_read_as_int2(model: Path, tmp_path: Path) -> None:
    assert drifts(str(model), sidecar(model, tmp_path, "reference"), {"a": tokens(0, 30, 1)}) == []
    assert drifts(str(model), sidecar(model, tmp_path), {"short": tokens(0, 30, 1)[:, : SINK + WINDOW]}) == []


def test_drift_says_what_to_do() -> None:
    assert "oscar calibrate --data" in str(Drift("a.txt", RECALIBRATE, RECALIBRATE + 0.1))
    assert "the sidecar fits" in str(Drift("a.txt", RECALIBRATE, RECALIBRATE - 0.1))
