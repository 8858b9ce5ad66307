"""Calibration against brute force, streaming against a whole model, resuming, data formats, model families."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.unit.tiny_models import BASE, FAMILIES, tiny, tokens  # noqa: E402
from vllm_oscar import errors  # noqa: E402
from vllm_oscar.cache_layer import CacheLayer  # noqa: E402
from vllm_oscar.calibrate.__main__ import bits, calibrate, main  # noqa: E402
from vllm_oscar.calibrate.capture import Attention, attention_output, capturing  # noqa: E402
from vllm_oscar.calibrate.data import (  # noqa: E402
    PASSAGE,
    Corpus,
    Sequences,
    builtin_text,
    open_corpus,
    sequences,
    with_returns,
)
from vllm_oscar.calibrate.progress import stage  # noqa: E402
from vllm_oscar.calibrate.search import CLIPS, KEY_GAINS, SAMPLES, search  # noqa: E402
from vllm_oscar.calibrate.solve import Recipe, solve  # noqa: E402
from vllm_oscar.calibrate.statistics import FarSet, LayerStatistics  # noqa: E402
from vllm_oscar.calibrate.streaming import Model, State, collect  # noqa: E402
from vllm_oscar.quantizer import decode  # noqa: E402
from vllm_oscar.rotation import hadamard  # noqa: E402
from vllm_oscar.sidecar import LayerCalibration, ModelFingerprint, Sidecar  # noqa: E402

FAR = FarSet(sink=4, window=8, stride=1)


def brute_force(a: Attention, far: FarSet) -> dict[str, torch.Tensor]:
    """The sums of `aware`, as they are defined."""
    heads, length, size = a.query.shape
    kv_heads, ratio = a.key.shape[0], heads // a.key.shape[0]
    sums = {name: torch.zeros(kv_heads, size, size, dtype=torch.float64)
            for name in ("key_error", "key_second", "value_error", "value_second")}  # fmt: skip
    sums |= {name: torch.zeros(kv_heads, size, dtype=torch.float64) for name in ("key_first", "value_first")}
    sums |= {name: torch.zeros(kv_heads, dtype=torch.float64) for name in ("key_weight", "value_weight")}
    for r in range(heads):
        h = r // ratio
        gram = a.projection[r].T @ a.projection[r]
        for i in range(far.sink + far.window, length):
            raw = a.key[h] @ a.query[r, i] * a.scaling
            logits = raw if a.softcap is None else a.softcap * torch.tanh(raw / a.softcap)
            slope = torch.ones_like(raw) if a.softcap is None else 1 - torch.tanh(raw / a.softcap) ** 2
            allowed = torch.arange(length) <= i if a.mask is None else a.mask[i]
            weights = logits.exp() * allowed
            total = weights.sum() + (0 if a.sinks is None else a.sinks[r].exp())
            p = weights / total
            o = p @ a.value[h]
            for j in range(far.sink, i - far.window + 1):
                u = (p[j] * slope[j]) ** 2 * (a.value[h, j] - o) @ gram @ (a.value[h, j] - o)
                sums["key_error"][h] += u * torch.outer(a.query[r, i], a.query[r, i])
                sums["key_weight"][h] += u
                sums["key_first"][h] += u * a.key[h, j]
                sums["key_second"][h] += u * torch.outer(a.key[h, j], a.key[h, j])
                sums["value_error"][h] += p[j] ** 2 * gram
                sums["value_weight"][h] += p[j] ** 2
                sums["value_first"][h] += p[j] ** 2 * a.value[h, j]
                sums["value_second"][h] += p[j] ** 2 * torch.outer(a.value[h, j], a.value[h, j])
    return sums


def double(a: Attention) -> Attention:
    """The same attention in float64."""
    fields = {name: value.double() for name, value in vars(a).items() if isinstance(value, torch.Tensor)}
    exact = replace(a, **fields | {"mask": a.mask})
    return replace(exact, output=attention_output(exact))


def whole_model(model: Any, ids: torch.Tensor) -> list[list[Attention]]:
    """Attention calls by sequence and layer, from plain forward passes of the whole model."""
    seen: list[list[Attention]] = []
    with torch.inference_mode(), capturing(model.get_decoder().config, lambda a: seen[-1].append(a)):
        for row in ids:
            seen.append([])
            model.get_decoder()(input_ids=row[None], use_cache=False)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral"])
@pytest.mark.parametrize("block", [1 << 21, 1000])
def test_aware_sums_equal_brute_force(family: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_oscar.calibrate.capture.BLOCK_ELEMENTS", block)
    model = tiny(family, num_hidden_layers=1, layer_types=None if family == "llama" else ["sliding_attention"])
    attention = double(whole_model(model, tokens(1, 22))[0][0])
    statistics = LayerStatistics()
    statistics.add(attention, FAR)
    expected = brute_force(attention, FAR)
    assert statistics.tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(statistics.tensors[name], value, rtol=1e-8, atol=1e-12 * float(value.abs().max()))


def test_captured_tensors_are_what_attention_sees() -> None:
    """q and k after RoPE, v, and W_o per head, against the model's own modules."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = tiny("llama", num_hidden_layers=1).double()
    ids = tokens(1, 20)
    attention = whole_model(model, ids)[0][0]
    layer, decoder = model.model.layers[0], model.model
    with torch.inference_mode():
        states = layer.input_layernorm(decoder.embed_tokens(ids))
        q, k, v = (
            projection(states).view(1, 20, -1, 64).transpose(1, 2)
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *decoder.rotary_emb(states, torch.arange(20)[None]))
    torch.testing.assert_close(attention.query, q[0])
    torch.testing.assert_close(attention.key, k[0])
    torch.testing.assert_close(attention.value, v[0])
    merged = torch.einsum("rtd,rhd->th", attention.output, attention.projection)
    with torch.inference_mode():
        torch.testing.assert_close(merged, layer.self_attn.o_proj(attention.output.transpose(0, 1).flatten(1)))


