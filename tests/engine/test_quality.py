"""What INT2 costs in quality, through the real engine and forced through its cache, against others' settings."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_oscar import cli
from vllm_oscar.evaluation.codecs import min_max
from vllm_oscar.evaluation.engine import CHUNK, Engine, forced_through_cache
from vllm_oscar.evaluation.generation import divergence
from vllm_oscar.evaluation.measure import Result, running
from vllm_oscar.evaluation.methods import Method, parse
from vllm_oscar.evaluation.needle import DEPTHS
from vllm_oscar.evaluation.report import table
from vllm_oscar.evaluation.windows import held_out
from vllm_oscar.sidecar import ModelFingerprint, Sidecar

pytestmark = pytest.mark.engine

WINDOWS, CONTEXT = 1, 2048
SINK, WINDOW = 64, 256


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
        "--sequences", 1, "--out", reference,
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

    Measured on 6 windows of 2,048 tokens: 0.0060, 0.140 and 1.38, with standard errors of 0.0005, 0.012 and 0.04
    (docs/quality.md). The bounds leave two thirds as much again of the KL and twice the ratios: other rounding does not
    cross them, a defect of a transform, an encoder or the window does.
    """
    default, reference, naive = (quality[name] for name in ("oscar", "reference", "naive"))
    assert {default["bits"], reference["bits"], naive["bits"]} == {2.5}
    assert default["kl"] <= 0.010
    assert default["kl"] <= 0.1 * reference["kl"]
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
    BF16 sums in another order: measured 0.0014, a sixth of what INT2 costs, and 0 on another processor; the bound is
    twice that.
    """
    from transformers import AutoTokenizer

    context, first = 640, 512
    windows = held_out(AutoTokenizer.from_pretrained(model_path), "prose", 2, context)

    steps: list[int] = []

    def recorded(engine: Engine) -> torch.Tensor:
        def count(worker: Any) -> Any:
            return worker.model_runner.get_model().register_forward_pre_hook(lambda *inputs: steps.append(1))

        steps.clear()
        handle = engine.llm.collective_rpc(count)[0]
        hidden = engine.record(windows)
        handle.remove()
        return hidden

    with forced_through_cache(str(model_path), "auto", context, chunk=16, concurrent=2) as engine:
        small = recorded(engine)
        assert len(steps) == context // 16
    with forced_through_cache(str(model_path), "auto", context, chunk=128, concurrent=1) as engine:
        large = recorded(engine)
        assert len(steps) == 2 * context // 128
        scores = engine.compare(windows, large, small, first).summary()
        swapped = engine.compare(windows, large, small.flip(0), first).summary()
    assert scores["kl"] < 0.003
    assert scores["top1"] > 0.97
    assert swapped["kl"] > 1


class PlainInt2:
    """What the method `naive` stores, as a codec."""

    tokens = 1

    def bits(self, head_size: int) -> float:
        return 2 + 32 / head_size

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        return min_max(rows, 2)

    values = keys


def test_an_emulated_cache_reads_as_the_pages_do(model_path: Path, sidecar_path: Path) -> None:
    """Naive INT2 once in OSCAR's pages and once put into vLLM's BF16 cache, where its values are rounded to BF16.

    Measured: 0.071 nats apart, both 0.9 from BF16. Naive INT2 makes much of any rounding; a row that is rewritten in
    the wrong place or step would be as far from the pages as BF16 is.
    """
    from transformers import AutoTokenizer

    context = 640
    windows = held_out(AutoTokenizer.from_pretrained(model_path), "prose", 2, context)
    own = Sidecar.load(sidecar_path)
    with running(str(model_path), parse("naive", own), context) as engine:
        pages = engine.record(windows)
    with running(str(model_path), Method.emulated("naive", PlainInt2(), own), context) as engine:
        emulated = engine.record(windows)
        scores = engine.compare(windows, pages, emulated, first=512).summary()
    assert scores["kl"] < 0.15


@pytest.fixture
def tiny(tiny_model: Callable[[Mapping[str, Any]], Path], model_path: Path) -> Path:
    """A model with random weights, the real one's tokenizer and a sidecar."""
    from transformers import AutoConfig

    model = tiny_model({"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192})
    for file in model_path.glob("*token*"):
        shutil.copy(file, model)
    shutil.copy(model_path / "chat_template.jinja", model)
    sidecar = model / "oscar" / "rotations.safetensors"
    Sidecar.hadamard(ModelFingerprint.of(AutoConfig.from_pretrained(model))).save(sidecar)
    return model


def test_needles_and_answers_of_every_method_in_one_report(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model finds nothing, but it is asked everything, over BF16 and over INT4."""
    out = tmp_path / "rows.jsonl"
    options = (
        "--windows 0 --needle 1024 --keys 1024 --copy 2048 --trials 1 --generate 2 --tokens 4 --methods int4 --json"
    )
    assert cli.main(["eval", str(tiny), *options.split(), "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["texts"] == []
    cells = [(c["method"], c["kind"], c["length"], c["depth"], c["asked"]) for c in report["needles"]]
    assert [cell for cell in cells if cell[1] in ("needle", "keys")] == [
        (name, kind, 1024, depth, 1) for name in ("bf16", "int4") for kind in ("needle", "keys") for depth in DEPTHS
    ]
    copied = [(c["method"], c["kind"], c["back"]) for c in report["needles"] if c["length"] == 2048]
    assert copied == [(name, kind, 700) for name in ("bf16", "int4") for kind in ("uuid", "digits", "name")]
    # random weights: of 49,152 tokens each is as likely as any other, and a number has five
    log_p = [c["log_p"] / 5 for c in report["needles"] if c["kind"] == "needle"]
    assert log_p == pytest.approx([-math.log(49152)] * 8, abs=1.5)
    assert [(one["method"], one["bits"], one["prompts"], one["tokens"]) for one in report["answers"]] == [
        ("bf16", 16.0, 2, 4), ("int4", 4.5, 2, 4),
    ]  # fmt: skip
    for one in report["answers"]:
        assert 0 <= one["agreed"] <= 4
        assert all(0 <= kl < 1 for kl in one["kl"])  # of tokens alone
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    assert rows == [{"part": part} | row for part in ("needles", "answers") for row in report[part]]


def test_a_forced_answer_is_scored_as_if_it_had_been_read(tiny: Path) -> None:
    """Answers given token by token, two side by side, against the same tokens as one prompt; and a free answer."""
    ids = torch.randint(0, 49152, (2, 60), generator=torch.Generator().manual_seed(6))
    prompts, given = ids[:, :40].tolist(), ids[:, 40:].tolist()
    with forced_through_cache(str(tiny), "auto", context=64, chunk=16, concurrent=2) as engine:
        answers = engine.answer(prompts, 20, given)
        whole = engine.record(ids)
        for number, answer in enumerate(answers):
            log_p, likeliest = engine.log_probabilities(answer)
            logits = engine.logits(whole[number, 39:59]).float().log_softmax(-1)
            expected = logits.gather(-1, ids[number, 40:, None])[:, 0]
            assert answer.ids == given[number]
            assert torch.allclose(log_p, expected, atol=0.02)  # BF16 in other batches: 8 bits
            assert expected.std() > 0.1  # another row would be seen
            assert not likeliest.any()
        reread = engine.reread(prompts, given)
        for answer, states in zip(answers, reread, strict=True):
            assert divergence(engine, answer, states).max() < 1e-3
            assert divergence(engine, answer, states.roll(1, 0)).min() > 0.01
        free = engine.answer(prompts, 20)
        assert all(len(answer.ids) == len(answer.hidden) == 20 and not answer.ended for answer in free)
        assert all(engine.log_probabilities(answer)[1].all() for answer in free)  # greedy
