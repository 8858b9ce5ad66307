"""Several methods on the same windows, one engine after the other."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.engine import FIRST, EvaluationError, forced_through_cache
from vllm_oscar.evaluation.methods import Method
from vllm_oscar.page_layout import PageLayout

OTHER_BITS = {"auto": 16.0, "fp8": 8.0}


@dataclass(frozen=True)
class Result:
    """One method's numbers. All but the cost are over the scored positions of all windows.

    Attributes:
        method: its name
        bits: stored for each element of a token in INT2, scales and offsets counted (16 for BF16)
        copied: share of a full context's tokens that have a BF16 copy beside that
        int2_reads: share of the reads of stored tokens, over whole windows, that were INT2; None where not counted
        kl, kl_error, kl_p99: KL(BF16 || method) in nats: mean, its standard error over windows, 99th percentile
        perplexity, perplexity_change: of the text that follows, and relative to BF16
        top1: share of positions with the same most likely token
        windows, context, first: windows of `context` tokens, scored from position `first` on
        seconds: of the run
    """

    method: str
    bits: float
    copied: float
    int2_reads: float | None
    kl: float
    kl_error: float
    kl_p99: float
    perplexity: float
    perplexity_change: float
    top1: float
    windows: int
    context: int
    first: int
    seconds: float


def measure(
    model: str,
    methods: Sequence[Method],
    windows: torch.Tensor,
    first: int = FIRST,
) -> Iterator[Result]:
    """Measure methods against the BF16 cache, which is the first result; each comes as soon as it is known.

    Args:
        model: folder or hub id
        windows: int64 (windows, context), token ids
        first: first position that is scored

    Raises:
        ConfigError: windows too short to score anything.
        EvaluationError: BF16 copies that the contract names were missing.
    """
    context = windows.shape[1]
    if context < first + 2:
        raise ConfigError(f"windows of {context} tokens have nothing to score behind position {first}")
    reference = torch.empty(0)
    for method in [Method("bf16", "auto"), *methods]:
        start = time.perf_counter()
        with (
            tempfile.TemporaryDirectory() as folder,
            forced_through_cache(model, method.kv_cache_dtype, context, _saved(method, folder)) as engine,
        ):
            hidden = engine.record(windows)
            if method.kv_cache_dtype == "auto":
                reference = hidden
            scores = engine.compare(windows, reference, hidden, first)
            counted = engine.statistics()
        if counted.get("shrunk_steps") or counted.get("int2_sink_reads"):
            raise EvaluationError(f"{method.name}: the pool was too small for the windows ({counted})")
        yield Result(
            method.name,
            _bits(method),
            _copied(method, context),
            _int2_share(counted),
            **scores.summary(),
            windows=len(windows),
            context=context,
            first=first,
            seconds=time.perf_counter() - start,
        )


def _saved(method: Method, folder: str) -> str | None:
    """Serving reads sidecars from files."""
    if method.sidecar is None:
        return None
    path = Path(folder) / "sidecar.safetensors"
    method.sidecar.save(path)
    return str(path)


def _bits(method: Method) -> float:
    if method.sidecar is None:
        return OTHER_BITS[method.kv_cache_dtype]
    head_size = method.sidecar.fingerprint.head_size
    return PageLayout(head_size, block_size=16, group_size=method.sidecar.group_size).bits_per_element


def _copied(method: Method, context: int) -> float:
    if method.sidecar is None:
        return 0.0
    return min(1.0, (method.sidecar.sink + method.sidecar.window) / context)


def _int2_share(counted: dict[str, int]) -> float | None:
    reads = counted.get("int2_reads", 0) + counted.get("bf16_reads", 0)
    return counted["int2_reads"] / reads if reads else None
