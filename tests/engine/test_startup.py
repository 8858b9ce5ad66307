"""What is refused when an engine starts: the named error, with the way out in its message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_oscar.errors import (
    CalibrationError,
    ConfigError,
    SidecarCorruptError,
    SidecarMismatchError,
    SidecarNotFoundError,
    UnsupportedError,
)
from vllm_oscar.sidecar import ModelFingerprint, Sidecar

if TYPE_CHECKING:
    from tests.engine.conftest import Engine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("oscar", "options", "error", "says"),
    [
        ({"windw": 3}, {}, ConfigError, r"unknown oscar options \['windw'\]; known: .*'window'"),
        ({"pool_share": 1.5e-3}, {}, ConfigError, r"raise pool_share to [0-9.]+ .*or lower --max-num-seqs to [1-9]"),
        ({"sidecar": "/nowhere.safetensors"}, {}, SidecarNotFoundError, "oscar calibrate"),
        ({}, {"attention_backend": "CPU_ATTN"}, UnsupportedError, "another attention backend .*leave it out"),
        (
            {},
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
            UnsupportedError,
            r"the KV connector NixlConnector \(--kv-transfer-config\).*; leave --kv-transfer-config out",
        ),
    ],
    ids=["unknown option", "pool", "no sidecar", "backend", "connector"],
)
def test_refused(
    make_engine: Callable[..., Engine],
    oscar: dict[str, Any],
    options: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        make_engine(oscar, **options)


@pytest.mark.parametrize(("dtype", "given", "served"), [("oscar", None, 128), ("oscar", 300, 300), ("auto", None, 256)])
def test_as_many_requests_as_the_pool_holds(
    model_path: Path, sidecar_path: Path, dtype: Any, given: int | None, served: int
) -> None:
    """vLLM's own default, up to 1,024, is more than a pool of 8% has blocks for."""
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    options = {"oscar": {"sidecar": str(sidecar_path)}}
    asked = EngineArgs(str(model_path), kv_cache_dtype=dtype, max_num_seqs=given, additional_config=options)
    config = asked.create_engine_config(UsageContext.LLM_CLASS)
    assert config.scheduler_config.max_num_seqs == served


def test_no_sidecar_at_all(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only then: with a folder for the user's sidecars that is empty, and none in the model's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vllm_oscar.sidecar.FILE_NAME", "no/such.safetensors")
    with pytest.raises(SidecarNotFoundError, match=r"oscar calibrate .* oscar serve .*hadamard"):
        make_engine({"sidecar": None})


def test_a_calibration_at_the_start_that_fails_is_the_reason(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what cannot be served is refused before it. Where it succeeds: tests/serve/test_serve.py."""
    from vllm import EngineArgs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vllm_oscar.sidecar.FILE_NAME", "no/such.safetensors")
    options: dict[str, Any] = {"calibrate": "--data nowhere.txt"}

    def start(**more: Any) -> None:
        EngineArgs(
            str(model_path), kv_cache_dtype="oscar", additional_config={"oscar": options}, **more
        ).create_engine_config()

    with pytest.raises(UnsupportedError, match="another attention backend"):
        start(attention_backend="CPU_ATTN")
    with pytest.raises(CalibrationError, match=rf"calibration of {model_path} failed: .*nowhere\.txt: no such file"):
        start()
    options["rotation"] = "hadamard"
    start()


def test_sidecar_of_another_model(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    other = ModelFingerprint("llama", 30, 9, 3, 128, {"rope_type": "default", "rope_theta": 1e5})
    Sidecar.hadamard(other).save(tmp_path / "other.safetensors")
    with pytest.raises(SidecarMismatchError, match="head_size: 128"):
        make_engine({"sidecar": str(tmp_path / "other.safetensors")})


def test_truncated_sidecar(make_engine: Callable[..., Engine], sidecar_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(sidecar_path.read_bytes()[:-1000])
    with pytest.raises(SidecarCorruptError, match="calibrate again"):
        make_engine({"sidecar": str(broken)})


def test_hadamard_needs_no_sidecar_and_options_arrive(make_engine: Callable[..., Engine], prose: list[int]) -> None:
    engine = make_engine({"rotation": "hadamard", "sink": 32, "window": 48}, max_num_seqs=2)
    contract = engine.runtime.contract()
    assert (contract.sink, contract.window, contract.block_size) == (32, 48, 16)
    matrix = engine.impls[7].cache_layer.key.transform.matrix
    # entries +-1/8 of an orthogonal matrix of order 64, exact in bfloat16
    assert torch.equal(matrix.abs(), torch.full_like(matrix, 1 / 8))
    assert len(engine.answer(prose[:100], 3)) == 3


def test_each_layer_has_its_own_part_of_the_sidecar(make_engine: Callable[..., Engine], sidecar_path: Path) -> None:
    tensors = load_file(sidecar_path)
    engine = make_engine()
    for index, impl in enumerate(engine.impls):
        for letter, codec in (("k", impl.cache_layer.key), ("v", impl.cache_layer.value)):
            assert torch.equal(codec.transform.matrix, tensors[f"layers.{index}.{letter}.transform"].bfloat16().float())
            assert torch.equal(codec.transform.mean, tensors[f"layers.{index}.{letter}.mean"])
        assert (impl.cache_layer.key.encoder, impl.cache_layer.value.encoder) == ("metric", "ls")