def test_reference_sums_equal_their_definitions() -> None:
    attention = whole_model(tiny("llama", num_hidden_layers=1).double(), tokens(1, 40))[0][0]
    statistics = LayerStatistics()
    statistics.add(attention, None)
    statistics.add(attention, None)
    heads, length, size = attention.query.shape
    for h in range(2):
        own = [r for r in range(heads) if r // 2 == h]
        sigma_k = sum(attention.query[r].T @ attention.query[r] / length for r in own) / len(own)
        key, value = attention.key[h], attention.value[h]
        target = torch.zeros(size, size, dtype=torch.float64)
        for r in own:
            logits = attention.query[r] @ key.T * attention.scaling
            s = logits.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
            target += value.T @ s.T @ s @ value / length / len(own)
        weights = torch.stack([row @ sigma_k @ row for row in key])
        weights = weights * length / weights.sum()
        torch.testing.assert_close(statistics.average("query_covariance")[h], sigma_k)
        torch.testing.assert_close(statistics.average("value_output")[h], target)
        torch.testing.assert_close(
            statistics.average("value_weighted")[h], value.T @ torch.diag(weights) @ value / length
        )
        torch.testing.assert_close(statistics.average("value_plain")[h], value.T @ value / length)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_families_streamed_from_disk(family: str, tmp_path: Path) -> None:
    """Layer by layer from a checkpoint gives what the whole model gives, and the model's own hidden states."""
    model = tiny(family)
    model.save_pretrained(tmp_path / "model")
    ids = tokens(2, 48)
    fingerprint = ModelFingerprint.of(transformers.AutoConfig.from_pretrained(tmp_path / "model"))
    state = State(tmp_path / "state", {})
    with state, Model.opened(str(tmp_path / "model"), torch.device("cpu"), torch.float32) as streamed:
        assert all(parameter.is_meta for layer in streamed.layers for parameter in layer.parameters())
        collect(streamed, ids, FAR, state, lambda count: None)
        assert all(parameter.is_meta for layer in streamed.layers for parameter in layer.parameters())
    expected = [LayerStatistics() for _ in range(3)]
    for calls in whole_model(model, ids):
        for statistics, attention in zip(expected, calls, strict=True):
            statistics.add(attention, FAR)
    for number, statistics in enumerate(expected):
        for name, value in statistics.tensors.items():
            found = state.statistics(number).tensors[name]
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4 * float(value.abs().max()))

    model.set_attn_implementation("eager")
    last: list[torch.Tensor] = []
    model.get_decoder().norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    with torch.inference_mode():
        model.get_decoder()(input_ids=ids[1:], use_cache=False)
    hidden = state.hidden(3, (48, model.config.hidden_size), torch.float32)
    torch.testing.assert_close(hidden.read(1), last[0], rtol=1e-3, atol=1e-3)
    hidden.close()

    recipe = Recipe.of("aware", per="head", group_size=fingerprint.head_size)
    layers = {number: solve(state.statistics(number), recipe)[0] for number in range(3)}
    sidecar = Sidecar(layers, fingerprint, "aware", fingerprint.head_size, 4, 8)
    assert Sidecar.load(_saved(sidecar, tmp_path), fingerprint).layers[2].key.transform.shape[0] == 2


