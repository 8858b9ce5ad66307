"""What the layers of one engine share: options, sidecar, size of the pool, slot tables, counters.

There is one per model, made by its first layer and found by the others through vLLM's own table of layers, so that
a process may hold several engines and nothing of ours is global. Who calls whom, in vLLM's order:

    layers built         the first makes the runtime: options, sidecar
    weights loaded       the first layer plans the pool; each layer gets its calibration and its copies
    pages allocated      a builder for each KV-cache group finds its layers; GPUs: warm_up rehearses steps through them
    a step               each builder takes its group's slot table (made in the first step), hands out slots, maps
                         copies; then each layer writes and attends, with what its builder returned
"""

import copy
import hashlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.platforms import current_platform

from vllm_oscar import __version__, audit
from vllm_oscar.config import OscarConfig
from vllm_oscar.errors import ConfigError, UnsupportedError
from vllm_oscar.hot_pool import HotContract, HotPool, SlotTable
from vllm_oscar.integration.backend import OscarBackend
from vllm_oscar.integration.calibration import calibrate_missing
from vllm_oscar.integration.metrics import Publisher
from vllm_oscar.integration.refusal import (
    EXAMPLE,
    drafts_have_layers,
    refuse_other_layers,
    refuse_pages_of_several_sizes,
    refuse_unsupported_engine,
)
from vllm_oscar.integration.seams import asks_for_pages, leave_new_blocks_unzeroed
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.sidecar import LayerCalibration, ModelFingerprint, Sidecar, find_sidecar

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_oscar.integration.layer import OscarImpl

logger = logging.getLogger("vllm.oscar")


SMALLEST_16_BIT_BLOCK = {False: 16, True: 32}  # tokens, of vLLM's own layers on GPUs and on its CPU platform
_WATCH_EVERY = 64  # calls of `watch` between two looks at the counters on the device


class Counters:
    """What happened so far, summed over layers, KV heads and tokens, on the device.

    Attributes:
        reads: int64 (3,), see StoredRows.reads
        saturated_rows: int64 (1,), rows in which something was not representable
    """

    def __init__(self) -> None:
        self.reads = torch.zeros(3, dtype=torch.int64)
        self.saturated_rows = torch.zeros(1, dtype=torch.int64)

    def move(self, device: torch.device) -> None:
        """To the device that counts."""
        self.reads = self.reads.to(device)
        self.saturated_rows = self.saturated_rows.to(device)


