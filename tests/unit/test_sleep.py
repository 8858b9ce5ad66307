"""Which of our tensors a sleep of level 1 copies to the host, in vLLM's own allocator."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.device_allocator import cumem

from vllm_oscar.integration.sleep import lost_in_sleep


@contextmanager
def a_pool(*callbacks: Any) -> Iterator[tuple[Any, None]]:
    yield SimpleNamespace(snapshot=list), None


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, without the driver."""
    made = cumem.CuMemAllocator()
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", made)
    monkeypatch.setattr(cumem, "use_memory_pool_with_allocator", a_pool)
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: None)
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: None)
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=lambda *copied: None))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    return made


def test_what_is_made_inside_goes_with_the_cache(allocator: Any) -> None:
    def make(address: int) -> Any:
        """What the driver's hook does for a new segment."""
        allocator.python_malloc_callback((0, 64, address, 0))
        return allocator.pointer_to_data[address]

    with allocator.use_memory_pool(tag="weights"):
        weights = make(1)
        with lost_in_sleep():
            pool = make(2)
        more_weights = make(3)
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = make(4)
    allocator.sleep(offload_tags=("weights",))
    kept = [made.cpu_backup_tensor is not None for made in (weights, pool, more_weights, cache)]
    assert kept == [True, False, True, False]
    allocator.wake_up(tags=["weights"])
    assert [made.is_asleep for made in (weights, pool, more_weights, cache)] == [False, True, False, True]
    allocator.wake_up(tags=["kv_cache"])
    assert not pool.is_asleep


def test_without_sleep_mode_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
    with lost_in_sleep():
        assert torch.zeros(3).sum() == 0
