"""Caches that our pages cannot hold, emulated in the real engine.

vLLM runs its own attention over its own BF16 cache, and only what lies there is changed: rows are written as they are,
and once they have left the window they are written again as a codec gives them back. So every query reads BF16 for
sink and window and the codec's values for the rest, by the contract of the hot pool. This measures quality; nothing is
saved.
"""

from typing import Any, NamedTuple

import torch

from vllm_oscar.errors import UnsupportedError
from vllm_oscar.evaluation.codecs import Codec
from vllm_oscar.integration.batches import Batches


class _Rows(NamedTuple):
    """Rows of one request and layer that were written as they are.

    Attributes:
        first: position of the first one
        slots: int64 (tokens,), where they lie in the cache
        key, value: (tokens, heads, D)
    """

    first: int
    slots: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def part(self, start: int, end: int | None = None) -> "_Rows":
        return _Rows(self.first + start, self.slots[start:end], self.key[start:end], self.value[start:end])


class Rewriter:
    """Stands in for one attention layer's do_kv_cache_update.

    Args:
        write: that method
        runner: vLLM's model runner
        codec: how rows are stored
        sink, window: tokens at both ends of a request that stay as they are
    """

    def __init__(self, write: Any, runner: Any, codec: Codec, sink: int, window: int) -> None:
        self._write = write
        self._batches = Batches.of(runner)
        self._codec = codec
        self._sink = sink
        self._window = window
        self._waiting: dict[str, _Rows] = {}

    def __call__(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Called once a step, before the layer attends; the arguments are vLLM's."""
        self._write(layer, key, value, kv_cache, slot_mapping)
        leaving = []
        for name, before, start, end in self._batches.now():
            rows = _Rows(before, slot_mapping[start:end].clone(), key[start:end].clone(), value[start:end].clone())
            waiting = self._waiting.get(name)
            if waiting is not None and before:  # else the request is new, or starts anew after a preemption
                rows = _Rows(waiting.first, *(torch.cat(pair) for pair in zip(waiting[1:], rows[1:], strict=True)))
            first = min(max(self._sink - rows.first, 0), len(rows.slots))  # sinks never leave
            count = max(before + 1 - self._window - rows.first - first, 0)
            last = first + count // self._codec.tokens * self._codec.tokens
            leaving.append(rows.part(first, last))
            self._waiting[name] = rows.part(last)
        slots = torch.cat([rows.slots for rows in leaving])
        keys, values = torch.cat([rows.key for rows in leaving]), torch.cat([rows.value for rows in leaving])
        if len(slots):
            keys = self._codec.keys(keys.float()).to(keys.dtype).contiguous()
            values = self._codec.values(values.float()).to(values.dtype).contiguous()
            self._write(layer, keys, values, kv_cache, slots)


def rewrite(worker: Any, codec: Codec, sink: int, window: int) -> None:
    """Make every attention layer of a vLLM worker store rows as `codec` would.

    Raises:
        UnsupportedError: vLLM writes this cache inside its attention.
    """
    for module in worker.model_runner.get_model().modules():
        impl = getattr(module, "impl", None)
        if impl is None:
            continue
        write = getattr(impl, "do_kv_cache_update", None)
        if write is None:
            raise UnsupportedError(
                f"{type(impl).__name__} writes its cache inside its attention, where other methods cannot be emulated: "
                "leave kivi and int4 out, or use vLLM 0.32"
            )
        impl.do_kv_cache_update = Rewriter(write, worker.model_runner, codec, sink, window)
