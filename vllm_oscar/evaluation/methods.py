"""What `oscar eval` compares. Every OSCAR variant is a sidecar, so that all of them run through the same cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vllm_oscar.cache_layer import LS_KEY_GAIN
from vllm_oscar.errors import ConfigError
from vllm_oscar.sidecar import LayerCalibration, ModelFingerprint, Sidecar, TensorCalibration


@dataclass(frozen=True)
class Method:
    """A KV cache to measure.

    Attributes:
        name: in tables
        kv_cache_dtype: vLLM's option
        sidecar: of an OSCAR cache, else None
    """

    name: str
    kv_cache_dtype: str
    sidecar: Sidecar | None = None


def least_squares_keys(calibrated: Sidecar) -> Sidecar:
    """The same transforms with the cheap key encoder."""

    def cheaper(layer: LayerCalibration) -> LayerCalibration:
        return replace(layer, key=replace(layer.key, encoder="ls", gain=LS_KEY_GAIN, metric=None))

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
OTHER_DTYPES = {"fp8": "vLLM's FP8 cache"}


def parse(text: str, own: Sidecar) -> Method:
    """A method by what the user wrote: a built-in name, another cache dtype, or NAME=SIDECAR.

    Args:
        text: of one method
        own: the model's sidecar

    Raises:
        ConfigError: no such method.
        SidecarError: the file named cannot be used.
    """
    name, equals, path = text.partition("=")
    if equals and name:
        return Method(name, "oscar", Sidecar.load(Path(path), own.fingerprint))
    if name in BUILT_IN:
        return Method(name, "oscar", BUILT_IN[name][1](own))
    if name in OTHER_DTYPES:
        return Method(name, name)
    raise ConfigError(f"no method {text!r}; use {', '.join((*BUILT_IN, *OTHER_DTYPES))} or NAME=SIDECAR")
