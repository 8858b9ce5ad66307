"""What INT2 costs in quality, through the real engine and forced through its cache, against others' settings."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_oscar.evaluation.engine import CHUNK, Engine, forced_through_cache
from vllm_oscar.evaluation.measure import Result
from vllm_oscar.evaluation.report import table
from vllm_oscar.evaluation.windows import held_out

pytestmark = pytest.mark.engine

WINDOWS, CONTEXT = 2, 2048
SINK, WINDOW = 64, 256
SEQUENCES = 12  # of calibration, as the sidecar of conftest.py


def oscar(*arguments: object) -> str:
    """Run `oscar` in a process of its own; what it prints to standard output. Its progress is pytest's to show."""
    command = [sys.executable, "-m", "vllm_oscar.cli", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(scope="module")
def quality(model_path: Path, sidecar_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`oscar eval` of the default, of the paper's settings and of naive INT2 on text that no calibration saw."""
    reference = tmp_path_factory.mktemp("quality") / "reference.safetensors"
    oscar(
        "calibrate", model_path, "--method", "reference", "--per", "layer",
        "--sequences", SEQUENCES, "--out", reference,
    )  # fmt: skip
    printed = oscar(
        "eval", model_path, "--sidecar", sidecar_path, "--windows", WINDOWS, "--context", CONTEXT,
        "--methods", "oscar", f"reference={reference}", "naive", "--json",
    )  # fmt: skip
    results = json.loads(printed)["texts"]
    print(table([Result(**result) for result in results]))
    return {result["method"]: result for result in results}


def test_quality_at_two_and_a_half_bits(quality: dict[str, Any]) -> None:
    """The acceptance numbers: the prototype had KL 0.0078, 0.129 and 1.36 on other text.

    Measured on 6 windows: 0.0073, 0.137 and 1.38, with standard errors of 0.0005, 0.011 and 0.04 (docs/quality.md);
    the first two have 0.0080. The bounds leave half as much again of the KL, three times and
    nearly twice the ratios: other rounding does not cross them, a defect of a transform, an encoder or the window
    does.
    """
    default, reference, naive = (quality[name] for name in ("oscar", "reference", "naive"))
    assert {default["bits"], reference["bits"], naive["bits"]} == {2.5}
    assert default["kl"] <= 0.012
    assert default["kl"] <= 0.15 * reference["kl"]
    assert reference["kl"] <= 0.2 * naive["kl"]
    # KL and perplexity must tell the same story: 1% of perplexity is 0.01 nats of loss, the size of the KL
    assert abs(default["perplexity_change"]) < 0.02
    assert default["perplexity"] < reference["perplexity"] < naive["perplexity"]


def test_the_cache_was_read_as_int2_by_the_contract(quality: dict[str, Any]) -> None:
    """A step at c tokens reads c stored ones, of which those from the sink to c + 1 - W are INT2: exactly."""
    steps = range(0, CONTEXT, CHUNK)
    int2 = sum(max(0, before + 1 - WINDOW - SINK) for before in steps)
    assert int2 / sum(steps) > 0.7
    for name in ("oscar", "reference", "naive"):
        assert quality[name]["int2_reads"] == pytest.approx(int2 / sum(steps), abs=1e-12)
    assert quality["bf16"]["int2_reads"] is None
    assert quality["bf16"]["kl"] == 0  # the same hidden states


def test_the_measure_itself_does_not_depend_on_the_chunking(model_path: Path) -> None:
    """BF16 against BF16, 16 tokens a step of two requests side by side, and 128 a step of one after the other.

    Rows that went to the wrong window or position would give a KL of several nats. What remains is the rounding of
    BF16 sums in another order: measured 0.0014, a sixth of what INT2 costs; the bound is twice that.
    """
    from transformers import AutoTokenizer

    context, first = 640, 512
    windows = held_out(AutoTokenizer.from_pretrained(model_path), "prose", 2, context)

    def recorded(engine: Engine) -> torch.Tensor:
        return engine.record(windows)

    with forced_through_cache(str(model_path), "auto", context, chunk=16, concurrent=2) as engine:
        small = recorded(engine)
    with forced_through_cache(str(model_path), "auto", context, chunk=128, concurrent=1) as engine:
        large = recorded(engine)
        assert not torch.equal(small, large)  # other sums: the two runs really differed
        scores = engine.compare(windows, large, small, first).summary()
        swapped = engine.compare(windows, large, small.flip(0), first).summary()
    assert scores["kl"] < 0.003
    assert scores["top1"] > 0.97
    assert swapped["kl"] > 1
