"""Scores, recording, methods, reports and the command line, without an engine: test_quality.py has one."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_oscar import cli
from vllm_oscar.cache_layer import CacheLayer
from vllm_oscar.errors import ConfigError, SidecarMismatchError
from vllm_oscar.evaluation import doctor
from vllm_oscar.evaluation.engine import EvaluationError, Recorder
from vllm_oscar.evaluation.inspection import rows
from vllm_oscar.evaluation.measure import Result, measure
from vllm_oscar.evaluation.methods import BUILT_IN, Method, parse
from vllm_oscar.evaluation.metrics import Scores
from vllm_oscar.evaluation.report import line, plot, table
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.quantizer import decode
from vllm_oscar.sidecar import LayerCalibration, ModelFingerprint, Sidecar, TensorCalibration

MODEL = ModelFingerprint("llama", num_layers=2, num_heads=4, num_kv_heads=2, head_size=64, rope={"rope_theta": 1e4})


def calibrated(model: ModelFingerprint = MODEL) -> Sidecar:
    """Some invertible transforms with a metric, as `aware` makes them."""
    d, generator = model.head_size, torch.Generator().manual_seed(0)

    def tensor(encoder: str) -> TensorCalibration:
        metric = torch.eye(d).expand(model.num_kv_heads, -1, -1) if encoder == "metric" else None
        scale = torch.linspace(1, 2, d).diag().expand(model.num_kv_heads, -1, -1)
        mean = torch.randn(model.num_kv_heads, d, generator=generator)
        spectrum = torch.ones(model.num_kv_heads, d).index_fill_(1, torch.tensor([0]), d)
        return TensorCalibration(mean, scale, encoder, gain=1.05, metric=metric, spectrum=spectrum)

    layers = {i: LayerCalibration(tensor("metric"), tensor("ls")) for i in range(model.num_layers)}
    return Sidecar(layers, model, "aware", d, sink=64, window=256)


# ---- scores


def test_scores_of_two_coins() -> None:
    """p = (3/4, 1/4) against q = (1/2, 1/2), and against itself; the constant in the logits does not count."""
    p, q = torch.tensor([[3.0, 1.0]]).log(), torch.tensor([[5.0, 5.0]])
    scores = Scores.of(p, q, torch.tensor([1]))
    # float32: 24 bits on numbers around 1
    assert scores.kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)
    assert scores.loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert scores.reference_loss.item() == pytest.approx(math.log(4), rel=1e-6)
    same = Scores.of(p, p + 7, torch.tensor([0]))
    assert same.kl.item() == pytest.approx(0, abs=1e-7)
    assert same.agrees.item() == 1


def test_agreement_is_about_the_most_likely_token() -> None:
    reference = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0]])
    other = torch.tensor([[0.0, 9.0, 0.0], [2.1, 2.0, 0.0]])
    assert Scores.of(reference, other, torch.tensor([0, 0])).agrees.tolist() == [1, 0]


def test_summary_averages_over_positions_and_errs_over_windows() -> None:
    kl = torch.tensor([[1.0, 3.0], [5.0, 7.0]])  # windows of mean 2 and 6: standard error 2
    scores = Scores(kl, loss=torch.full((2, 2), 2.0), reference_loss=torch.full((2, 2), 1.0), agrees=torch.eye(2))
    summary = scores.summary()
    assert summary["kl"] == 4
    assert summary["kl_error"] == pytest.approx(2)
    assert summary["kl_p99"] == pytest.approx(7 - 0.03 * 2)  # 99% of the way from the first of 4 values to the last
    assert summary["perplexity"] == pytest.approx(math.exp(2))
    assert summary["perplexity_change"] == pytest.approx(math.e - 1)
    assert summary["top1"] == 0.5


def test_scores_join_positions_and_windows() -> None:
    def part(value: float) -> Scores:
        return Scores(*(torch.full((2,), value + i) for i in range(4)))

    joined = Scores.stack([Scores.cat([part(0), part(10)]), Scores.cat([part(20), part(30)])])
    assert joined.kl.tolist() == [[0, 0, 10, 10], [20, 20, 30, 30]]
    assert joined.agrees.tolist() == [[3, 3, 13, 13], [23, 23, 33, 33]]


# ---- recording


class Runner:
    """What Recorder looks at in vLLM's model runner, fed step by step.

    Args:
        windows: prompts of the requests, by name
    """

    def __init__(self, windows: dict[str, torch.Tensor]) -> None:
        self.windows = windows
        self.requests = {name: SimpleNamespace(prompt_token_ids=ids.tolist()) for name, ids in windows.items()}
        self.input_batch: Any = None
        self.query_start_loc: Any = None

    def step(self, recorder: Recorder, *chunks: tuple[str, int, int]) -> None:
        """Run (request, first position, last position + 1) side by side; states are (request number, position)."""
        bounds = [0]
        ids, positions, states = [], [], []
        for name, start, end in chunks:
            bounds.append(bounds[-1] + end - start)
            ids.append(self.windows[name][start:end])
            positions.append(torch.arange(start, end))
            states += [[float(list(self.windows).index(name)), float(at)] for at in range(start, end)]
        # the batch has room for more, and rows are padded
        self.input_batch = SimpleNamespace(num_reqs=len(chunks), req_ids=[name for name, _, _ in chunks])
        self.query_start_loc = SimpleNamespace(np=torch.tensor([*bounds, -1, -1]).numpy())
        padding = torch.zeros(3, dtype=torch.int64)
        inputs = {"input_ids": torch.cat([*ids, padding]).int(), "positions": torch.cat([*positions, padding])}
        recorder(torch.nn.Identity(), (), inputs, torch.tensor([*states, *[[-1.0, -1.0]] * 3]))


def prompts(count: int, context: int) -> torch.Tensor:
    return torch.randint(0, 1000, (count, context), generator=torch.Generator().manual_seed(1))


def test_recorder_sorts_rows_of_any_batching_order() -> None:
    windows = prompts(3, 6)
    runner = Runner({"x-7": windows[2], "a": windows[0], "b": windows[1]})
    recorder = Recorder(runner, windows)
    runner.step(recorder, ("a", 0, 2), ("x-7", 0, 3))
    runner.step(recorder, ("x-7", 3, 4), ("b", 0, 5), ("a", 2, 6))
    runner.step(recorder, ("b", 5, 6))
    runner.step(recorder, ("x-7", 4, 6))
    recorder.check()
    number = recorder.hidden[..., 0]
    assert number.tolist() == [[1] * 6, [2] * 6, [0] * 6]
    assert recorder.hidden[..., 1].tolist() == [[0, 1, 2, 3, 4, 5]] * 3


def test_recorder_gives_equal_windows_a_request_each() -> None:
    windows = prompts(1, 4).expand(2, -1)
    runner = Runner({"a": windows[0], "b": windows[1]})
    recorder = Recorder(runner, windows)
    runner.step(recorder, ("b", 0, 4), ("a", 0, 4))
    recorder.check()
    assert recorder.hidden[..., 0].tolist() == [[1] * 4, [0] * 4]


def test_recorder_refuses_rows_that_are_not_the_windows_tokens() -> None:
    windows = prompts(2, 4)
    runner = Runner({"a": windows[0], "b": windows[1]})
    runner.requests["a"], runner.requests["b"] = runner.requests["b"], runner.requests["a"]  # the order is a lie
    with pytest.raises(EvaluationError, match="not the tokens"):
        runner.step(Recorder(runner, windows), ("a", 0, 4))


@pytest.mark.parametrize("steps", [[("a", 0, 3)], [("a", 0, 4), ("a", 2, 4)]], ids=["missing", "recomputed"])
def test_recorder_refuses_tokens_that_did_not_run_once(steps: list[tuple[str, int, int]]) -> None:
    windows = prompts(1, 4)
    runner = Runner({"a": windows[0]})
    recorder = Recorder(runner, windows)
    for step in steps:
        runner.step(recorder, step)
    with pytest.raises(EvaluationError, match="exactly once"):
        recorder.check()


# ---- methods


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_method_is_a_sidecar_that_can_be_served(name: str, tmp_path: Path) -> None:
    method = parse(name, calibrated())
    assert method.kv_cache_dtype == "oscar"
    assert method.sidecar is not None
    read = method.sidecar.save(tmp_path / "sidecar.safetensors")  # validates by loading
    assert sorted(read.layers) == [0, 1]
    assert (read.sink, read.window, read.group_size) == (64, 256, 64)


def test_methods_differ_in_what_they_claim() -> None:
    own = calibrated()
    layers = {name: parse(name, own).sidecar.layers[0] for name in BUILT_IN}  # type: ignore[union-attr]
    assert layers["oscar"] is own.layers[0]
    cheap = layers["oscar-ls"].key
    assert (cheap.encoder, cheap.gain, cheap.metric) == ("ls", 1.10, None)
    assert cheap.transform is own.layers[0].key.transform
    assert layers["oscar-ls"].value is own.layers[0].value
    assert layers["hadamard"].key.transform.abs().unique().tolist() == [0.125]  # 1/sqrt(64) everywhere
    assert (layers["naive"].key.encoder, layers["naive"].key.clip) == ("minmax", 1.0)


def test_naive_is_min_max_of_the_plain_row() -> None:
    """Against the definition: four evenly spaced values from the row's least to its greatest."""
    sidecar = parse("naive", calibrated()).sidecar
    assert sidecar is not None
    codec = CacheLayer.of(sidecar.layers[0], PageLayout(64, 16), torch.bfloat16).key
    x = torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    encoded = codec.encode(codec.transform.forward(x).bfloat16())
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    expected = low + (high - low) / 3 * ((x - low) / (high - low) * 3).round()
    stored = decode(encoded.codes, encoded.scale, encoded.offset)
    # fp16 scale and offset move every value by up to 2^-11 of 4; a tie may round the other way for a few elements
    away = (stored - expected).abs() > 4 * 2**-10
    assert away.float().mean() < 1e-3


