"""NVIDIA GPUs: the Triton kernels, with CUDA graphs for decode batches.

Everything that a graph reads lives in device tensors that keep their place: vLLM's own, the slot table, the segment
table, the mapping of new tokens to copies and their positions. The builder refreshes the last four each step, outside
the graph.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_oscar.hot_pool import SlotTable
from vllm_oscar.integration import seams, warm_up
from vllm_oscar.integration.flash import attention_for
from vllm_oscar.integration.layer import OscarImpl
from vllm_oscar.integration.refusal import refuse_padded_pages
from vllm_oscar.integration.runtime import OscarRuntime
from vllm_oscar.integration.sleep import lost_in_sleep
from vllm_oscar.kernels import encode_metric, slots
from vllm_oscar.kernels.decode import DecodeTables, DecodeWorkspace, column_tiles, decode_attention
from vllm_oscar.kernels.history import Call, RestoreTables, plan
from vllm_oscar.kernels.prefill import PrefillWorkspace, prefill
from vllm_oscar.kernels.reads import ReadCounter
from vllm_oscar.kernels.segments import Segments, build_segments
from vllm_oscar.kernels.write import WriteTables, write

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

_HISTORY_ROWS = 32768  # keys that a prefill restores at a time; 128 MiB at 8 heads of 128


@dataclass
class CudaMetadata(AttentionMetadata):
    """What the layers need to know about a step. Decoding requests come first.

    Attributes:
        num_tokens: new tokens, with the padding of a CUDA graph
        num_decodes, num_decode_tokens, decode_len: decoding requests, their tokens, and the tokens of each, or of the
            longest
        decode_starts: where each decoding request's tokens begin, see `decode_attention`, unless all have as many
        seq_lens: int32 (requests,), tokens after this step
        query_start_loc: int32 (requests + 1,)
        block_table: int32 (requests, blocks)
        slot_mapping, hot_slot_mapping: int64 (tokens,)
        position: int32 (tokens,), of each new token in its request, where a layer's mean turns with it
        table: which block has which slot
        segments: of the decode kernel, by sliding window
        calls: of the prefills, by sliding window
    """

    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode_len: int
    decode_starts: torch.Tensor | None
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    hot_slot_mapping: torch.Tensor
    position: torch.Tensor | None
    table: SlotTable
    segments: dict[int | None, Segments]
    calls: dict[int | None, Sequence[Call]]


class CudaMetadataBuilder(AttentionMetadataBuilder[CudaMetadata]):
    """Hands out slots and cuts the work of the decode kernel, for the layers of one KV-cache group that have pages of
    one layout: vLLM builds one for each backend, and `OscarBackend.of` a layout is one."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_padded_pages(kv_cache_spec)
        self.runtime = OscarRuntime.shared(vllm_config)
        self.runtime.builders[layer_names[0]] = self
        self._init_reorder_batch_threshold(self.runtime.decode_threshold)
        context = vllm_config.compilation_config.static_forward_context
        self.layers: list[Any] = [context[name] for name in layer_names]
        self.impl: CudaImpl = self.layers[0].impl
        scheduler = vllm_config.scheduler_config
        self.hot_slot_mapping = torch.full((scheduler.max_num_batched_tokens,), -1, dtype=torch.int64, device=device)
        self.position: torch.Tensor | None = None
        if any(layer.impl.turns for layer in self.layers):
            self.position = torch.zeros(scheduler.max_num_batched_tokens, dtype=torch.int32, device=device)
        windows = {layer.impl.sliding_window for layer in self.layers}
        heads, layout = self.impl.num_kv_heads, self.impl.layout
        self.segments = {window: Segments.allocate(scheduler.max_num_seqs, heads, layout, device) for window in windows}
        for window in windows:
            first, *others = [layer.impl for layer in self.layers if layer.impl.sliding_window == window]
            first.reads = ReadCounter(self.runtime.counters.reads, 1 + len(others))
            for impl in others:
                impl.reads = None  # an earlier builder's groups may have been others
        self._scratch: tuple[int, SlotTable, slots.SlotScratch] | None = None  # with the pages' address
        self._reencode: encode_metric.ReencodeTable | None = None
        self._rounds = encode_metric.Rounds(self.runtime.in_flight)

    def build(
        self, common_prefix_len: int, common_attn_metadata: "CommonAttentionMetadata", fast_build: bool = False
    ) -> CudaMetadata:
        common, impl = common_attn_metadata, self.impl
        threshold = self.runtime.decode_threshold
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=threshold)
        pages = impl.pages(self.layers[0].kv_cache)
        table, scratch = self._table(pages)
        seq_lens, starts = common.seq_lens, common.query_start_loc
        slots.allocate(table, scratch, common.block_table_tensor, seq_lens, starts, threshold)
        grown = self._rounds.step(min(common.max_query_len, threshold))
        if self._reencode is not None and grown:
            encode_metric.reencode(
                self._reencode,
                table,
                common.block_table_tensor,
                seq_lens,
                starts,
                threshold,
                grown,
                impl.workspaces.encoder,
            )
        num_tokens = common.num_actual_tokens
        slot_mapping = common.slot_mapping[:num_tokens]
        slots.map_copies(table, slot_mapping, starts, seq_lens, threshold, self.hot_slot_mapping, self.position)
        self.runtime.audit(self.layer_names, table, common, self.hot_slot_mapping[:num_tokens])

        starts_cpu = common.query_start_loc_cpu
        # zeros: requests that pad a CUDA graph
        lengths = set(starts_cpu[: num_decodes + 1].diff().tolist()) - {0}
        decode_len = max(lengths, default=0)
        segments: dict[int | None, Segments] = {}
        for window, storage in self.segments.items():
            if num_decodes:
                _, tiles = column_tiles(decode_len, impl.ratio)
                segments[window] = storage.for_batch(num_decodes, impl.num_kv_heads * tiles)
                build_segments(seq_lens[:num_decodes], decode_len, table.limits, window, segments[window])
        calls: dict[int | None, Sequence[Call]] = {}
        if num_prefills:
            after, starts_of = self._prefill_lengths(common, num_decodes, threshold), starts_cpu.tolist()
            for window in self.segments:
                capacity = impl.workspaces.prefill.capacity
                calls[window] = plan(after, starts_of, num_decodes, capacity, window, self.device)
        self.runtime.watch()
        return CudaMetadata(
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            decode_len=decode_len,
            decode_starts=starts[: num_decodes + 1] if len(lengths) > 1 else None,
            seq_lens=seq_lens,
            query_start_loc=starts,
            block_table=common.block_table_tensor,
            slot_mapping=slot_mapping,
            hot_slot_mapping=self.hot_slot_mapping[:num_tokens],
            position=None if self.position is None else self.position[:num_tokens],
            table=table,
            segments=segments,
            calls=calls,
        )

    def _table(self, pages: torch.Tensor) -> tuple[SlotTable, slots.SlotScratch]:
        """The group's slots, and what else can only be made once vLLM has bound the pages."""
        table, address = self.runtime.table(self.layer_names, pages.shape[0], self.device), pages.data_ptr()
        if self._scratch is None or self._scratch[0] != address or self._scratch[1] is not table:
            self._scratch = address, table, slots.SlotScratch.of(table)
            metric = [layer for layer in self.layers if layer.impl.owns_cache and layer.impl.metric_tables is not None]
            if metric:
                self._reencode = encode_metric.ReencodeTable.of(
                    self.impl.layout,
                    [layer.impl.pages(layer.kv_cache) for layer in metric],
                    [layer.impl.pool for layer in metric],
                    [layer.impl.metric_tables for layer in metric],
                    [layer.impl.cache_layer.key.gain for layer in metric],
                )
        return self._scratch[1], self._scratch[2]

    @staticmethod
    def _prefill_lengths(common: "CommonAttentionMetadata", first: int, threshold: int) -> list[int]:
        """Tokens after this step, for the host.

        vLLM's numbers for the host are exact for prompts. For requests that verify drafts they may count drafts that
        were rejected. Those decode, as vLLM puts short queries first; only where layers of another backend beside ours
        want another order, and such a request comes behind a longer one, the device is asked.
        """
        after = common.seq_lens_cpu_upper_bound
        queries = common.query_start_loc_cpu.diff()
        may_verify = (queries <= threshold) & (after > queries)
        return (common.seq_lens.cpu() if threshold > 1 and may_verify[first:].any() else after).tolist()


