"""A sidecar whose layers have different numbers of bits, in one engine: pages of three sizes in one group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from tests.engine.conftest import divergence
from tests.engine.test_contract import SINK, TOLERANCE, WINDOW, Spy, Tensor
from vllm_oscar.calibrate.solve import GAINS
from vllm_oscar.sidecar import LayerCalibration, Sidecar

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine
LAYERS, HEADS, BLOCK = 30, 3, 16
BITS = [((2, 2), (3, 2), (4, 4))[layer % 3] for layer in range(LAYERS)]
TOKEN_BYTES = {(2, 2): 40, (3, 2): 48, (4, 4): 72}  # of a head of 64, as SmolLM2 has them


@pytest.fixture(scope="module")
def mixed_sidecar(sidecar_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test sidecar with the bits of BITS and the gains that go with them."""
    plain = Sidecar.load(sidecar_path)

    def dialled(layer: LayerCalibration, key: int, value: int) -> LayerCalibration:
        return LayerCalibration(
            replace(layer.key, bits=key, gain=GAINS["k", "metric"][key]),
            replace(layer.value, bits=value, gain=GAINS["v", "ls"][value]),
        )

    layers = {index: dialled(layer, *BITS[index]) for index, layer in plain.layers.items()}
    path = tmp_path_factory.mktemp("bits") / "mixed.safetensors"
    replace(plain, layers=layers).save(path)
    return path


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine], mixed_sidecar: Path) -> Engine:
    options = {"sink": SINK, "window": WINDOW, "sidecar": str(mixed_sidecar)}
    return make_engine(options, num_gpu_blocks_override=None)


@pytest.mark.both_runners
def test_each_layer_has_its_own_pages(engine: Engine) -> None:
    """As many blocks as fit what the pool leaves, each as large as its layers' bits ask for."""
    pages = [HEADS * BLOCK * TOKEN_BYTES[bits] for bits in BITS]
    memory = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30
    blocks = engine.runner.kv_cache_config.num_blocks
    assert blocks == (memory - engine.runtime.pool_bytes) // sum(pages)
    layers = engine.runner.compilation_config.static_forward_context.values()
    assert [layer.kv_cache.nbytes for layer in layers] == [blocks * page for page in pages]
    assert engine.runtime.sidecar.bits_in_words == "3.333 bits (2.5 to 4.5)"


@pytest.mark.both_runners
def test_each_layer_reads_what_the_contract_says(engine: Engine, mixed_sidecar: Path, prose: list[int]) -> None:
    sidecar = load_file(mixed_sidecar)
    modules = list(engine.runner.compilation_config.static_forward_context.values())
    spies = []
    for layer in (0, 1, 2):
        tensors = Tensor(sidecar, f"layers.{layer}.k"), Tensor(sidecar, f"layers.{layer}.v")
        spies.append(Spy(engine, modules[layer], tensors, BITS[layer]))
        spies[-1].install()
    engine.chunk_limit(40)
    engine.run({"one": prose[:120]}, 4)
    engine.chunk_limit(512)
    for spy in spies:
        right = spy.errors["right"]
        assert sorted(right) == [(0, 40), (40, 80), (80, 120), *((n, n + 1) for n in range(120, 123))]
        assert max(right.values()) < TOLERANCE


def test_more_bits_are_nearer_to_the_model(
    engine: Engine, make_engine: Callable[..., Engine], prose: list[int]
) -> None:
    """Two thirds of the layers have one or two bits more: half of the error is gone."""
    plain = make_engine({"sink": SINK, "window": WINDOW})
    exact = make_engine(kv_cache_dtype="auto", block_size=32)
    log_probabilities = []
    for served in (exact, engine, plain):
        served.chunk_limit(60)
        served.run({"text": prose[:480]}, 1)
        log_probabilities.append(served.log_probabilities("text", 240, 479))
    mixed, two = (float(divergence(log_probabilities[0], other).mean()) for other in log_probabilities[1:])
    print(f"KL {mixed:.4f} with more bits, {two:.4f} with two")
    assert mixed < 0.6 * two