class OscarRuntime:
    """Shared by the OSCAR layers of one model.

    Raises:
        UnsupportedError: something about the engine's configuration that we refuse; the message says what to use.
        SidecarError: no usable sidecar.
    """

    def __init__(self, vllm_config: "VllmConfig") -> None:
        self.config, self.sidecar, path = asked_for(vllm_config, rank_heads)
        if current_platform.is_cpu() and vllm_config.model_config.is_hybrid:
            leave_new_blocks_unzeroed()
        self.vllm_config = vllm_config
        choose_block_size(vllm_config.cache_config, self.sidecar.layouts(64))
        # vLLM's own number becomes that of the smallest blocks later, where layers in 16 bits have smaller ones, and
        # that of the blocks which ours are cut from, where states are larger than a page of ours
        self.block_size: int = vllm_config.cache_config.block_size
        self._log_sidecar(path)
        if getattr(getattr(vllm_config, "quant_config", None), "kv_cache_scheme", None):
            logger.info("the checkpoint's scales for an FP8 cache are not used: INT2 rows have scales of their own")
        tell_apart(vllm_config, self.config, self.sidecar.digest)
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.pool_dtype = torch.float16 if self.dtype == torch.float16 else torch.bfloat16
        self.counters = Counters()
        speculative = vllm_config.speculative_config
        # queries up to this length read their own tokens from the pool like any other
        self.decode_threshold = 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)
        # batches whose steps take turns
        self.in_flight: int = vllm_config.parallel_config.pipeline_parallel_size
        self.num_slots = 0  # of each layer's pool; known once every layer exists
        self.pool_bytes = 0
        self.workspaces: dict[tuple[int, ...], Any] = {}  # buffers that layers of one shape share, on GPUs
        self.builders: dict[str, Any] = {}  # of the KV-cache groups, by their first layer
        # by the first of their layers, and its pages
        self._tables: dict[tuple[str, PageLayout], SlotTable] = {}
        self._audits = audit.asked_for()
        if self._audits:
            logger.warning("%s: every step checks the whole BF16 pool, which is slow", audit.ENVIRONMENT_VARIABLE)
        self._watched = 0
        self._publisher: Publisher | None = None
        self._pending: tuple[torch.Tensor, torch.Event | None] | None = None
        self._warned: set[str] = set()

    @classmethod
    def shared(cls, vllm_config: "VllmConfig") -> "OscarRuntime":
        """The runtime of the model that is being built."""
        layers = oscar_impls(vllm_config)
        return layers[0].runtime if layers else cls(vllm_config)

    def _log_sidecar(self, path: Path | None) -> None:
        sidecar = self.sidecar
        if path is None:
            logger.warning("serving without a calibration (rotation: hadamard); answers lose quality")
            return
        logger.info("OSCAR sidecar %s: method %s, digest %s", path, sidecar.method, sidecar.digest[:12])
        if (self.config.sink, self.config.window) != (sidecar.sink, sidecar.window):
            logger.info(
                "sink %d and window %d differ from the calibration's %d and %d; quality is best where they agree",
                self.config.sink,
                self.config.window,
                sidecar.sink,
                sidecar.window,
            )

    def contract(self) -> HotContract:
        return HotContract(self.config.sink, self.config.window, self.block_size)

    def calibration(self, index: int, num_kv_heads: int, device: torch.device) -> LayerCalibration:
        """This rank's KV heads of a layer, on its device."""
        if index not in self.sidecar.layers:
            raise UnsupportedError(
                f"layer {index} was left out of the calibration: keep it in BF16 with "
                f"--kv-cache-dtype-skip-layers {index}"
            )
        heads = rank_heads(self.sidecar.fingerprint)
        return self.sidecar.shard(index, range(heads.start, heads.start + num_kv_heads), device)

    def plan_pool(self, device: torch.device) -> None:
        """Decide how many slots every layer gets. Called by the first layer after the weights are loaded.

        The pool is never larger than all requests can use, nor than its share of the memory left for the KV cache. Any
        batch of a pipeline may hold all requests, and has its share of the slots: as many as without a pipeline, as
        a rank's slots hold its own layers only.

        Raises:
            UnsupportedError: a layer that is not ours would store its rows under our dtype.
            ConfigError: the share does not hold the floor of `max_num_seqs` requests, for each batch in flight.
        """
        if self.num_slots:
            return
        refuse_other_layers(self.vllm_config.compilation_config.static_forward_context.values())
        contract = self.contract()
        requests = self.vllm_config.scheduler_config.max_num_seqs
        slot_bytes = sum(
            HotPool.slot_bytes(layer.layout, layer.num_kv_heads, self.pool_dtype)
            for layer in oscar_impls(self.vllm_config)
            if layer.owns_cache
        )
        memory = max(0, memory_for_cache(self.vllm_config, device))
        affordable = int(self.config.pool_share * memory) // slot_bytes
        wanted = self.in_flight * requests * contract.slots_per_request
        floor = self.in_flight * requests * contract.floor_slots_per_request(self.decode_threshold)
        self.num_slots = min(wanted, affordable)
        self.counters.move(device)
        if self.num_slots < floor:
            enough = 1.05 * floor * slot_bytes / max(memory, 1)
            remedy = f"raise pool_share to {enough:.2g} in the oscar options" if enough < 0.5 else "give it more memory"
            if fitting := affordable // (floor // requests):
                remedy += f", or lower --max-num-seqs to {fitting}"
            pipeline = f" in each of the pipeline's {self.in_flight} batches" if self.in_flight > 1 else ""
            raise ConfigError(
                f"pool_share {self.config.pool_share} of {memory / 2**30:.2f} GiB of cache memory holds {affordable} "
                f"BF16 blocks, but {requests} requests{pipeline} need at least {floor}: {remedy}"
            )
        self.pool_bytes = self.num_slots * slot_bytes
        self._check_length(memory)
        cache = self.vllm_config.cache_config
        if cache.kv_cache_memory_bytes is not None:
            # an explicit size is not profiled, so the pool has to come out of it here
            cache.kv_cache_memory_bytes -= self.pool_bytes
        logger.info(
            "OSCAR BF16 pool: %d blocks of %d tokens in each layer, %.2f GiB (%d requests with full windows)",
            self.num_slots,
            contract.block_size,
            self.pool_bytes / 2**30,
            self.num_slots // (contract.sink_blocks + contract.tail_blocks),
        )

    def _check_length(self, memory: int) -> None:
        """What vLLM would find as well, without a word of the pool.

        Raises:
            ConfigError: the longest request cannot fit into what the pool leaves.
        """
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        fitted = getattr(model, "original_max_model_len", None) == -1  # --max-model-len auto
        # of a hybrid model not even vLLM knows yet how large blocks are: it says so itself
        if fitted or cache.num_gpu_blocks_override is not None or model.is_hybrid:
            return
        block_size = self.block_size
        block = sum(
            layer.layout.page_bytes(layer.num_kv_heads)
            for layer in oscar_impls(self.vllm_config)
            if layer.owns_cache and layer.sliding_window is None
        )
        left = max(0, memory - self.pool_bytes)
        if -(-model.max_model_len // block_size) * block > left:
            raise ConfigError(
                f"pool_share {self.config.pool_share} leaves {left / 2**30:.2f} of {memory / 2**30:.2f} GiB for pages, "
                f"too little for a request of {model.max_model_len} tokens: lower --max-model-len to "
                f"{left // block * block_size}, lower pool_share in the oscar options, or give it more memory"
            )

    def table(self, layer_names: list[str], num_blocks: int, device: torch.device) -> SlotTable:
        """The slot table of a builder's layers: of the KV-cache group that they belong to, or of those of its layers
        that have the same pages."""
        layers = self.vllm_config.compilation_config.static_forward_context
        key = layer_names[0], layers[layer_names[0]].impl.layout
        table = self._tables.get(key)
        if table is None or table.slot_of_block.shape[0] != num_blocks + 1:
            widths: list[int | None] = [layers[layer].impl.sliding_window for layer in layer_names]
            window = None if None in widths else max(width for width in widths if width)
            table = SlotTable.empty(self.contract(), num_blocks, self.num_slots, device, self.in_flight, window)
            self._tables[key] = table
        return table

    def announce(self, kernels: str) -> None:
        """Log what is served, in one line. Called once the pages exist.

        Args:
            kernels: what runs the layers
        """
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        attention = [layer for layer in layers if hasattr(getattr(layer, "impl", None), "head_size")]
        ours = oscar_impls(self.vllm_config)
        owning = [impl for impl in ours if impl.owns_cache]
        int2 = sum(impl.token_bytes * impl.num_kv_heads for impl in owning)
        bf16 = sum(4 * impl.head_size * impl.num_kv_heads for impl in owning)
        # layers that the user keeps in 16 bits, and a draft's
        others = [layer for layer in attention if not isinstance(layer.impl, type(ours[0]))]
        specs = [spec for layer in others if (spec := layer.get_kv_cache_spec(self.vllm_config)) is not None]
        other = sum(spec.page_size_bytes // spec.block_size for spec in specs)
        room = ""
        cache, scheduler = self.vllm_config.cache_config, self.vllm_config.scheduler_config
        windows = {impl.sliding_window for impl in ours} | {getattr(spec, "sliding_window", None) for spec in specs}
        if self.vllm_config.model_config.is_hybrid:
            room = f", in blocks of {cache.block_size:,} tokens, as large as a state of the other layers"
        elif len(windows) == 1 or scheduler.disable_hybrid_kv_cache_manager:  # all layers keep the same tokens
            tokens = cache.num_gpu_blocks * self.block_size
            ratio = tokens * (bf16 + other) / (tokens * (int2 + other) + self.pool_bytes)
            room = f", room for {tokens:,} tokens ({ratio:.2f} times a 16-bit cache of this size, BF16 copies counted)"
        logger.info(
            "OSCAR %s, %s: %d layers with %s an element, %d not; %s bytes a token in the former, %s with 16 bits%s%s; "
            "sidecar %s",
            __version__,
            kernels,
            len(ours),
            self.sidecar.bits_in_words,
            len(others),
            f"{int2:,}",
            f"{bf16:,}",
            f", and {other:,} in the latter" if others else "",
            room,
            self.sidecar.digest[:12] if self.config.rotation == "calibrated" else "none (Hadamard)",
        )

    def forget_slots(self) -> None:
        """Take all slots back, in place."""
        for table in self._tables.values():
            table.clear()

    def audit(
        self, layer_names: list[str], table: SlotTable, step: "CommonAttentionMetadata", hot_slot_mapping: torch.Tensor
    ) -> None:
        """Check a group's slots as they are for the step that begins, and its copies as the last step left them.
        Called by every builder in every step; does nothing unless the environment asks.

        Raises:
            PoolError: names the rule that is broken.
        """
        if not self._audits:
            return
        audit.check_table(table)
        audit.check_places(table, step.slot_mapping[: step.num_actual_tokens], hot_slot_mapping)
        before = step.seq_lens - step.query_start_loc.diff()
        stored = audit.stored_rows(table, step.block_table_tensor, before)
        for name in layer_names:
            layer = self.vllm_config.compilation_config.static_forward_context[name]
            impl: OscarImpl = layer.impl
            if impl.owns_cache:
                views = impl.layout.views(impl.pages(layer.kv_cache))
                audit.check_copies(table, impl.pool, views, impl.cache_layer, stored)

    def watch(self) -> None:
        """Warn, once for each reason, when the engine degrades. Called by every group's builder in every step; looks
        at the device's counters now and then, without waiting for it."""
        self._watched += 1
        if self._pending is not None:
            counts, event = self._pending
            if event is None or event.query():
                self._pending = None
                statistics = self._named(counts)
                self._warn("shrunk", statistics["shrunk_steps"], _SHRUNK)
                self._warn("saturated", statistics["saturated_rows"], _SATURATED)
                if self._publisher is None:
                    parallel = self.vllm_config.parallel_config
                    self._publisher = Publisher(parallel.data_parallel_index, parallel.rank)
                self._publisher.publish(statistics)
        if self._pending is None and self._watched % _WATCH_EVERY == 1:
            counts = self._counts()
            event = None
            if counts.is_cuda:
                counts = counts.to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._pending = counts, event

    def _warn(self, reason: str, count: int, text: str) -> None:
        if count and reason not in self._warned:
            self._warned.add(reason)
            logger.warning(text, count)

    def statistics(self) -> dict[str, int]:
        """All counters, read from the device; for their meaning see `metrics`."""
        return self._named(self._counts())

    def _counts(self) -> torch.Tensor:
        """int64 (9,) on the device: what `_named` takes."""
        tables = list(self._tables.values())
        used = torch.stack([(table.block_of_slot[:-1] >= 0).sum() for table in tables]).amax()
        limits = torch.stack([table.limits for table in tables]).amin(0).long()
        by_layout = defaultdict(list)  # where there are several, tables of one have what those of another have
        for (_, layout), table in self._tables.items():
            by_layout[layout].append(table.evictions)
        evicted = torch.stack([torch.cat(evictions).sum() for evictions in by_layout.values()]).amax()
        shrunk = torch.cat([table.shrunk_steps for table in tables]).amax()
        return torch.cat(
            [used[None], limits, torch.stack([evicted, shrunk]), self.counters.saturated_rows, self.counters.reads]
        )

    def _named(self, counts: torch.Tensor) -> dict[str, int]:
        used, sink, window, evicted, shrunk, saturated, bf16, int2, int2_sinks = counts.tolist()
        return {
            "pool_blocks": self.num_slots,
            "pool_bytes": self.pool_bytes,
            "used_blocks": used,
            "sink_tokens": sink,
            "window_tokens": window,
            "evicted_blocks": evicted,
            "shrunk_steps": shrunk,
            "saturated_rows": saturated,
            "int2_reads": int2,
            "bf16_reads": bf16,
            "int2_sink_reads": int2_sinks,
        }


_SHRUNK = (
    "the running requests need more BF16 blocks than the OSCAR pool has: sinks or windows were shrunk, evenly, in %d "
    "steps; raise pool_share in the oscar options, or lower --max-num-seqs"
)
_SATURATED = (
    "%d key or value rows held NaN, infinity or a range that fp16 scales cannot represent, and were saturated; "
    "check the model in BF16, or calibrate on text like yours"
)


def oscar_impls(vllm_config: "VllmConfig") -> list["OscarImpl"]:
    """The OSCAR layers built so far, in the order of the model."""
    from vllm_oscar.integration.layer import OscarImpl

    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), OscarImpl)]