def test_a_file_is_a_method_and_must_be_of_this_model(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    calibrated().save(path)
    method = parse(f"mine={path}", calibrated())
    assert (method.name, method.kv_cache_dtype) == ("mine", "oscar")
    assert method.sidecar is not None
    assert method.sidecar.method == "aware"
    larger = ModelFingerprint("llama", 3, 4, 2, 64, MODEL.rope)
    with pytest.raises(SidecarMismatchError, match="num_layers"):
        parse(f"mine={path}", calibrated(larger))


def test_other_caches_and_unknown_methods() -> None:
    assert parse("fp8", calibrated()) == Method("fp8", "fp8")
    with pytest.raises(ConfigError, match=r"kivi.*hadamard"):
        parse("kivi", calibrated())


def test_windows_without_scored_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to score"):
        next(measure("unused", [], torch.zeros(1, 513, dtype=torch.int64)))


# ---- reports


def result(method: str, kl: float) -> Result:
    return Result(method, 2.5, 0.15, 0.7, kl, 0.001, 0.05, 12.5, 0.031, 0.958, 4, 2048, 512, 60.0)


def test_table_shows_the_numbers() -> None:
    lines = table([result("bf16", 0), result("oscar", 0.00784)]).splitlines()
    assert lines[0].split()[:3] == ["cache", "bits", "INT2"]
    assert lines[3] == line(result("oscar", 0.00784))
    assert lines[3].split() == ["oscar", "2.50", "70.0%", "0.0078", "0.0010", "0.050", "12.500", "+3.10", "95.80"]
    assert len({len(text) for text in lines[:4]}) == 1  # columns line up
    assert lines[-1].startswith("4 windows of 2048 tokens, scored from position 512 on")


def test_results_survive_json() -> None:
    assert Result(**json.loads(json.dumps(asdict(result("oscar", 0.00784))))) == result("oscar", 0.00784)


def test_plot_draws_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "quality.png"
    plot([result("bf16", 0), result("oscar", 0.0078), result("naive", 1.3)], path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# ---- inspect, doctor, the command line


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line sets this for its process; other tests keep their own."""
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def test_inspect_computes_condition_mean_and_spectrum() -> None:
    own = calibrated()
    found = rows(own)
    assert [(row.layer, row.tensor, row.encoder) for row in found] == [
        (0, "k", "metric"), (0, "v", "ls"), (1, "k", "metric"), (1, "v", "ls"),
    ]  # fmt: skip
    assert found[0].condition == pytest.approx(2)  # of diag(1 ... 2)
    assert found[0].mean_norm == pytest.approx(own.layers[0].key.mean.norm(dim=1).max().item())
    # one direction of variance 64 and 63 of variance 1: 64/127 of it, as spread as 127^2 / (64^2 + 63) directions
    assert found[0].first_direction == pytest.approx(64 / 127)
    assert found[0].directions == pytest.approx(127**2 / (64**2 + 63))


def test_inspect_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "s.safetensors", tmp_path / "s.png"
    saved = calibrated().save(path)
    assert cli.main(["inspect", str(path), "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "2 layers, 4 query and 2 KV heads of size 64" in text
    assert len([row for row in text.splitlines() if " metric" in row]) == 2
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert cli.main(["inspect", str(path), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["digest"] == saved.digest
    assert len(described["tensors"]) == 4


def test_a_command_that_fails_says_why_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path / "none")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "no such file" in captured.err


def test_calibrate_is_handed_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["calibrate", "--help"])
    assert ended.value.code == 0
    assert "--value-target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plugins", "status"), [(None, "ok"), ("oscar", "ok"), ("a,oscar", "ok"), ("", "fail"), ("a,oscar2", "fail")]
)
def test_doctor_knows_the_pitfall_of_vllm_plugins(
    plugins: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    found = {finding.what: finding for finding in doctor.environment()}
    assert found["VLLM_PLUGINS"].status == status


def test_doctor_states_memory_with_the_copies_counted() -> None:
    """2 layers of 2 heads: 40 bytes against 256 for a token and head; 8% of the memory may go to BF16 copies."""
    text = doctor.capacity(MODEL, PageLayout(64, 16), pool_share=0.08)
    assert "160 bytes a token" in text
    assert "BF16 1,024" in text
    assert f"{0.92 * 1024 / 160:.2f} times" in text


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 256, "head_dim": 64, "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_doctor_finds_the_sidecar_or_says_how_to_make_one(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig

    monkeypatch.setenv("XDG_CACHE_HOME", str(model_folder / "cache"))
    monkeypatch.delenv("VLLM_OSCAR_CONFIG", raising=False)

    def sidecar() -> doctor.Finding:
        return next(finding for finding in doctor.model(str(model_folder)) if finding.what == "sidecar")

    assert sidecar().status == "fail"
    assert "calibrate" in sidecar().text
    fingerprint = ModelFingerprint.of(AutoConfig.from_pretrained(model_folder))
    calibrated(fingerprint).save(model_folder / "oscar" / "rotations.safetensors")
    assert sidecar().status == "ok"
    assert "method aware" in sidecar().text
    assert "2 of 2 layers" in sidecar().text
    assert cli.main(["doctor", str(model_folder), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["what"] for finding in findings} >= {"vLLM", "sidecar", "memory"}


def test_doctor_fails_where_a_model_cannot_be_served(model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text()) | {"head_dim": 72}
    (model_folder / "config.json").write_text(json.dumps(config))
    (found,) = doctor.model(str(model_folder))
    assert found.status == "fail"
    assert "head size 72" in found.text
