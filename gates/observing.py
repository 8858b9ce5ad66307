"""What is watched inside a running engine: by gates.engine on a GPU, by tests/engine/interpreted.py without one."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_oscar.attention import attend, read_rows
from vllm_oscar.integration.runtime import _WATCH_EVERY
from vllm_oscar.kernels.encode_metric import _EVERY, BATCH
from vllm_oscar.page_layout import KEY, PageViews
from vllm_oscar.quantizer import encode_ls

# Relative errors, by norm. Rounding a decode's output to BF16 costs 0.002; a prefill restores history to BF16 rows,
# whose rounding random queries with scores of some tens amplify.
DECODE, PREFILL = 0.01, 0.05


@dataclass
class Seen:
    """What an Observer saw.

    Attributes:
        errors: of layer outputs, a request each, in units of what is tolerated
        reads: likewise, see StoredRows.reads
        waits: where the host waited for the device
        allocations: which of our calls took device memory in a decode step
        replayed: steps whose layers no Python ran: a CUDA graph did
    """

    errors: list[float] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    waits: set[str] = field(default_factory=set)
    allocations: set[str] = field(default_factory=set)
    replayed: int = 0


class Observer:
    """Recomputes every layer's output after every step with the reference (attention.read_rows and attend), from the
    same pages and copies, and notes what our layers and builders make the host and the allocator do.

    Layers copy their arguments and outputs into tensors that keep their place: a CUDA graph that runs the layers
    copies them too, and what is compared after each step is what it computed. To be made before the engine.
    """

    def __init__(self, impl_class: Any, builder_class: Any, reencoding: "Reencoding | None" = None) -> None:
        self.seen = Seen()
        self.reencoding = reencoding
        self._serving = False
        self._ran = False
        self._steps: dict[Any, Any] = {}  # of each builder, not yet checked
        self._recorded: dict[Any, tuple[torch.Tensor, ...]] = {}  # of each layer: query, key, value, output
        self._transforms: dict[Any, Any] = {}  # of each layer: ours, as a deep sleep takes those that nothing needs
        self._watch_layers(impl_class)
        self._watch_builders(builder_class)

    def begin(self, llm: Any) -> None:
        """Check every step from now on."""
        self._serving = True
        self._steps.clear()
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        original = runner.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            self._ran = False
            out = original(*args, **kwargs)
            self.seen.replayed += bool(self._steps) and not self._ran
            for builder, step in self._steps.items():
                for number, layer in enumerate(builder.layers):
                    self._check(layer, step)
                    if self.reencoding is not None:
                        self.reencoding.follow(number, layer, step)
            self._steps.clear()
            return out

        runner.execute_model = execute_model

    def _watch_layers(self, impl_class: Any) -> None:
        original = impl_class.forward

        def forward(
            impl: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, **kwargs: Any
        ) -> Any:
            self._ran = True
            with _noting(self._serving) as noted:
                out = original(impl, layer, query, key, value, kv_cache, metadata, **kwargs)
            self.seen.waits |= noted.waits
            if noted.allocations and metadata is not None and not metadata.calls:  # prefills may
                self.seen.allocations.add("layer")
            given = (query, key, value, kwargs["output"])
            if impl not in self._recorded:
                rows = max(impl.vllm_config.scheduler_config.max_num_batched_tokens, query.shape[0])
                self._recorded[impl] = tuple(t.new_zeros((rows, *t.shape[1:])) for t in given)
                codecs = impl.cache_layer.key, impl.cache_layer.value
                self._transforms[impl] = copy.deepcopy([codec.transform for codec in codecs])
            for kept, tensor in zip(self._recorded[impl], given, strict=True):
                kept[: tensor.shape[0]].copy_(tensor)
            return out

        impl_class.forward = forward

    def _watch_builders(self, builder_class: Any) -> None:
        original = builder_class.build

        def build(builder: Any, *args: Any, **kwargs: Any) -> Any:
            with _noting(self._serving) as noted:
                step = self._steps[builder] = original(builder, *args, **kwargs)
            runtime = builder.runtime
            self.seen.waits |= noted.waits
            if noted.allocations and not step.calls and runtime._watched % _WATCH_EVERY != 1:  # then it copies counters
                self.seen.allocations.add("builder")
            return step

        builder_class.build = build

    def _check(self, layer: Any, step: Any) -> None:
        impl = layer.impl
        query, key, value, output = self._recorded[impl]
        of_keys, of_values = self._transforms[impl]
        views = impl.layout.views(impl.pages(layer.kv_cache))
        lengths, starts = step.seq_lens.tolist(), step.query_start_loc.tolist()
        for request, after in enumerate(lengths):
            start, end = starts[request : request + 2]
            if end <= start or after == 0:  # padding of a graph
                continue
            before, decodes = after - (end - start), request < step.num_decodes
            tokens = after if decodes else before
            blocks = step.block_table[request, : -(-tokens // impl.layout.block_size)].long()
            stored = read_rows(views, impl.pool, step.table, blocks, tokens, before, impl.sliding_window)
            self.seen.reads.append(stored.reads(before, impl.runtime.config.sink, impl.sliding_window).tolist())
            heads = (end - start, -1, impl.head_size)
            wanted = attend(
                query[start:end].view(heads),
                stored,
                of_keys,
                of_values,
                impl.scale,
                before,
                None if decodes else (key[start:end].view(heads), value[start:end].view(heads)),
                impl.soft_cap,
                impl.sliding_window,
                impl.sink_logits,
            )
            got = output[start:end].view(heads).float()
            where = f"{layer.layer_name}, request {request} of {before} + {end - start} tokens"
            for given in (query, key, value):
                assert torch.isfinite(given[start:end]).all(), f"what a layer is given is not finite: {where}"
            assert torch.isfinite(got).all(), f"a layer's output is not finite: {where}"
            error = float((got - wanted).norm() / wanted.norm().clamp(min=1e-6))
            self.seen.errors.append(error / (DECODE if decodes else PREFILL))


@dataclass
class _Noted:
    waits: set[str] = field(default_factory=set)
    allocations: int = 0


@contextlib.contextmanager
def _noting(serving: bool) -> Iterator[_Noted]:
    """What waits for the device, and how often memory is asked for; nothing where there is none, or before serving."""
    noted = _Noted()
    if not serving or not torch.cuda.is_available():
        yield noted
        return
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield noted
        finally:
            torch.cuda.set_sync_debug_mode("default")
    noted.allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    noted.waits = {f"{w.filename}:{w.lineno}" for w in seen if "called a synchronizing" in str(w.message)}


@dataclass
class Verdict:
    """What became of the keys that decode steps wrote.

    Attributes:
        metric, least: (row, step) pairs found encoded again, and not yet
        agreement: of their codes with the reference's of the metric encoder, and of least squares, on average
        late: (row, step) pairs whose row was outside the window, and not encoded again
        misplaced: (layer, request, step) triples where what is encoded again is not whole batches, or not all of them
    """

    metric: int = 0
    least: int = 0
    agreement: float = 0.0
    late: int = 0
    misplaced: int = 0

    @property
    def sound(self) -> bool:
        return min(self.metric, self.least) > 0 and self.agreement > 0.97 and not self.late and not self.misplaced


class Reencoding:
    """Follows keys that decoding writes: least-squares codes at first, those of the metric encoder as soon as a batch
    is whole. A row was encoded again when its codes are no longer those that it was written with, and was not when
    they are, unless the reference's two encoders agree about its BF16 copy: then nobody can tell. For one batch of
    requests, none of whose blocks are used again.
    """

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # of each layer (tokens of all pages, heads, D), NaN where none is
        self._first: dict[int, torch.Tensor] = {}  # likewise (tokens, heads, D): the codes they were written with
        self._codecs: dict[int, Any] = {}
        self._found: list[tuple[int, int, int, torch.Tensor, torch.Tensor]] = []

    def follow(self, number: int, layer: Any, step: Any) -> None:
        """After a step: layer `number` of the group."""
        impl = layer.impl
        p = impl.layout.block_size
        views: PageViews = impl.layout.views(impl.pages(layer.kv_cache))
        if number not in self._copies:
            blocks, heads = views.meta.shape[:2]
            self._copies[number] = impl.pool.rows.new_full((blocks * p, heads, impl.head_size), float("nan"))
            self._first[number] = torch.zeros_like(self._copies[number], dtype=torch.uint8)
            self._codecs[number] = copy.deepcopy(impl.cache_layer.key)
        place, hot = step.slot_mapping, step.hot_slot_mapping
        written = (place >= 0) & (hot >= 0)
        rows = impl.pool.rows[hot[written] // p, :, KEY, hot[written] % p]
        self._first[number][place[written]] = views.codes(KEY, (place[written] // p, slice(None), place[written] % p))
        # beside a prefill decodes are encoded in the metric at once
        self._copies[number][place[written]] = torch.full_like(rows, float("nan")) if step.calls else rows
        for request, after in enumerate(step.seq_lens.tolist()[: 0 if step.calls else step.num_decodes]):
            token = torch.arange(after, device=place.device)
            block = step.block_table[request, token // p].long()
            codes = views.codes(KEY, (block, slice(None), token % p))
            window = int(step.table.limits[1])
            self._found.append((number, after, window, block * p + token % p, codes))

    def verdict(self) -> Verdict:
        """Of all steps so far."""
        out, agreement = Verdict(), []
        wanted = {}
        for number, copies in self._copies.items():
            codec, known = self._codecs[number], ~copies.isnan().any(-1).any(-1)
            by_either = torch.full((2, *copies.shape), 1 << codec.bits, dtype=torch.uint8, device=copies.device)
            by_either[0, known] = codec.encode(copies[known]).codes
            by_either[1, known] = encode_ls(copies[known], codec.group_size, levels=codec.levels).codes
            wanted[number] = known, by_either
        for number, after, window, places, codes in self._found:
            known, by_either = wanted[number]
            token = known[places].nonzero()[:, 0]
            if not token.numel():
                continue
            here = places[token]
            again = (codes[token] != self._first[number][here]).any(-1)  # (tokens, heads)
            not_yet = ~again & (by_either[0, here] != by_either[1, here]).any(-1)
            same = by_either[:, here] == codes[token]
            agreement.append(torch.where(again[..., None], same[0], same[1]).float().mean(-1).flatten())
            out.metric += int(again.sum())
            out.least += int(not_yet.sum())
            outside = token < after - window  # the step's own token is `after` - 1, and its window ends there
            out.late += int(not_yet[outside].sum())
            done, rest = token[again.any(-1)], token[not_yet.any(-1)]
            if done.numel() and rest.numel():
                last, first = int(done[-1]), int(rest[0])
                whole = last < first and (first - number) // BATCH > (last - number) // BATCH
                out.misplaced += not (whole and first > after - _EVERY - BATCH)
        out.agreement = float(torch.cat(agreement).mean()) if agreement else 0.0
        return out