@dataclass(frozen=True)
class Workspaces:
    """Buffers that all layers of one shape share, allocated before vLLM measures memory.

    Attributes:
        decode, prefill: of the attention kernels
        transformed: pool dtype (tokens, heads, D), new keys on their way to the metric encoder
        encoder: scratch of the metric encoder
    """

    decode: DecodeWorkspace
    prefill: PrefillWorkspace
    transformed: torch.Tensor
    encoder: torch.Tensor


class CudaImpl(OscarImpl):
    """One layer, on Triton kernels.

    Attributes:
        reads: given by the builder to the layers that count how stored tokens are read
    """

    reads: ReadCounter | None = None

    @property
    def ratio(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def turns(self) -> bool:
        """Whether the keys' mean turns with the position."""
        return self.cache_layer.key.transform.turning is not None

    def _load(self, name: str, module: torch.nn.Module) -> None:
        super()._load(name, module)
        seams.warm_up_with(warm_up.warm_up)
        device, dtype = self.pool.words.device, self.runtime.dtype
        key, value = self.cache_layer.key, self.cache_layer.value
        self.decode_tables = DecodeTables.of(key.transform, value.transform)
        self.restore_tables = RestoreTables.of(key.transform, value.transform, dtype)
        self.write_tables = WriteTables.of(key, value, dtype)
        self.metric_tables = encode_metric.MetricTables.of(key.metric, self.layout) if key.metric else None
        for tables in (self.decode_tables, self.restore_tables, self.write_tables, self.metric_tables):
            _keep(module, tables)
        self.attention = attention_for(self.head_size)
        shape = (self.num_kv_heads, self.ratio, self.head_size)
        if shape not in self.runtime.workspaces:
            with lost_in_sleep():
                self.runtime.workspaces[shape] = self._allocate(device, dtype)
        self.workspaces: Workspaces = self.runtime.workspaces[shape]

    def _allocate(self, device: torch.device, dtype: torch.dtype) -> Workspaces:
        scheduler, layout = self.vllm_config.scheduler_config, self.layout
        tokens = scheduler.max_num_batched_tokens
        history = min(_HISTORY_ROWS, self.vllm_config.model_config.max_model_len)
        return Workspaces(
            DecodeWorkspace.allocate(
                layout,
                self.num_kv_heads,
                self.ratio,
                scheduler.max_num_seqs,
                self.runtime.decode_threshold,
                device,
                self.runtime.contract(),
                any(layer.key.turning is not None for layer in self.runtime.sidecar.layers.values()),
            ),
            PrefillWorkspace.allocate(
                max(tokens, history), tokens, self.num_heads, self.num_kv_heads, self.head_size, dtype, device
            ),
            torch.empty((tokens, self.num_kv_heads, self.head_size), dtype=self.runtime.pool_dtype, device=device),
            encode_metric.workspace(layout, device),
        )

    def run(
        self,
        step: CudaMetadata,
        kv_cache: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """See OscarImpl.run."""
        pages = self.pages(kv_cache)
        if self.owns_cache:
            self._write(pages, step, key, value)
        if step.num_decodes:
            asked = slice(0, step.num_decode_tokens)
            decode_attention(
                query[asked],
                pages,
                self.layout,
                self.pool,
                step.table,
                step.block_table[: step.num_decodes],
                step.seq_lens[: step.num_decodes],
                step.decode_len,
                step.segments[self.sliding_window],
                self.decode_tables,
                self.scale,
                self.soft_cap,
                self.sliding_window,
                self.workspaces.decode,
                output[asked],
                reads=self.reads,
                behind_write=self.owns_cache,
                sink_logits=self.sink_logits,
                query_starts=step.decode_starts,
            )
        if step.calls:
            prefill(
                query,
                key,
                value,
                pages,
                self.layout,
                self.pool,
                step.table,
                step.block_table,
                self.restore_tables,
                step.calls[self.sliding_window],
                self.workspaces.prefill,
                output,
                self.scale,
                self.soft_cap,
                self.sliding_window,
                self.attention,
                self.reads,
                self.sink_logits,
            )

    def _write(self, pages: torch.Tensor, step: CudaMetadata, key: torch.Tensor, value: torch.Tensor) -> None:
        """Prefills encode keys in the metric at once. A decode step cannot hide the encoder's chain of dependent
        steps: it writes least-squares codes, which are encoded again a little later (see `encode_metric.reencode`)."""
        saturated = self.runtime.counters.saturated_rows
        metric = self.metric_tables if step.calls else None
        write(
            key,
            value,
            pages,
            self.layout,
            self.pool,
            step.slot_mapping,
            step.hot_slot_mapping,
            self.write_tables,
            saturated,
            None if metric is None else self.workspaces.transformed,
            step.position,
        )
        if metric is not None:
            encode_metric.encode_written(
                self.workspaces.transformed[: step.num_tokens],
                pages,
                self.layout,
                self.pool,
                step.slot_mapping,
                step.hot_slot_mapping,
                metric,
                self.cache_layer.key.gain,
                self.workspaces.encoder,
                saturated,
            )


def _keep(module: torch.nn.Module, tables: Any) -> None:
    """Register tensors as buffers of the layer, so that vLLM's sleep mode saves and restores them."""
    if tables is None:
        return
    for field in dataclasses.fields(tables):
        tensor = getattr(tables, field.name)
        if isinstance(tensor, torch.Tensor):
            module.register_buffer(f"oscar_{type(tables).__name__}_{field.name}", tensor, persistent=False)
