"""The static check of the seams: the vLLM at hand passes, and what it must find it finds."""

import importlib.util
import os
from pathlib import Path

import pytest
from packaging.version import Version

from scripts import check_seams


def sources_at_hand() -> list[Path]:
    """The installed vLLM, and those below OSCAR_VLLM_SOURCES."""
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.origin
    further = os.environ.get("OSCAR_VLLM_SOURCES")
    return [Path(spec.origin).parents[1], *sorted(Path(further).iterdir() if further else ())]


INSTALLED = sources_at_hand()[0]


@pytest.mark.parametrize("root", sources_at_hand(), ids=lambda root: root.name)
def test_as_expected(root: Path) -> None:
    assert check_seams.check(check_seams.Sources(root)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("config/cache.py", "CacheDType = Literal[", "CacheDType = Union[", "CacheDType is no Literal"),
        ("config/cache.py", "user_specified_block_size", "block_size_was_given", "has no user_specified_block_size"),
        ("config/vllm.py", "additional_config", "extra_config", "VllmConfig has no additional_config"),
        ("platforms/cpu.py", "selected_backend", "backend", "CpuPlatform.get_attn_backend_cls takes"),
        ("v1/worker/gpu_worker.py", "kernel_warmup", "warm_kernels", "gpu_worker has no kernel_warmup"),
        ("v1/attention/backend.py", "def get_builder_cls(", "def get_maker_cls(", "OscarBackend has no get_maker_cls"),
        ("v1/attention/backend.py", "common_prefix_len: int", "prefix: int", "CpuMetadataBuilder.build does not take"),
        (
            "v1/attention/backend.py",
            "key: torch.Tensor,\n        value:",
            "value: torch.Tensor,\n        key:",
            "another order",
        ),
        ("v1/attention/backend.py", "class AttentionImpl(", "class Impl(", "imports vllm.v1.attention.backend.Attent"),
        ("v1/attention/backends/utils.py", "decode_threshold", "threshold", "with ['decode_threshold'], which it"),
        ("v1/attention/backend.py", "num_reqs: int", "num_reqs: int\n    num_new: int", "without ['num_new'], which"),
        (
            "v1/attention/backend.py",
            "def customize_spec",
            "def custom_spec",
            "AttentionBackend.customize_spec does not",
        ),
        ("v1/attention/selector.py", "use_mla: bool = False", "use_mla: bool = True", "use_mla is True by default"),
        ("v1/attention/selector.py", "use_mla: bool = False\n", "use_new: bool = True\n", "use_new is True by default"),
        ("platforms/interface.py", "def update_block_size_for", "def update_size_for", "update_block_size_for_backend"),
        ("v1/worker/gpu/model_runner.py", "def prepare_inputs(", "def make_inputs(", "prepare_inputs does not exist"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_change_is_found(file: str, old: str, new: str, found: str) -> None:
    class Changed(check_seams.Sources):
        def read(self, path: str) -> str | None:
            text = super().read(path)
            return text.replace(old, new) if text and path == f"vllm/{file}" else text

    text = (INSTALLED / "vllm" / file).read_text()
    assert old in text
    if "CacheDType" in old and "def register_kv_cache_dtype" in text:
        pytest.skip("from 0.33 on the Literal is no seam")
    odd = check_seams.check(Changed(INSTALLED))
    assert any(found in line for line in odd), odd


def test_one_range_of_versions_everywhere() -> None:
    from vllm_oscar.integration import seams

    first, last = (Version(check_seams.MINORS[index]) for index in (0, -1))
    assert (first, last.release[1] + 1) == (seams.FIRST, seams.BEFORE.release[1])
    root = check_seams.ROOT
    assert " ".join(check_seams.MINORS) in (root / "scripts" / "test_all_versions.sh").read_text()
    for name in ("pyproject.toml", "README.md", "docs/new-vllm-release.md"):
        assert seams.SUPPORTED in (root / name).read_text(), name