def _saved(sidecar: Sidecar, folder: Path) -> Path:
    sidecar.save(folder / "s.safetensors")
    return folder / "s.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte tokenizer that has BOS, EOS and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def command(checkpoint: Path, out: Path, *more: str) -> list[str]:
    sizes = ["--sequences", "3", "--length", "64", "--sink", "4", "--window", "8"]
    return [str(checkpoint), "--out", str(out), *sizes, "--device", "cpu", "--dtype", "float32", *more]


@pytest.mark.parametrize("method", ["aware", "reference"])
@pytest.mark.parametrize("per", ["head", "layer"])
def test_command_line(checkpoint: Path, tmp_path: Path, method: str, per: str) -> None:
    for name in ("a", "b"):
        assert main(command(checkpoint, tmp_path / name, "--method", method, "--per", per)) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()  # deterministic
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    sidecar = Sidecar.load(tmp_path / "a", ModelFingerprint.of(transformers.AutoConfig.from_pretrained(checkpoint)))
    assert (sidecar.method, sidecar.per, sidecar.sink, sidecar.window) == (method, per, 4, 8)
    assert sidecar.metadata["sequences"] == 3
    assert sidecar.metadata["tokens"] == 192
    layer = sidecar.layers[0]
    assert torch.equal(layer.key.transform[0], layer.key.transform[1]) == (per == "layer")
    encoders = {"aware": ("metric", 1.0375, "ls", 1.10), "reference": ("minmax", 1.0, "minmax", 1.0)}[method]
    assert (layer.key.encoder, layer.key.gain, layer.value.encoder, layer.value.gain) == encoders
    assert (layer.key.clip, layer.value.clip) == ((1.0, 1.0) if method == "aware" else (0.96, 0.92))
    assert (layer.key.mean.abs().max() > 0) == (method == "aware")


def test_command_line_says_what_is_wrong(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(checkpoint, tmp_path / "a", "--length", "12")) == 1
    assert "--length above sink + window = 12" in capsys.readouterr().err
    assert main(command(checkpoint, tmp_path / "a", "--data", str(tmp_path / "none"))) == 1
    assert "no such file" in capsys.readouterr().err
    assert main(command(checkpoint, tmp_path / "a", "--group-size", "48")) == 1
    assert "group_size 48" in capsys.readouterr().err
    assert main(command(checkpoint, tmp_path / "a", "--key-encoder", "minmax", "--key-gain", "1.1")) == 1
    assert "leave --key-gain out, or use --key-encoder ls" in capsys.readouterr().err
    monkeypatch.setattr("transformers.utils.is_accelerate_available", lambda: False)
    assert main(command(checkpoint, tmp_path / "a")) == 1
    assert "pip install 'vllm-oscar[calibrate]'" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_layers_without_known_frequencies_are_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their keys hold for the sequences' length only; nothing is said where the whole context is no longer."""
    monkeypatch.setattr("vllm_oscar.calibrate.streaming.turning_frequencies", lambda *given: None)

    def said() -> list[str]:
        # an engine that was here before may have something to say as well
        ours = [record for record in caplog.records if record.name.startswith("vllm_oscar")]
        return [text for record in ours if "guessing" not in (text := record.getMessage().split(":")[0])]

    with caplog.at_level("WARNING"):
        assert main([*command(checkpoint, tmp_path / "short"), "--context", "10"]) == 0
        assert not said()
        assert main([*command(checkpoint, tmp_path / "long"), "--context", "4096"]) == 0
    assert said() == ["no fixed RoPE frequencies were found for layers [0, 1, 2]"]


