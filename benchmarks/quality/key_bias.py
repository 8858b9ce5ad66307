"""Keys with large biases, as Qwen2 has them: SmolLM2 with a bias on some RoPE pairs, emulated or as a Qwen2 folder.

    python -m benchmarks.quality.key_bias MODEL                                  a table of variants, emulated
    python -m benchmarks.quality.key_bias MODEL --engine [--pairs 31 20 8]       these pairs, through vLLM
    python -m benchmarks.quality.key_bias MODEL --write FOLDER [--pairs 31 20 8] for `oscar calibrate` and `oscar eval`

The bias b is MAGNITUDE times the rms of the head's key channels, with random signs, on both channels of the named pairs
(31 turns slowest, 0 fastest) of every layer and head. Emulated, the cache holds BF16(k + RoPE(b, position)) and what
q meets has RoPE(b, position) taken off again: the model is SmolLM2 still, and only storing the keys becomes harder.
`constant` has a constant mean, the default takes off what turns (calibrate.rope), and `subtracted` stores k itself, as
a cache would that knows b and holds K - RoPE(b, position).

Through vLLM, the sidecar makes the difference: y = (k + RoPE(b, t) - m - m(t)) T is what a cache stores of the keys k
whose mean turns as m(t) - RoPE(b, t), and adding q . (m(t) - RoPE(b, t)) to the logit is what takes the bias off again.

A folder cannot take the bias off the logits. Its queries are divided by MAGNITUDE on these pairs instead, so that
the pair's part of a logit keeps its size; this is another model, with a perplexity of its own.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.emulation import HEAD, Cache, Storage, Stored, line, load, measure
from vllm_oscar.calibrate.capture import Attention, capturing
from vllm_oscar.calibrate.data import open_corpus, sequences
from vllm_oscar.calibrate.refit import Keys, refit
from vllm_oscar.calibrate.solve import Recipe, solve
from vllm_oscar.calibrate.statistics import FarSet, LayerStatistics
from vllm_oscar.evaluation.measure import measure as measure_engine
from vllm_oscar.evaluation.methods import Method
from vllm_oscar.evaluation.windows import held_out
from vllm_oscar.sidecar import MAX_TURNING_PAIRS, LayerCalibration, ModelFingerprint, Sidecar
from vllm_oscar.turning import TurningMean

MAGNITUDE = 50.0
SINK, WINDOW, CONTEXT = 64, 256, 2048
PAIRS = {"slow (31)": [31], "middle (20)": [20], "fast (8)": [8], "all three": [31, 20, 8]}
Biases = list[torch.Tensor]  # of each layer


class BiasedStatistics(LayerStatistics):
    """Statistics of a layer and its keys, and the moments that the keys would have with each of some biases.

    Attributes:
        biased: by the bias's name
        keys: of every sequence, without a bias
    """

    def __init__(self, rotated: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._rotated = rotated  # (KV heads, T, D)
        self.biased = {name: LayerStatistics() for name in rotated}
        self.keys: list[Keys] = []

    def observe(self, attention: Attention, frequency: torch.Tensor) -> None:
        """One sequence."""
        weight = self.add(attention, FarSet(SINK, WINDOW), frequency)
        assert weight is not None
        self.keys.append(Keys(attention.key, weight.float()))

    def _add_moments(self, name: str, rows: torch.Tensor, weight: torch.Tensor) -> None:
        super()._add_moments(name, rows, weight)
        if name == "key":
            for bias, rotated in self._rotated.items():
                self.biased[bias]._add_moments(name, rows + rotated, weight)

    def _add_waves(self, frequency: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
        super()._add_waves(frequency, rows, weight)
        for bias, rotated in self._rotated.items():
            self.biased[bias]._add_waves(frequency, rows + rotated, weight)

    def solved(self, recipe: Recipe, bias: str | None) -> LayerCalibration:
        """With a bias by its name, or none."""
        if bias is None:
            return solve(refit(self, self.keys, recipe), recipe)[0]
        sums = LayerStatistics(self.tensors | self.biased[bias].tensors)
        keys = [Keys(one.rows + self._rotated[bias], one.weight) for one in self.keys]
        return solve(refit(sums, keys, recipe), recipe)[0]


@torch.inference_mode()
def observed(model: Any, ids: torch.Tensor) -> Iterator[tuple[int, Attention]]:
    """Every attention call with its layer, of whole forward passes."""
    for row in ids:
        calls: list[Attention] = []
        with capturing(model.config, calls.append):
            model.get_decoder()(input_ids=row[None], use_cache=False)
        yield from enumerate(calls)


def biases(model: Any, ids: torch.Tensor, pairs: list[int]) -> Biases:
    """b of each layer, float32 (KV heads, D)."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _, attention in observed(model, ids[:1]):
        heads, _, size = attention.key.shape
        rms = attention.key.float().square().mean((1, 2)).sqrt()
        bias = torch.zeros(heads, size)
        for pair in pairs:
            for channel in (pair, pair + size // 2):
                bias[:, channel] = MAGNITUDE * rms * (torch.randint(0, 2, (heads,), generator=generator) * 2 - 1)
        made.append(bias)
    return made


def rotated(model: Any, bias: torch.Tensor) -> torch.Tensor:
    """RoPE(b, position), (KV heads, CONTEXT, D)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = model.get_decoder().rotary_emb(torch.zeros(1), torch.arange(CONTEXT)[None])
    rows = bias[None, :, None].expand(-1, -1, CONTEXT, -1)
    return apply_rotary_pos_emb(rows, rows, cos, sin)[0][0]


def unbiased(calibrated: Sidecar, bias: Biases, frequency: torch.Tensor) -> Sidecar:
    """The sidecar that does to plain keys what `calibrated` does to biased ones (see above).

    Args:
        frequency: float32 (pairs,), radians a token of the model's RoPE
    """

    def without(layer: LayerCalibration, b: torch.Tensor) -> LayerCalibration:
        half = b.shape[-1] // 2
        own = layer.key.turning or TurningMean(torch.empty(0), torch.empty(len(b), 0, 2, 2 * half))
        vectors = dict(zip(own.frequency.tolist(), own.vectors.unbind(1), strict=True))
        for pair in b[:, :half].any(0).nonzero()[:, 0].tolist():
            first, second = b[:, pair], b[:, pair + half]
            turned = torch.zeros(len(b), 2, 2 * half)  # RoPE(b, t), on cos and on sin
            turned[:, 0, pair], turned[:, 0, pair + half] = first, second
            turned[:, 1, pair], turned[:, 1, pair + half] = -second, first
            w = float(frequency[pair])
            vectors[w] = vectors.get(w, torch.zeros_like(turned)) - turned
        turning = TurningMean(torch.tensor(list(vectors)), torch.stack(list(vectors.values()), 1))
        return replace(layer, key=replace(layer.key, turning=turning))

    pairs = zip(calibrated.layers.items(), bias, strict=True)
    return replace(calibrated, layers={index: without(layer, b) for (index, layer), b in pairs})


def compare(
    model: Any, tokenizer: Any, windows: int, count: int, kinds: dict[str, list[int]], name: str | None
) -> None:
    """Print the table.

    Args:
        kinds: pairs with a bias, by name
        name: of the model's folder, to run it through vLLM
    """
    ids = sequences(open_corpus(None, tokenizer), tokenizer, count, CONTEXT, 0).ids
    made = {kind: biases(model, ids, pairs) for kind, pairs in kinds.items()}
    turned = {kind: [rotated(model, b) for b in bias] for kind, bias in made.items()}
    layers = range(model.config.num_hidden_layers)
    sums = [BiasedStatistics({kind: by_layer[layer] for kind, by_layer in turned.items()}) for layer in layers]
    frequency = model.get_decoder().rotary_emb.inv_freq.float()
    for layer, attention in observed(model, ids):
        sums[layer].observe(attention, frequency)
    fingerprint = ModelFingerprint.of(model.config)
    recipe = Recipe.of("aware", per="head", group_size=fingerprint.head_size)

    def sidecar(bias: str | None = None, pairs: int = MAX_TURNING_PAIRS) -> Sidecar:
        own = replace(recipe, turning_pairs=pairs)
        solved = {layer: one.solved(own, bias) for layer, one in enumerate(sums)}
        return Sidecar(solved, fingerprint, "aware", fingerprint.head_size, SINK, WINDOW)

    plain = sidecar()
    text = held_out(tokenizer, "prose", windows, CONTEXT)
    print(f"prose, {windows} windows, bias {MAGNITUDE:g} x rms, calibrated on {len(ids)} sequences\n{HEAD}", flush=True)
    if name:
        methods = [Method.of_sidecar("no bias", plain)]
        for kind, bias in made.items():
            for label, most in (("constant", 0), ("the default", MAX_TURNING_PAIRS)):
                seen = unbiased(sidecar(kind, most), bias, frequency)
                methods.append(Method.of_sidecar(f"{kind}: {label}", seen))
        for run in measure_engine(name, methods, {"prose": text}):
            print(line(run.method, {k: v for k, v in vars(run).items() if isinstance(v, float)}), flush=True)
        return
    for kind, by_layer in turned.items():

        def biased_keys(pairs: int, kind: str = kind, by_layer: Biases = by_layer) -> Storage:
            own = Stored(sidecar(kind, pairs), "k")
            return lambda layer, key: own(layer, (key + by_layer[layer]).bfloat16().float()) - by_layer[layer]

        caches = {
            f"{kind}: constant": Cache(biased_keys(0), Stored(plain, "v"), SINK, WINDOW),
            f"{kind}: the default": Cache(biased_keys(MAX_TURNING_PAIRS), Stored(plain, "v"), SINK, WINDOW),
            f"{kind}: subtracted": Cache(Stored(plain, "k"), Stored(plain, "v"), SINK, WINDOW),
        }
        for label, result in measure(model, text, caches):
            print(line(label, result), flush=True)


def write(model: Any, tokenizer: Any, folder: Path, pairs: list[int]) -> None:
    """A Qwen2 checkpoint with the bias in its key projections."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ids = sequences(open_corpus(None, tokenizer), tokenizer, 1, CONTEXT, 0).ids
    given = {k: v for k, v in model.config.to_dict().items() if k not in ("architectures", "model_type")}
    made = Qwen2ForCausalLM(Qwen2Config(**given)).bfloat16()
    made.load_state_dict(model.state_dict(), strict=False)
    size = model.config.head_dim
    channels = [channel for pair in pairs for channel in (pair, pair + size // 2)]
    with torch.no_grad():
        for layer, bias in zip(made.model.layers, biases(model, ids, pairs), strict=True):
            projections = layer.self_attn
            for projection in (projections.q_proj, projections.v_proj):
                projection.bias.zero_()
            projections.k_proj.bias.copy_(bias.flatten())
            projections.q_proj.weight.view(-1, size, model.config.hidden_size)[:, channels] /= MAGNITUDE
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="INT2 caches of keys with large biases.")
    parser.add_argument("model", help="folder of a Llama with head size 64")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write a Qwen2 checkpoint instead")
    parser.add_argument("--engine", action="store_true", help="through vLLM instead of emulated")
    parser.add_argument(
        "--pairs", type=int, nargs="+", default=PAIRS["all three"], help="of the checkpoint or the engine"
    )
    parser.add_argument("--windows", type=int, default=2, help="of 2,048 tokens")
    parser.add_argument("--sequences", type=int, default=6, help="of calibration")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    if options.write:
        write(model, tokenizer, options.write, options.pairs)
    else:
        kinds = {f"pairs {options.pairs}": options.pairs} if options.engine else PAIRS
        compare(model, tokenizer, options.windows, options.sequences, kinds, options.model if options.engine else None)


if __name__ == "__main__":
    main()
