"""What a model's cache takes and what GPUs hold of it: docs/sizing.md in code, from a configuration alone."""

import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_oscar.config import OscarConfig
from vllm_oscar.errors import UnsupportedError
from vllm_oscar.hot_pool import HotContract, HotPool
from vllm_oscar.integration.seams import LARGE, MAX_NUM_SEQS, MAX_NUM_SEQS_SMALL
from vllm_oscar.page_layout import PageLayout
from vllm_oscar.sidecar import ModelFingerprint, Sidecar

GB = 10**9
GPUS = (24, 48, 80, 141)  # GB
UTILISATION = 0.9  # --gpu-memory-utilization; a little below what vLLM takes where it is not given
OVERHEAD = 2 * GB  # of each GPU: activations, CUDA graphs, NCCL; a guess, as only an engine can measure it
LONG = 32768  # tokens of a request where a configuration does not say how long one may be
BLOCK = 64  # tokens of a block on GPUs
BLOCK_16_BITS = 16  # of FlashAttention's, and of FP8's
STATES = 2  # of a request in each layer that has them: vLLM keeps the last one at a block's end too, for prefix hits
# of layers by their types: which keep tokens, and which a state
ATTENTION = {"full_attention": "full", "attention": "full", "hybrid": "full", "sliding_attention": "sliding"}
_STATEFUL = frozenset({"linear_attention", "mamba", "conv", "hybrid"})
KINDS = frozenset({*ATTENTION, *_STATEFUL, "mlp", "moe"})