def rank_heads(fingerprint: ModelFingerprint) -> range:
    """KV heads of this tensor-parallel rank; with fewer than ranks, neighbouring ranks hold copies of one."""
    total, ranks = fingerprint.num_kv_heads, get_tensor_model_parallel_world_size()
    count = max(1, total // ranks)
    start = get_tensor_model_parallel_rank() * total // ranks
    return range(start, start + count)


def asked_for(
    vllm_config: "VllmConfig", held: Callable[[ModelFingerprint], range]
) -> tuple[OscarConfig, Sidecar, Path | None]:
    """An engine's options, its sidecar, and the sidecar's file if there is one. The workers call this, and before them
    the process that starts them: there an error is the last thing that a failed start prints.

    Args:
        held: which KV heads of the sidecar stay in memory

    Raises:
        UnsupportedError, ConfigError, SidecarError: what cannot be served, and what to do.
    """
    refuse_unsupported_engine(vllm_config)
    options = OscarConfig.parse(getattr(vllm_config, "additional_config", None))
    model = vllm_config.model_config
    fingerprint = ModelFingerprint.of(model.hf_config)
    if options.rotation == "hadamard":
        return options, Sidecar.hadamard(fingerprint), None
    path = find_sidecar(model.model, options.sidecar, model.revision)
    sidecar = Sidecar.load(path, fingerprint, held(fingerprint))
    refuse_pages_of_several_sizes(vllm_config, {layout.token_bytes for layout in sidecar.layouts(64)})
    return options, sidecar, path


def calibrate_if_missing(vllm_config: "VllmConfig") -> None:
    """Make the sidecar where the options ask for that and there is none. Called by the process that the user started,
    before any of the engine's exists.

    Raises:
        UnsupportedError, ConfigError: what cannot be served, before a calibration is spent on it.
        CalibrationError: why there is none.
    """
    refuse_unsupported_engine(vllm_config)
    options = OscarConfig.parse(getattr(vllm_config, "additional_config", None))
    if not options.calibrate or options.sidecar or options.rotation == "hadamard":
        return
    calibrate_missing(vllm_config.model_config, options.calibrate if isinstance(options.calibrate, str) else "")


def keep_drafts_in_16_bits(vllm_config: "VllmConfig") -> None:
    """Give a draft's own layers the dtype "auto", unless the user chose one: else they would inherit ours, for which
    no sidecar has their calibration."""
    speculative = vllm_config.speculative_config
    if not drafts_have_layers(vllm_config) or speculative.kv_cache_dtype is not None:
        return
    speculative.kv_cache_dtype = "auto"
    logger.info(
        "OSCAR leaves the draft's layers (speculative method %s) in 16 bits, beside the target's in INT2: "
        '"kv_cache_dtype" in --speculative-config chooses otherwise',
        speculative.method,
    )


def tell_apart(vllm_config: "VllmConfig", options: OscarConfig, digest: str) -> None:
    """Make VllmConfig.compute_hash, which names what vLLM keeps between starts (compiled graphs, profiled memory),
    depend on what is in the sidecar, and on options that came from the environment: it knows the path at most.

    Args:
        digest: of the sidecar
    """
    given = getattr(vllm_config, "additional_config", None) or {}
    vllm_config.additional_config = {**given, "oscar_in_use": {**asdict(options), "digest": digest}}


def keep_stores_apart(vllm_config: "VllmConfig", digest: str) -> None:
    """Give a connector's files a folder for each model, calibration and size of blocks: it names them by tokens and
    layer alone. Engines that differ in any, or have 16-bit pages, never exchange a block.

    Args:
        digest: of the sidecar
    """
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    if transfer is None or transfer.kv_connector != EXAMPLE:
        return
    # a size that nobody chose depends on the platform, the sidecar and the layers in 16 bits
    block_size = cache.block_size if cache.user_specified_block_size else current_platform.device_name
    model = vllm_config.model_config
    weights = [model.model, model.revision, model.quantization, str(model.dtype)]
    identity = [__version__, *weights, digest, block_size, sorted(cache.kv_cache_dtype_skip_layers)]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    own = copy.copy(transfer)  # several engines may have been given one
    root = own.get_from_extra_config("shared_storage_path", "/tmp")  # vLLM's default
    own.kv_connector_extra_config = {
        **transfer.kv_connector_extra_config, "shared_storage_path": str(Path(root) / f"oscar-{name}")
    }  # fmt: skip
    vllm_config.kv_transfer_config = own


def choose_block_size(cache_config: Any, layouts: Iterable[PageLayout]) -> None:
    """Set the block size that the layers are built for, unless the user did.

    vLLM asks a backend too (Platform.update_block_size_for_backend), but after the layers are loaded, and it may ask
    another layer's: hence the mark that the size is not to be changed. Where some layers stay in 16 bits it raises the
    size even so, until a page holds the smallest block of such a layer; we begin there.

    Args:
        layouts: of the layers, with blocks of some size
    """
    if cache_config.user_specified_block_size:
        return
    size = OscarBackend.get_preferred_block_size(cache_config.block_size)
    if cache_config.kv_cache_dtype_skip_layers and asks_for_pages():
        layout = min(layouts, key=lambda layout: layout.token_bytes)
        while size * layout.token_bytes < SMALLEST_16_BIT_BLOCK[current_platform.is_cpu()] * 4 * layout.head_size:
            size *= 2
    cache_config.block_size = size
    cache_config.user_specified_block_size = True


def memory_for_cache(vllm_config: "VllmConfig", device: torch.device) -> int:
    """Bytes that vLLM has left for the KV cache after the weights, before it profiles activations."""
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(cache.gpu_memory_utilization * total) - torch.cuda.memory_allocated(device)
    import psutil

    total = current_platform.get_device_total_memory()
    return int(cache.gpu_memory_utilization * total) - psutil.Process(os.getpid()).memory_info().rss
