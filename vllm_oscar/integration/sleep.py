"""What becomes of our memory when vLLM sleeps.

While a model loads, vLLM makes everything in a pool tagged "weights", which a sleep of level 1 copies to the host. The
KV cache is made in one tagged "kv_cache", which no sleep keeps. BF16 copies are worth nothing without the pages that
prove them, and workspaces hold nothing between steps: they belong to the latter.
"""

from contextlib import AbstractContextManager, nullcontext

from vllm.device_allocator.cumem import CuMemAllocator


def lost_in_sleep() -> AbstractContextManager[None]:
    """Tensors made inside go with the KV cache: a sleep copies them nowhere, and after it they hold anything."""
    allocator = CuMemAllocator.instance
    if allocator is None:  # sleep mode is off
        return nullcontext()
    pool: AbstractContextManager[None] = allocator.use_memory_pool(tag="kv_cache")
    return pool