def test_killed_runs_go_on(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill at any (sequence, layer) loses at most that layer, and the result is the same file."""
    assert main(command(checkpoint, tmp_path / "undisturbed")) == 0
    plain = LayerStatistics.add
    passes: list[int] = []
    limit = 0

    def add(
        self: LayerStatistics, attention: Attention, far: FarSet | None, frequency: torch.Tensor | None
    ) -> torch.Tensor | None:
        if len(passes) == limit:
            raise KeyboardInterrupt
        passes.append(1)
        return plain(self, attention, far, frequency)

    monkeypatch.setattr(LayerStatistics, "add", add)
    for limit in (0, 2, 5, 4):  # noqa: B007
        passes.clear()
        with pytest.raises(KeyboardInterrupt):
            main(command(checkpoint, tmp_path / "killed"))
        assert (tmp_path / "killed.state" / "job.json").exists()
        assert not (tmp_path / "killed").exists()
    limit = 99
    passes.clear()
    assert main(command(checkpoint, tmp_path / "killed")) == 0
    assert len(passes) < 9  # of 3 layers x 3 sequences: finished layers are not done again
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "undisturbed").read_bytes()
    assert not (tmp_path / "killed.state").exists()


GEMMA3N = {
    "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16, "activation_sparsity_pattern": [0.0] * 3,
    "num_kv_shared_layers": 1, "laurel_rank": 8, "altup_num_inputs": 2, "intermediate_size": [64] * 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 20,
}  # fmt: skip
TOKENS = {"vocab_size": 300, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
GPT2 = TOKENS | {"n_layer": 1, "n_head": 2, "n_embd": 128}
FALCON = TOKENS | {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 128}


@pytest.mark.parametrize(("kind", "options"), [("gemma3n_text", BASE | GEMMA3N), ("gpt2", GPT2), ("falcon", FALCON)])
def test_models_whose_layers_cannot_be_run_one_by_one_are_refused(
    kind: str, options: dict[str, Any], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    config = transformers.AutoConfig.for_model(kind, **options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    assert main(command(model, tmp_path / "a", "--tokenizer", str(checkpoint))) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "cannot be calibrated; serve it without calibration" in line and '"rotation": "hadamard"' in line
    assert not (tmp_path / "a").exists()


def test_layers_that_are_called_with_more_of_each_text_are_refused(tmp_path: Path) -> None:
    """By name, too: the first sequence's calls serve for all others."""
    model = tiny("llama").get_decoder()
    layers, plain = Model(model, torch.device("cpu")), model.forward

    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        return plain(input_ids=input_ids, per_layer_input=model.embed_tokens(input_ids), **options)

    model.forward = forward
    with State(tmp_path / "state", {}) as state, pytest.raises(errors.UnsupportedError, match="more of each text"):
        collect(layers, tokens(2, 48), FAR, state, lambda count: None)


def test_a_model_without_attention_to_look_at_leaves_no_sidecar(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm_oscar.calibrate.streaming.capturing", lambda config, observe: nullcontext())
    assert main(command(checkpoint, tmp_path / "a")) == 1
    assert "has no attention" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def remote_code(folder: Path) -> None:
    """A model whose configuration is code of its own."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


def broken_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (remote_code, "--trust-remote-code"),
        (no_tokenizer, "its tokenizer cannot be read"),
        (broken_weights, "its weights cannot be read"),
    ],
)
def test_checkpoints_that_cannot_be_read_say_what_to_do(
    fault: Callable[[Path], None], says: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    fault(tmp_path / "model")
    assert main(command(tmp_path / "model", tmp_path / "a")) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert says in line
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("GatedRepoError", "accept its terms on https://huggingface.co/org/gated and log in (hf auth login"),
        ("RepositoryNotFoundError", "neither a folder nor a repository"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
    ],
)
def test_models_of_the_hub_that_cannot_be_read_say_what_to_do(
    reason: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import errors as hub

    def unreadable(name: str, **options: Any) -> Any:
        kind = getattr(hub, reason)
        raise OSError("You cannot have it.\nA screen full of text.") from kind.__new__(kind)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreadable)
    assert main(command(Path("org/gated"), tmp_path / "a")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: org/gated: ") and says in line


def test_a_tokenizer_of_another_folder(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    no_tokenizer(tmp_path / "model")
    assert main(command(tmp_path / "model", tmp_path / "a", "--tokenizer", str(checkpoint))) == 0


def test_two_calibrations_do_not_share_a_state(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    """Neither of the same job nor of another: each would read what the other writes."""
    folder = tmp_path / "a.state"
    with State(folder, {"data": 1}) as state:
        state.finish(-1)
        for data in (1, 2):
            with pytest.raises(errors.ConfigError, match="another calibration is at work"):
                State(folder, {"data": data})
        assert main(command(checkpoint, tmp_path / "a")) == 1
        assert "wait for it, or take another --out" in capsys.readouterr().err
        assert state.done == 0 and (folder / "job.json").exists()
    assert main(command(checkpoint, tmp_path / "a")) == 0
    assert not folder.exists()


def killed_after_one_layer(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    finish = State.finish

    def killed(self: State, layer: int, *rest: Any) -> None:
        finish(self, layer, *rest)
        if layer == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(State, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_goes_on_over_the_same_weights_only(
    replaced: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that is replaced in between, by one of the same names and sizes, is calibrated anew."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    killed_after_one_layer(monkeypatch, command(model, tmp_path / "a"))
    if replaced:
        file = model / "model.safetensors"
        weights = {name: -tensor if "v_proj" in name else tensor for name, tensor in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})
    with caplog.at_level("INFO"):
        assert main(command(model, tmp_path / "a")) == 0
    assert ("going on after 1 layers" in caplog.text) != replaced
    assert main(command(model, tmp_path / "anew")) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "anew").read_bytes()


def test_weights_that_change_under_a_run_leave_no_sidecar(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    finish = State.finish

    def replacing(self: State, layer: int, *rest: Any) -> None:
        finish(self, layer, *rest)
        if layer == 2:
            save_file(load_file(model / "model.safetensors"), model / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(State, "finish", replacing)
    assert main(command(model, tmp_path / "a")) == 1
    assert "was changed while it was calibrated" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def output_error(a: Attention, layer: LayerCalibration, far: FarSet) -> float:
    """Squared error of the attention's projected output, pair by pair, over keys and values that `layer` stored."""
    codecs = CacheLayer.of(layer, 16, 64, torch.bfloat16)
    stored = []
    for codec, rows in ((codecs.key, a.key), (codecs.value, a.value)):
        e = codec.encode(codec.transform.forward(rows.transpose(0, 1)).bfloat16())
        stored.append(codec.transform.backward(decode(e.codes, e.scale, e.offset)).transpose(0, 1).double())
    total = 0.0
    ratio = a.query.shape[0] // a.key.shape[0]
    for i in far.queries(a.key.shape[1]).tolist():
        wrong = torch.zeros(a.projection.shape[1], dtype=torch.float64)
        for r in range(a.query.shape[0]):
            key, value = a.key[r // ratio].double().clone(), a.value[r // ratio].double().clone()
            old = slice(far.sink, i - far.window + 1)
            outputs = []
            for _ in range(2):
                p = (key[: i + 1] @ a.query[r, i].double() * a.scaling).softmax(0)
                outputs.append(p @ value[: i + 1])
                key[old], value[old] = stored[0][r // ratio, old], stored[1][r // ratio, old]
            wrong += a.projection[r].double() @ (outputs[1] - outputs[0])
        total += float(wrong.square().sum())
    return total


@pytest.mark.parametrize("method", ["aware", "reference"])
def test_searched_gains_and_clips_leave_the_least_output_error(method: str) -> None:
    """Against the error by its definition, for settings around the ones found."""
    attention = whole_model(tiny("llama", num_hidden_layers=1), tokens(1, 70))[0][0]
    statistics = LayerStatistics()
    statistics.add(attention, FAR if method == "aware" else None)
    layer, _ = solve(statistics, Recipe.of(method, per="head", group_size=64))
    found = {name: float(value) for name, value in search(layer, [attention], FAR, 64).items()}

    def error(**settings: float) -> float:
        parts = {"key": layer.key, "value": layer.value}
        for name, value in (found | settings).items():
            tensor, _, setting = name.partition("_")
            parts[tensor] = replace(parts[tensor], **{setting: value})
        return output_error(attention, LayerCalibration(**parts), FAR)

    best = error()
    if method == "aware":
        assert found.keys() == {"key_gain", "value_gain"}
        others = [error(key_gain=gain) for gain in KEY_GAINS[::2]]
        others += [error(value_gain=found["value_gain"] + step) for step in (-0.05, 0.05)]
    else:
        assert found.keys() == {"key_clip", "value_clip"}
        others = [error(value_clip=clip) for clip in CLIPS]
    assert best <= 1.01 * min(others)  # the search leaves out the rounding of stretched scales to fp16
    assert best < 0.99 * max(others)


def test_search_on_the_command_line_survives_a_kill(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--search", "--sequences", str(SAMPLES + 1))
    assert main(command(checkpoint, tmp_path / "a", *more)) == 0
    calls: list[int] = []

    def killed(layer: LayerCalibration, samples: list[Attention], *rest: Any) -> dict[str, torch.Tensor]:
        calls.append(len(samples))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return search(layer, samples, *rest)

    monkeypatch.setattr("vllm_oscar.calibrate.__main__.search", killed)
    with pytest.raises(KeyboardInterrupt):
        main(command(checkpoint, tmp_path / "b", *more))
    assert main(command(checkpoint, tmp_path / "b", *more)) == 0
    assert calls == 4 * [SAMPLES]  # three layers, one of them twice; no more samples than that in memory
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    layers = Sidecar.load(tmp_path / "a").layers.values()
    assert all(layer.key.gain in KEY_GAINS for layer in layers)
    assert len({layer.value.gain for layer in layers}) == 3


def test_a_state_of_another_job_is_not_used(tmp_path: Path) -> None:
    with State(tmp_path / "s", {"data": 1}) as state:
        state.finish(-1)
        state.finish(0, LayerStatistics({"a": torch.zeros(1)}))
    for data, done in ((1, 1), (2, -1), (1, -1)):
        with State(tmp_path / "s", {"data": data}) as state:
            assert state.done == done


def test_heads_that_read_no_int2_get_hadamard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sliding window narrower than sink + window leaves F empty, and nothing to search gains with."""
    tiny("mistral", sliding_window=8).save_pretrained(tmp_path / "m")
    fingerprint = ModelFingerprint.of(transformers.AutoConfig.from_pretrained(tmp_path / "m"))
    recipe = Recipe.of("aware", per="head", group_size=64, search=True)
    data = Sequences.of(tokens(2, 40), "random")
    with (
        caplog.at_level("INFO"),
        State(tmp_path / "state", {}) as state,
        Model.opened(str(tmp_path / "m"), torch.device("cpu"), torch.float32) as model,
    ):
        sidecar = calibrate(model, fingerprint, data, recipe, FAR, state)
    tensor = sidecar.layers[1].key
    assert torch.equal(tensor.transform[1], hadamard(64).float())
    assert not tensor.mean.any()
    assert tensor.gain == recipe.settings("k")["gain"]
    assert "layer 1: plain Hadamard for keys of heads [0, 1]" in caplog.text
    sidecar.save(tmp_path / "s")


def test_recipes() -> None:
    assert Recipe.of("aware", "ls", per="head", group_size=64).settings("k") == {
        "encoder": "ls", "gain": 1.10, "clip": 1.0, "bits": 2,
    }  # fmt: skip
    more = Recipe.of("aware", per="head", group_size=64, key_bits=3, value_bits=4)
    assert [more.settings(letter)["bits"] for letter in "kv"] == [3, 4]
    # what is stored with more bits shrinks less
    two = Recipe.of("aware", per="head", group_size=64)
    assert all(1 < more.settings(letter)["gain"] < two.settings(letter)["gain"] for letter in "kv")
    assert bits("k3v2") == (3, 2, None)
    for odd in ("k3", "3,2", "k3v2x", "auto"):
        with pytest.raises(errors.ConfigError, match="--bits"):
            bits(odd)
    assert Recipe.of("reference", "metric", per="head", group_size=64).settings("k")["gain"] == 1.0
    with pytest.raises(errors.ConfigError, match="metric"):
        Recipe.of("aware", None, "metric", per="head", group_size=64)


class Letters:
    """A tokenizer whose tokens are characters."""

    chat_template = "yes"
    bos_token_id: int | None = None
    eos_token_id = 0

    def __call__(self, text: str, **options: Any) -> Any:
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


class WithBos(Letters):
    bos_token_id = 1

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        ids = [1] * add_special_tokens + [ord(letter) for letter in text]
        return type("Encoding", (), {"input_ids": ids})


def read(path: Path, length: int = 4) -> str:
    data = sequences(replace(open_corpus(str(path), Letters()), shuffle=False), Letters(), 99, length, 0)
    return "".join(map(chr, data.ids.flatten().tolist()))


def test_data_formats(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcd\nefg")
    assert read(tmp_path / "a.txt") == "abcd\nefg"
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n\n{"text": "defg"}\n')
    assert read(tmp_path / "a.jsonl") == "abc\0defg"
    chat = [{"role": "u", "content": "hi"}, {"role": "a", "content": "yo"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    assert read(tmp_path / "b.jsonl") == "<u>hi<a>"
    for name, content in {"c.jsonl": "{", "d.jsonl": '{"x": 1}', "e.jsonl": "[]", "f.jsonl": '{"text": 3}'}.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(errors.ConfigError, match=name):
            read(tmp_path / name)
    (tmp_path / "g.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(errors.ConfigError, match="UTF-8"):
        read(tmp_path / "g.txt")
    (tmp_path / "h.txt").write_text("abc")
    with pytest.raises(errors.ConfigError, match="3 tokens"):
        read(tmp_path / "h.txt")


def test_parquet(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["abc", "defg"], "other": [1, 2]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == "abc\0defg"


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(errors.ConfigError, match="pip install pyarrow"):
        read(tmp_path / "a.parquet")


def test_datasets_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(errors.ConfigError, match="pip install datasets"):
        read(Path("owner/name"))
    calls: list[Any] = []

    def load_dataset(name: str, **options: Any) -> Any:
        calls.append((name, options))
        return iter([{"text": "abc"}, {"text": "defg"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read(Path("owner/name")) == "abc\0defg"
    assert calls == [("owner/name", {"split": "train", "streaming": True})]

    def offline(name: str, **options: Any) -> Any:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(errors.ConfigError, match="offline"):
        read(Path("owner/name"))
    with pytest.raises(errors.ConfigError, match="no such file"):
        read(Path("/owner/name"))


def test_sequences_are_drawn_by_seed_and_start_with_bos() -> None:
    text = "".join(map(chr, range(100, 400)))
    draw: Callable[[int, bool], Sequences] = lambda seed, shuffle: sequences(  # noqa: E731
        Corpus("c", [text], separate=False, shuffle=shuffle), WithBos(), 5, 11, seed
    )
    assert draw(0, True).digest == draw(0, True).digest != draw(1, True).digest
    assert draw(0, True).ids.shape == (5, 11)
    assert (draw(0, True).ids[:, 0] == 1).all()
    first = draw(3, False).ids
    assert torch.equal(first[:, 1:].flatten(), torch.arange(100, 150))


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_builtin_splits_share_no_paragraph(kind: Any) -> None:
    parts = {}
    for split, windows in (("calibration", 12), ("held_out", 8)):
        text = builtin_text(split, kind)
        assert len(text) > windows * 2048 * 4.3  # characters to a token of English prose, 4.1 with SmolLM2's vocabulary
        parts[split] = {" ".join(paragraph.split()).lower() for paragraph in text.split("\n\n")}
    assert not (parts["calibration"] & parts["held_out"]) - {""}


MEASURE = """
import sys
from vllm_oscar.calibrate.__main__ import main
assert main(sys.argv[1:]) == 0
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


def test_peak_memory_is_one_layer_and_one_sequence(checkpoint: Path, tmp_path: Path) -> None:
    """Four times the layers and the sequences: 125 MB more of parameters, none of it resident."""
    peaks = []
    for layers, count in ((2, 2), (8, 8)):
        folder = tmp_path / str(layers)
        model = tiny("llama", num_hidden_layers=layers, hidden_size=768, intermediate_size=2048)
        model.save_pretrained(folder)
        layer_bytes = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
        for file in checkpoint.glob("token*"):
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "chat_template.jinja").write_bytes((checkpoint / "chat_template.jinja").read_bytes())
        del model
        arguments = command(folder, tmp_path / "s", "--sequences", str(count), "--length", "128")
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        peaks.append(1024 * int(done.stdout.split()[-1]))
    assert layer_bytes > 15e6
    assert peaks[1] - peaks[0] < 2 * layer_bytes, peaks


def test_progress_is_two_lines_where_nobody_watches(caplog: pytest.LogCaptureFixture) -> None:
    """What an earlier run had done counts as done, not as fast."""
    caplog.set_level("INFO", logger="vllm_oscar.calibrate")
    with stage(90, "layer passes") as advance:
        advance(30)
        for _ in range(60):
            advance(1)
    estimate, end = caplog.messages
    assert estimate.startswith("35 of 90 layer passes done, about ") and estimate.endswith(" s left")
    assert end.startswith("90 layer passes in ")


def test_every_other_sequence_says_its_first_half_again() -> None:
    text = torch.arange(1000, 1000 + 4 * 601).view(4, 601)
    text[:, 0] = 1
    data = with_returns(Sequences.of(text, "text"), WithBos())
    assert data.digest != Sequences.of(text, "text").digest
    assert torch.equal(data.ids[::2], text[::2])
    for row, plain in zip(data.ids[1::2, 1:], text[1::2, 1:], strict=True):
        said, again = row[:512].view(2, 4, PASSAGE)
        assert torch.equal(row[512:], plain[512:])
        assert sorted(said.tolist()) == sorted(again.tolist())
        assert torch.equal(said[:3].flatten(), plain[:192])
        assert ((said[3] < 128) & (said[3] > 1)).all()  # letters and digits
    assert (data.ids[:, 0] == 1).all() and (data.ids[:, 1:] != 1).all()
    assert not torch.equal(data.ids[1::2, 1:257], data.ids[1::2, 257:513]), "in another order"
    assert not torch.equal(data.ids[1, 193:257], data.ids[3, 193:257]), "other strings in each"
    for few in (text[:1], text[:, :512]):
        with pytest.raises(errors.ConfigError, match="--sequences 2 and --length 513"):
            with_returns(Sequences.of(few, "few"), WithBos())
