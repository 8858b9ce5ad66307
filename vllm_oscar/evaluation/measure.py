"""Several methods on the same texts, one engine after the other."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.engine import CHUNK, CONCURRENT, FIRST, Engine, EvaluationError, forced_through_cache
from vllm_oscar.evaluation.methods import BF16, Method


@dataclass(frozen=True)
class Result:
    """One method's numbers on one text. All but the cost are over the scored positions of all windows.

    Attributes:
        method, text: their names
        bits: stored for each element of a token that is not copied, scales and offsets counted (16 for BF16)
        copied: share of a full context's tokens that have a BF16 copy beside that
        emulated: whether the method's values were put into vLLM's BF16 cache
        int2_reads: share of the reads of stored tokens, over whole windows of all texts, that were INT2; None where not
            counted
        kl, kl_error, kl_p99: KL(BF16 || method) in nats: mean, its standard error over windows, 99th percentile
        perplexity, perplexity_change: of the text that follows, and relative to BF16
        top1: share of positions with the same most likely token
        windows, context, first: windows of `context` tokens, scored from position `first` on
        seconds: of the method's run over all texts
    """

    method: str
    text: str
    bits: float
    copied: float
    emulated: bool
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


@contextmanager
def running(
    model: str, method: Method, context: int, chunk: int = CHUNK, concurrent: int = CONCURRENT
) -> Iterator[Engine]:
    """An engine with the method's cache, forced through it; checked when it ends.

    Args:
        model: folder or hub id
        context: tokens of a request
        chunk: tokens that a request advances in a step
        concurrent: requests side by side

    Raises:
        EvaluationError: BF16 copies that the contract names were missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {}
        if method.sidecar is not None:  # serving reads sidecars from files
            path = Path(folder) / "sidecar.safetensors"
            method.sidecar.save(path)
            options = {"sidecar": str(path), "sink": method.sink, "window": method.window}
        with forced_through_cache(model, method.kv_cache_dtype, context, options, chunk, concurrent) as engine:
            if method.codec is not None:
                engine.emulate(method.codec, method.sink, method.window)
            yield engine
            counted = engine.statistics()
            if counted.get("shrunk_steps") or counted.get("int2_sink_reads"):
                raise EvaluationError(f"{method.name}: the pool was too small for the windows ({counted})")


def measure(
    model: str, methods: Sequence[Method], texts: Mapping[str, torch.Tensor], first: int = FIRST
) -> Iterator[Result]:
    """Measure methods against the BF16 cache, which is the first; results come as soon as they are known.

    Args:
        model: folder or hub id
        texts: by name, int64 (windows, context), token ids; all of one context
        first: first position that is scored

    Raises:
        ConfigError: windows too short to score anything.
        EvaluationError: the windows were not read as the method says.
    """
    context = next(iter(texts.values())).shape[1]
    if context < first + 2:
        raise ConfigError(f"windows of {context} tokens have nothing to score behind position {first}")
    windows = torch.cat(list(texts.values()))
    reference = torch.empty(0)
    for method in [BF16, *methods]:
        start = time.perf_counter()
        # a window's last token only follows; without it windows may be as long as the model's context
        with running(model, method, context - 1) as engine:
            hidden = engine.record(windows[:, :-1])
            if method is BF16:
                reference = hidden
            scores = engine.compare(windows, reference, hidden, first)
            share = _int2_share(engine.statistics())
        seconds = time.perf_counter() - start
        for text, part in zip(texts, scores.split([len(one) for one in texts.values()]), strict=True):
            yield Result(
                method.name,
                text,
                method.bits,
                min(1.0, (method.sink + method.window) / context),
                method.codec is not None,
                share,
                **part.summary(),
                windows=len(part.kl),
                context=context,
                first=first,
                seconds=seconds,
            )


def _int2_share(counted: dict[str, int]) -> float | None:
    reads = counted.get("int2_reads", 0) + counted.get("bf16_reads", 0)
    return counted["int2_reads"] / reads if reads else None