@dataclass(frozen=True)
class Cache:
    """What one format keeps of requests.

    Attributes:
        token: bytes of a token, over the layers that keep all tokens
        request: bytes of a request besides: sliding windows, and states of recurrent layers, as large as a page each
        block: tokens of a block where vLLM makes it as large as a state; else 1, as blocks are short
    """

    token: int
    request: int
    block: int = 1

    def of_request(self, context: int) -> int:
        """Bytes of a request of so many tokens."""
        return -(-context // self.block) * self.block * self.token + self.request

    def tokens(self, memory: float, context: int) -> int:
        """How many of them fit, in requests of `context` tokens."""
        return int(memory // (self.of_request(context) / context))


@dataclass(frozen=True)
class Model:
    """What a cache depends on.

    Attributes:
        weights: bytes
        context: tokens of the longest request
        int2, fp8, bf16: the cache in each format
        slot: bytes of one block's BF16 copies over all layers
    """

    weights: int
    context: int
    int2: Cache
    fp8: Cache
    bf16: Cache
    slot: int

    @classmethod
    def of(cls, hf_config: Any, weights: int, sidecar: Sidecar | None = None) -> "Model":
        """By a transformers configuration.

        Args:
            weights: bytes of the checkpoint
            sidecar: says which layers have 16 bits, and how the others are packed; None: all, as calibration does it

        Raises:
            UnsupportedError, ConfigError: the model has no INT2 cache.
        """
        model = ModelFingerprint.of(hf_config)
        config = hf_config.get_text_config()
        types = layer_types(config)
        kinds = [ATTENTION.get(kind, "") for kind in types]
        context = getattr(config, "max_position_embeddings", None) or LONG
        kept = min(context, getattr(config, "sliding_window", None) or context)
        stateful = sum(kind in _STATEFUL for kind in types)
        state = _state_bytes(config) if stateful else 0
        elements = 2 * model.num_kv_heads * model.head_size  # of a token in a layer
        usual = PageLayout(model.head_size, BLOCK)
        layouts = dict.fromkeys(range(len(kinds)), usual)
        if sidecar:
            layouts = {index: layer.layout(BLOCK, sidecar.group_size) for index, layer in sidecar.layers.items()}
        packed = [index in layouts and bool(kind) for index, kind in enumerate(kinds)]
        slot_layout = next(iter(layouts.values()), usual)  # copies are the same for all bits

        if state and "full" not in kinds:
            raise UnsupportedError("no layer attends to all tokens: there is no cache that grows with the context")

        def cache(unit: int, layer: Callable[[int], int]) -> Cache:
            """By the fewest tokens of a block, and the bytes of a token in each layer."""
            bytes_of = Counter[str]()
            for index, kind in enumerate(kinds):
                bytes_of[kind] += layer(index)
            if not state:
                return Cache(bytes_of["full"], kept * bytes_of["sliding"])
            token = layer(kinds.index("full"))  # of a layer; in hybrid models all are alike
            block = unit * -(-state // (unit * token))
            return Cache(bytes_of["full"], STATES * stateful * block * token, block)

        return cls(
            weights,
            context,
            int2=cache(
                BLOCK, lambda index: model.num_kv_heads * layouts[index].token_bytes if packed[index] else 2 * elements
            ),
            fp8=cache(BLOCK_16_BITS, lambda index: elements),
            bf16=cache(BLOCK_16_BITS, lambda index: 2 * elements),
            slot=sum(packed) * HotPool.slot_bytes(slot_layout, model.num_kv_heads, torch.bfloat16),
        )


def layer_types(config: Any) -> list[str]:
    """What each layer of a text configuration is; see KINDS."""
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


@dataclass(frozen=True)
class Capacity:
    """What some GPUs hold together.

    Attributes:
        gpu: GB of each
        gpus: how many, the smallest power of two that leaves room for a cache
        memory: bytes left for the cache
        int2, fp8, bf16: tokens
        requests: that keep their whole windows in BF16 at a time
    """

    gpu: int
    gpus: int
    memory: int
    int2: int
    fp8: int
    bf16: int
    requests: int


def capacity(model: Model, gpu: int, options: OscarConfig) -> Capacity:
    """Of GPUs with `gpu` GB: as many as the weights need."""
    usable = UTILISATION * gpu * GB
    each = usable - min(OVERHEAD, usable / 2)
    gpus = 1
    while gpus * each - model.weights < 0.1 * gpus * each:  # less than that is no room to serve in
        gpus *= 2
    memory = int(gpus * each - model.weights)
    contract = HotContract(options.sink, options.window, BLOCK)
    at_a_time = MAX_NUM_SEQS if gpu * GB >= LARGE else MAX_NUM_SEQS_SMALL
    slots = min(int(options.pool_share * memory) // model.slot, at_a_time * contract.slots_per_request)
    return Capacity(
        gpu,
        gpus,
        memory,
        int2=model.int2.tokens(memory - slots * model.slot, model.context),
        fp8=model.fp8.tokens(memory, model.context),
        bf16=model.bf16.tokens(memory, model.context),
        requests=slots // (contract.sink_blocks + contract.tail_blocks),
    )


def weight_bytes(model: str, revision: str | None = None) -> int | None:
    """Bytes of a checkpoint's tensors, from its index or its files' headers; None: it has no safetensors files.

    Args:
        model: folder or hub id, of which at most an index or a header is fetched
    """
    folder = Path(model)
    if not folder.is_dir():
        return _weight_bytes_on_the_hub(model, revision)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return int(json.loads(index.read_text())["metadata"]["total_size"])
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_tensor_bytes, files)) if files else None


def _tensor_bytes(file: Path) -> int:
    """What is behind the header of a safetensors file."""
    with file.open("rb") as opened:
        (header,) = struct.unpack("<Q", opened.read(8))
    return file.stat().st_size - 8 - int(header)


def _weight_bytes_on_the_hub(model: str, revision: str | None) -> int | None:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, NotASafetensorsRepoError

    try:
        index = Path(hf_hub_download(model, "model.safetensors.index.json", revision=revision))
        return int(json.loads(index.read_text())["metadata"]["total_size"])
    except EntryNotFoundError:
        pass
    if isinstance(cached := try_to_load_from_cache(model, "model.safetensors", revision=revision), str):
        return _tensor_bytes(Path(cached))
    try:
        files = get_safetensors_metadata(model, revision=revision).files_metadata.values()
    except NotASafetensorsRepoError:
        return None
    return sum(max(tensor.data_offsets[1] for tensor in file.tensors.values()) for file in files)


def _state_bytes(config: Any) -> int:
    """State of a request in one layer, as vLLM keeps it: the last inputs of its convolution in 16 bits, and, but for
    LFM2, a matrix for each head of gated linear attention (Qwen3-Next and later) or Mamba-2.

    Raises:
        UnsupportedError: layers of another kind.
    """

    def first(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    element = 4 if "float32" in (first("mamba_ssm_dtype"), first("mamba_ssm_cache_dtype")) else 2
    if values := first("linear_num_value_heads"):
        values *= config.linear_value_head_dim
        channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
        return int(2 * channels * (config.linear_conv_kernel_dim - 1) + element * values * config.linear_key_head_dim)
    if values := first("mamba_n_heads", "mamba_num_heads"):
        values *= first("mamba_d_head", "mamba_head_dim")
        size = first("mamba_d_state", "ssm_state_size")
        channels = values + 2 * first("mamba_n_groups", "n_groups") * size
        return int(2 * channels * (first("mamba_d_conv", "conv_kernel") - 1) + element * values * size)
    if width := first("conv_L_cache"):
        return int(2 * config.hidden_size * (width - 1))
    raise UnsupportedError(f"{type(config).__name__}: the size of its layers' states is not known")
