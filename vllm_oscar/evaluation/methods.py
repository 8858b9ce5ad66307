"""What `oscar eval` compares. Every INT2 variant that our pages hold is a sidecar, so that all of them run through the
same cache; what they cannot hold is emulated in vLLM's BF16 cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vllm_oscar.cache_layer import LS_KEY_GAIN
from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.codecs import Codec, Kivi, KVarN, RotatedInt4
from vllm_oscar.sidecar import LayerCalibration, ModelFingerprint, Sidecar, TensorCalibration


@dataclass(frozen=True)
class Method:
    """A KV cache to measure.

    Attributes:
        name: in tables
        kv_cache_dtype: vLLM's option
        bits: stored for an element of a token that is not copied in BF16, scales and offsets counted
        sidecar: of an OSCAR cache, else None
        codec: of an emulated cache, else None
        sink, window: tokens at both ends of a request that are in BF16
    """

    name: str
    kv_cache_dtype: str
    bits: float
    sidecar: Sidecar | None = None
    codec: Codec | None = None
    sink: int = 0
    window: int = 0

    @classmethod
    def of_sidecar(cls, name: str, sidecar: Sidecar) -> "Method":
        """An OSCAR cache."""
        return cls(name, "oscar", sidecar.bits_per_element, sidecar, None, sidecar.sink, sidecar.window)

    @classmethod
    def emulated(cls, name: str, codec: Codec, like: Sidecar) -> "Method":
        """A codec, with the sink and the window of `like`."""
        bits = codec.bits(like.fingerprint.head_size)
        return cls(name, "auto", bits, None, codec, like.sink, like.window)


BF16 = Method("bf16", "auto", 16.0)


def least_squares_keys(calibrated: Sidecar) -> Sidecar:
    """The same transforms with the cheap key encoder."""

    def cheaper(layer: LayerCalibration) -> LayerCalibration:
        return replace(layer, key=replace(layer.key, encoder="ls", gain=LS_KEY_GAIN[layer.key.bits], metric=None))

    return replace(calibrated, layers={index: cheaper(layer) for index, layer in calibrated.layers.items()})


def naive(fingerprint: ModelFingerprint, like: Sidecar) -> Sidecar:
    """Min-max of the plain rows, each token by itself: no rotation, no mean, no clip.

    Args:
        like: whose groups, sink and window are taken
    """
    heads, head_size = fingerprint.num_kv_heads, fingerprint.head_size
    tensor = TensorCalibration(
        torch.zeros(heads, head_size), torch.eye(head_size).expand(heads, -1, -1), encoder="minmax"
    )
    layers = {index: LayerCalibration(tensor, tensor) for index in range(fingerprint.num_layers)}
    # "reference" is the method of orthogonal rotations with min-max; this one is its special case R = 1 without clip
    return Sidecar(layers, fingerprint, "reference", like.group_size, like.sink, like.window, "layer")


BUILT_IN: dict[str, tuple[str, Callable[[Sidecar], Sidecar]]] = {
    "oscar": ("the model's own sidecar", lambda own: own),
    "oscar-ls": ("the same with least-squares keys", least_squares_keys),
    "hadamard": (
        "a Hadamard matrix instead of a calibration, least squares",
        lambda own: Sidecar.hadamard(own.fingerprint, own.group_size, own.sink, own.window),
    ),
    "naive": ("INT2 by min-max of the plain rows", lambda own: naive(own.fingerprint, own)),
}
EMULATED: dict[str, tuple[str, Codec]] = {
    "kivi": ("KIVI, 2 bits in groups of 32 (emulated)", Kivi(32)),
    "kivi-64": ("KIVI with groups of 64, for equal bits at head size 64 (emulated)", Kivi(64)),
    "kvarn": ("KVarN, keys of 4 bits and values of 2 in tiles of 128 tokens (emulated)", KVarN()),
    "int4": ("INT4 after a Hadamard matrix, as SAW-INT4 (emulated)", RotatedInt4()),
}
OTHER_DTYPES = {"fp8": ("vLLM's FP8 cache", 8.0)}
NAMES = {name: text for group in (BUILT_IN, EMULATED, OTHER_DTYPES) for name, (text, _) in group.items()}


def parse(text: str, own: Sidecar) -> Method:
    """A method by what the user wrote: a name, or NAME=SIDECAR.

    Args:
        text: of one method
        own: the model's sidecar

    Raises:
        ConfigError: no such method.
        SidecarError: the file named cannot be used.
    """
    name, equals, path = text.partition("=")
    if equals and name:
        return Method.of_sidecar(name, Sidecar.load(Path(path), own.fingerprint))
    if name in BUILT_IN:
        return Method.of_sidecar(name, BUILT_IN[name][1](own))
    if name in EMULATED:
        return Method.emulated(name, EMULATED[name][1], own)
    if name in OTHER_DTYPES:
        return Method(name, name, OTHER_DTYPES[name][1])
    raise ConfigError(f"no method {text!r}; use {', '.join(NAMES)} or NAME=SIDECAR")
