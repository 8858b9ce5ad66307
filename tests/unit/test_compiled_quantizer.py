"""The compiled encoders are the reference's to the last bit."""

import functools
import math
import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("numba", reason="comes with vLLM")

import vllm_oscar
from vllm_oscar import cache_layer, compiled_quantizer, quantizer
from vllm_oscar.quantizer import FP16_MAX, MAX_VALUE_SCALE, Encoded, Metric

SIZES = [(64, 64), (64, 32), (80, 80), (96, 96), (128, 128), (128, 64), (128, 32), (192, 192), (256, 256)]


def rows(head_size: int) -> torch.Tensor:
    """(40, 2, D) rows of many scales with heavy tails, and hostile ones."""
    generator = torch.Generator().manual_seed(head_size)
    normal = torch.randn(40, 2, head_size, generator=generator)
    y = normal * (1 + normal.abs()) * torch.logspace(-2, 2, 80).view(40, 2, 1) + normal[..., :1]
    y[0, 0, 3], y[0, 1, 5], y[1, 0, 7] = math.inf, -math.inf, math.nan
    y[1, 1], y[2, 0], y[2, 1] = math.nan, 3e38, 0.0
    y[3, 0], y[3, 1] = -0.0, -7.25
    y[4, 0], y[4, 1] = torch.linspace(-5e4, 6e4, head_size), y[4, 1].clamp(0, 1e-8)
    y[5, 0] *= 1e-40 / y[5, 0].abs().max()  # subnormal in float32
    y[5, 1] = 1e-5 * y[5, 1].sign()  # subnormal in float16, two values
    y[6] = (y[6] > 0) * 2.0**-24
    y[7, 0] = torch.arange(head_size) % 4 - 1.5  # ties everywhere
    y[7, 1] = 0
    y[7, 1, 9] = 300  # one channel is all
    return y


def metric(head_size: int) -> Metric:
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(2, head_size, head_size, dtype=torch.float64, generator=generator)).Q
    return Metric.of((basis * torch.logspace(0, -3, head_size, dtype=torch.float64)) @ basis.mT)


def assert_same(one: Encoded, other: Encoded) -> None:
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scale.view(torch.int16), other.scale.view(torch.int16))
    assert torch.equal(one.offset.view(torch.int16), other.offset.view(torch.int16))
    assert int(one.saturated) == int(other.saturated) and one.saturated.dtype == other.saturated.dtype


@pytest.mark.parametrize(("gain", "max_scale"), [(1.0, FP16_MAX), (1.1, FP16_MAX), (1.1, MAX_VALUE_SCALE)])
@pytest.mark.parametrize(("head_size", "group_size"), SIZES)
def test_least_squares(head_size: int, group_size: int, gain: float, max_scale: float) -> None:
    y = rows(head_size)
    reference = quantizer.encode_ls(y, group_size, gain, max_scale)
    assert int(reference.saturated) > 4
    assert_same(reference, compiled_quantizer.encode_ls(y, group_size, gain, max_scale))


@pytest.mark.parametrize(("gain", "max_scale"), [(1.0, FP16_MAX), (1.05, MAX_VALUE_SCALE)])
@pytest.mark.parametrize(("head_size", "group_size"), SIZES)
def test_metric(head_size: int, group_size: int, gain: float, max_scale: float) -> None:
    y, tables = rows(head_size), metric(head_size)
    reference = quantizer.encode_metric(y, tables, group_size, gain, max_scale)
    assert int(reference.saturated) > 4
    assert_same(reference, compiled_quantizer.encode_metric(y, tables, group_size, gain, max_scale))


@pytest.mark.parametrize("levels", [8, 16])
@pytest.mark.parametrize(("head_size", "group_size"), [(64, 32), (80, 80)])
def test_more_levels(head_size: int, group_size: int, levels: int) -> None:
    y, tables = rows(head_size), metric(head_size)
    assert_same(
        quantizer.encode_ls(y, group_size, 1.01, FP16_MAX, levels),
        compiled_quantizer.encode_ls(y, group_size, 1.01, FP16_MAX, levels),
    )
    assert_same(
        quantizer.encode_metric(y, tables, group_size, 1.01, FP16_MAX, levels),
        compiled_quantizer.encode_metric(y, tables, group_size, 1.01, FP16_MAX, levels),
    )


@pytest.mark.parametrize("shape", [(0, 2, 64), (2, 64), (2, 3, 2, 64)])
def test_shapes(shape: tuple[int, ...]) -> None:
    y = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    encoded = compiled_quantizer.encode_metric(y, metric(64), 32)
    assert encoded.codes.shape == shape and encoded.scale.shape == encoded.offset.shape == (*shape[:-1], 2)
    assert_same(quantizer.encode_metric(y, metric(64), 32), encoded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_run_dtypes(dtype: torch.dtype) -> None:
    y = rows(64).transpose(0, 1).contiguous().transpose(0, 1).to(dtype)  # as the cache passes them: not contiguous
    assert_same(quantizer.encode_metric(y, metric(64), 64), compiled_quantizer.encode_metric(y, metric(64), 64))


@pytest.mark.parametrize("numba", [None, ModuleType("numba")], ids=["none", "a stand-in for vLLM's imports"])
def test_the_cache_uses_it_and_says_once_where_numba_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, numba: ModuleType | None
) -> None:
    encoders = cache_layer._encoders.__wrapped__
    assert encoders("cpu") is compiled_quantizer and encoders("cuda") is quantizer
    monkeypatch.setattr(cache_layer, "_encoders", functools.cache(encoders))
    monkeypatch.delattr(vllm_oscar, "compiled_quantizer")
    monkeypatch.delitem(sys.modules, "vllm_oscar.compiled_quantizer")
    for name in ("numba.core", "numba.core.dispatcher"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", numba)
    assert [cache_layer._encoders("cpu") for _ in range(3)] == [quantizer] * 3
    assert [record.message.split(":")[0] for record in caplog.records] == ["oscar"]
    assert "pip install numba" in caplog.text


def test_an_engine_can_start_after_it() -> None:
    """vLLM 0.32 asks everything that modules hold for a __dict__; llvmlite's library answered with a function."""
    import llvmlite.binding.ffi

    assert isinstance(getattr(llvmlite.binding.ffi.lib, "__dict__", {}), dict)
