"""The sidecar: one safetensors file with each layer's (mean, T), encoder and metric. docs/sidecar.md is the format.

Everything a reader relies on is checked at load, in a fixed order: the file, its metadata, the model, names, dtypes,
shapes, finiteness, and last the linear algebra. A `Sidecar` that exists is therefore usable.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors

from vllm_oscar.errors import (
    SidecarCorruptError,
    SidecarError,
    SidecarMismatchError,
    SidecarNonFiniteError,
    SidecarNotFoundError,
    SidecarNotOrthogonalError,
    SidecarShapeError,
    SidecarSingularError,
    UnsupportedError,
)
from vllm_oscar.page_layout import KEY_BITS, VALUE_BITS, PageLayout, group_sizes
from vllm_oscar.rotation import MAX_CONDITION, grouped_hadamard
from vllm_oscar.turning import TurningMean

FORMAT_VERSIONS = (1, 2)  # 2 states the bits of each tensor; in 1 all are 2
METADATA_KEY = "vllm_oscar"
FILE_NAME = "oscar/rotations.safetensors"  # a folder of its own: vLLM loads every *.safetensors file as weights
METHODS = ("aware", "reference", "hadamard")
ORTHOGONAL_METHODS = ("reference", "hadamard")
ENCODERS = ("ls", "metric", "minmax")
GRANULARITIES = ("head", "layer")
INVERSE_TOLERANCE = 1e-5  # of |T B - I|, largest element
ORTHOGONAL_TOLERANCE = 1e-4  # of |T'T - I|, largest element; fp32 rotations stay below 1e-5
METRIC_ASYMMETRY = 1e-5  # of |G - G'| relative to |G|, largest elements
MAX_TURNING_PAIRS = 8  # of a layer: what the attention kernel adds to a logit is a product of that depth

_KINDS = ("mean", "transform", "metric", "spectrum")  # of tensors in the file, besides the two of a mean that turns
_OF_TRANSFORMS = ("transform", "metric", "spectrum")  # one for all heads where `per` is "layer"

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[^/]+")  # a hub model's folder in Hugging Face's cache
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelFingerprint:
    """What a calibration depends on in the model's configuration.

    Attributes:
        architecture: the configuration's model_type ("llama"); that of the text part where it is nested
        num_layers, num_heads, num_kv_heads, head_size: of the decoder
        rope: RoPE parameters, one flat dict, or one dict for each layer type where they differ
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: dict[str, Any]

    @classmethod
    def of(cls, hf_config: Any) -> "ModelFingerprint":
        """Fingerprint of a transformers configuration.

        Raises:
            UnsupportedError: the configuration does not describe a decoder with uniform heads.
        """
        config = getattr(hf_config, "text_config", None) or hf_config
        heads = getattr(config, "num_attention_heads", None)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise UnsupportedError(
                f"{type(config).__name__} does not state one number of heads for all layers; use --kv-cache-dtype auto"
            )
        return cls(
            architecture=config.model_type,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rope=_normalised_rope(config),
        )

    def differences(self, other: "ModelFingerprint") -> list[str]:
        """One line for each field that differs."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{name}: {_shown(mine[name])} here, {_shown(theirs[name])} there"
            for name in mine
            if mine[name] != theirs[name]
        ]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


# `type` is the old name of rope_type; the original length is filled in by some readers and not by others; M-RoPE turns
# text, which a calibration reads, like RoPE, and vLLM forgets it where only text is served
_NOT_COMPARED = ("type", "original_max_position_embeddings", "mrope_section", "mrope_interleaved")


def _normalised_rope(config: Any) -> dict[str, Any]:
    """RoPE parameters in one form, whichever generation of transformers wrote the configuration."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        theta = getattr(config, "rope_theta", None)
        parameters = {"rope_theta": theta, **(getattr(config, "rope_scaling", None) or {})}
        local_theta = getattr(config, "rope_local_base_freq", None)
        if local_theta is not None:  # Gemma-3: scaling is for the full-attention layers only
            parameters = {"full_attention": parameters, "sliding_attention": {"rope_theta": local_theta}}
    rotated_share = getattr(config, "partial_rotary_factor", None)

    def flat(given: dict[str, Any]) -> dict[str, Any]:
        kept = {
            name: [float(v) for v in value] if isinstance(value, list | tuple) else value
            for name, value in given.items()
            if value is not None and name not in _NOT_COMPARED
        }
        kind = given.get("rope_type") or given.get("type")
        kept["rope_type"] = "default" if kind in (None, "mrope") else kind
        kept.setdefault("partial_rotary_factor", rotated_share or 1.0)
        return {name: float(v) if type(v) is int else v for name, v in sorted(kept.items())}

    if all(isinstance(value, dict) for value in parameters.values()):
        by_type = {name: flat(value) for name, value in sorted(parameters.items())}
        first = next(iter(by_type.values()))
        return first if all(value == first for value in by_type.values()) else by_type
    return flat(parameters)


@dataclass(frozen=True)
class TensorCalibration:
    """How the keys or the values of one layer are stored: y = (x - mean) transform, then `encoder`.

    Attributes:
        mean: float32 (heads, D)
        transform: T, float32 (heads, D, D), per head also where the file holds one for all
        encoder: "ls", "metric" or "minmax"
        gain: decode-side stretch of each row about its mean code
        bits: of a code
        clip: share of a row's magnitudes that `minmax` keeps exactly; 1: no clip
        metric: G, float32 (heads, D, D), what the `metric` encoder minimises; None for the others
        spectrum: float32 (heads, D), for inspection: eigenvalues of the covariance that T was made from
        turning: what the keys' mean has besides `mean`, vectors in float32; None: nothing
    """

    mean: torch.Tensor
    transform: torch.Tensor
    encoder: str
    gain: float = 1.0
    clip: float = 1.0
    metric: torch.Tensor | None = None
    spectrum: torch.Tensor | None = None
    turning: TurningMean | None = None
    bits: int = 2

    def shard(self, start: int, stop: int, device: torch.device | None = None) -> "TensorCalibration":
        """KV heads start to stop - 1, on a device."""
        parts: dict[str, Any] = {
            name: tensor[start:stop].to(device) for name, tensor in self.named().items() if name in _KINDS
        }
        return replace(self, **parts, turning=self.turning and self.turning.shard(start, stop, device))

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors that exist, by their name in the file."""
        tensors = {name: getattr(self, name) for name in _KINDS}
        if self.turning:
            tensors |= {"frequency": self.turning.frequency, "turning": self.turning.vectors}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(frozen=True)
class LayerCalibration:
    """Keys and values of one layer."""

    key: TensorCalibration
    value: TensorCalibration

    def layout(self, block_size: int, group_size: int) -> PageLayout:
        """Of the layer's pages.

        Raises:
            ConfigError: there is none for these sizes and the layer's bits.
        """
        return PageLayout(self.key.mean.shape[-1], block_size, group_size, self.key.bits, self.value.bits)

    def shard(self, start: int, stop: int, device: torch.device | None = None) -> "LayerCalibration":
        """KV heads start to stop - 1, for one tensor-parallel rank."""
        return LayerCalibration(self.key.shard(start, stop, device), self.value.shard(start, stop, device))


@dataclass(frozen=True, eq=False)
class Sidecar:
    """A model's calibration.

    Attributes:
        layers: by the index in the layer's name
        fingerprint: the model it was made for
        method: "aware", "reference" or "hadamard"
        group_size: channels that share a scale and an offset, as calibrated for
        sink, window: BF16 tokens that calibration left out
        per: "head" or "layer": whether KV heads have transforms of their own
        absent: layers that are left out on purpose; every other one is in `layers`
        heads: KV heads that `layers` hold; None: all of the model's
        metadata: how it was made (data digest, sequences, tokens, ...): informative, any JSON
    """

    layers: dict[int, LayerCalibration]
    fingerprint: ModelFingerprint
    method: str
    group_size: int
    sink: int
    window: int
    per: str = "head"
    absent: tuple[int, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    heads: range | None = None

    def layouts(self, block_size: int) -> list[PageLayout]:
        """Of the layers' pages, in order."""
        return [layer.layout(block_size, self.group_size) for _, layer in sorted(self.layers.items())]

    @property
    def bits_per_element(self) -> float:
        """Stored bits for an element, scales and offsets counted, on average over the layers."""
        bits = [layout.bits_per_element for layout in self.layouts(64)]  # the same for every block size
        return sum(bits) / len(bits)

    @property
    def bits_in_words(self) -> str:
        """The same, and the layers' least and most where they differ, for people."""
        bits = [layout.bits_per_element for layout in self.layouts(64)]
        ranging = f" ({min(bits):.4g} to {max(bits):.4g})" if min(bits) < max(bits) else ""
        return f"{self.bits_per_element:.4g} bits{ranging}"

    @classmethod
    def hadamard(
        cls, fingerprint: ModelFingerprint, group_size: int = 0, sink: int = 64, window: int = 256
    ) -> "Sidecar":
        """No calibration: m = 0 and a plain Hadamard matrix for every layer (group_size 0: the whole head)."""
        heads, head_size = fingerprint.num_kv_heads, fingerprint.head_size
        group_size = group_size or head_size
        tensor = TensorCalibration(
            mean=torch.zeros(heads, head_size),
            transform=grouped_hadamard(head_size, group_size).float().expand(heads, -1, -1),
            encoder="ls",
        )
        layers = {index: LayerCalibration(tensor, tensor) for index in range(fingerprint.num_layers)}
        return cls(layers, fingerprint, "hadamard", group_size, sink, window, per="layer")

    @classmethod
    def load(cls, path: str | Path, expected: ModelFingerprint | None = None, heads: range | None = None) -> "Sidecar":
        """Read and validate a sidecar.

        Args:
            path: of the file
            expected: the model it must have been made for; None: any
            heads: KV heads to keep, as a tensor-parallel rank has them; None: all. All of the file is validated

        Raises:
            SidecarError: a subclass that says what is wrong and what to do.
        """
        path = Path(path)
        if not path.is_file():
            raise SidecarNotFoundError(f"{path}: no such file")
        try:
            before = _identity(path)  # the last check says that it was one file all the time
            with ThreadPoolExecutor(1) as beside, safe_open(path, framework="pt") as file:
                description = _Description.parse(file.metadata() or {})
                if expected is not None:
                    description.check_model(expected)
                names = list(file.keys())
                description.check_names(set(names))
                # before anything is read: a file cannot ask for more memory than its model's sidecar takes
                description.check_shapes({name: file.get_slice(name) for name in names})
                digest = beside.submit(_digest, path)
                kept: dict[str, torch.Tensor] = {}
                for own in _by_layer(names):
                    tensors = {name: file.get_tensor(name) for name in own}
                    _check_finite(tensors)
                    _check_algebra(tensors, orthogonal=description.method in ORTHOGONAL_METHODS)
                    # cloned: the file is memory-mapped, and may be replaced while we live
                    kept |= {name: description.held(name, tensor, heads).clone() for name, tensor in tensors.items()}
                found = digest.result()
                if _identity(path) != before:
                    raise SidecarCorruptError("replaced while it was read; start again")
        except SidecarError as error:
            raise type(error)(f"{path}: {error}") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise SidecarCorruptError(f"{path}: not a whole safetensors file ({error}); calibrate again") from error
        return description.sidecar(kept, found, heads)

    def save(self, path: str | Path) -> "Sidecar":
        """Write to a temporary file, validate that by loading it, rename it; what was at `path` survives a failure.

        Returns:
            The sidecar as it was read back.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(self.serialised())
                file.flush()
                os.fsync(file.fileno())
            written = Sidecar.load(temporary, self.fingerprint)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return written

    def shard(self, index: int, heads: range, device: torch.device | None = None) -> LayerCalibration:
        """Some KV heads of a layer, on a device; they must be among those that are held."""
        first = heads.start - (self.heads.start if self.heads else 0)
        return self.layers[index].shard(first, first + len(heads), device)

    @cached_property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the file (of what `save` would write, where there is no file)."""
        return hashlib.sha256(self.serialised()).hexdigest()

    def serialised(self) -> bytes:
        """The file's content."""
        tensors = {}
        for index, letter, calibration in self._tensors():
            for name, tensor in calibration.named().items():
                shared = self.per == "layer" and name in _OF_TRANSFORMS
                kept = tensor[:1] if shared else tensor
                tensors[f"layers.{index}.{letter}.{name}"] = kept.detach().float().cpu().clone().contiguous()
        # files of 2 bits stay what they were, to the byte, and readable for versions that know nothing else
        dialled = any(c.bits != 2 for _, _, c in self._tensors())
        description = {
            "format_version": 2 if dialled else 1,
            "method": self.method,
            "per": self.per,
            "group_size": self.group_size,
            "sink": self.sink,
            "window": self.window,
            "fingerprint": asdict(self.fingerprint),
            "absent_layers": list(self.absent),
            "encoders": {
                f"{index}.{letter}": {"encoder": c.encoder, "gain": c.gain, "clip": c.clip}
                | ({"bits": c.bits} if dialled else {})
                for index, letter, c in self._tensors()
            },
            "calibration": self.metadata,
        }
        return to_safetensors(tensors, {METADATA_KEY: json.dumps(description, sort_keys=True, allow_nan=False)})

    def _tensors(self) -> Iterator[tuple[int, str, TensorCalibration]]:
        for index, layer in sorted(self.layers.items()):
            yield index, "k", layer.key
            yield index, "v", layer.value


@dataclass(frozen=True)
class _Description:
    """The metadata of a file: what `Sidecar` has besides tensors, and which tensors there must be."""

    fingerprint: ModelFingerprint
    method: str
    per: str
    group_size: int
    sink: int
    window: int
    absent: tuple[int, ...]
    encoders: dict[str, dict[str, Any]]  # "3.k" -> encoder, gain, clip, bits
    calibration: dict[str, Any]

    @classmethod
    def parse(cls, header: dict[str, str]) -> "_Description":
        """From the safetensors metadata."""
        if METADATA_KEY not in header:
            raise SidecarCorruptError(f"no {METADATA_KEY!r} metadata; this is some other safetensors file")
        try:
            given = json.loads(header[METADATA_KEY])
        except (json.JSONDecodeError, RecursionError) as error:
            raise SidecarCorruptError(f"the metadata is not JSON ({error}); calibrate again") from error
        version = given.get("format_version") if isinstance(given, dict) else None
        if type(version) is not int or version not in FORMAT_VERSIONS:
            raise SidecarCorruptError(
                f"format version {version!r:.40}, not one of {FORMAT_VERSIONS}; calibrate again, or upgrade vllm-oscar"
            )
        model = _field(given, "fingerprint", dict)
        fingerprint = ModelFingerprint(
            architecture=_field(model, "architecture", str),
            num_layers=_count(model, "num_layers", 1),
            num_heads=_count(model, "num_heads", 1),
            num_kv_heads=_count(model, "num_kv_heads", 1),
            head_size=_count(model, "head_size", 1),
            rope=_field(model, "rope", dict),
        )
        absent = tuple(_field(given, "absent_layers", list))
        if any(type(i) is not int or not 0 <= i < fingerprint.num_layers for i in absent):
            raise SidecarCorruptError("metadata: absent_layers must be layer numbers; calibrate again")
        group_size = _count(given, "group_size", 1)
        if group_size not in (allowed := group_sizes(fingerprint.head_size)):
            raise SidecarCorruptError(
                f"metadata: group_size {group_size} at head size {fingerprint.head_size}; calibrate again with one of "
                f"{allowed}"
            )
        encoders = {}
        for tensor in (settings := _field(given, "encoders", dict)):
            own = _field(settings, tensor, dict)
            encoder, gain = _choice(own, "encoder", ENCODERS), _number(own, "gain", 0.5, 2.0)
            if encoder == "metric" and tensor.endswith(".v"):
                raise SidecarCorruptError(f"metadata: {tensor}: values have no metric encoder; calibrate with ls")
            if encoder == "minmax" and gain != 1:
                raise SidecarCorruptError(f"metadata: {tensor}: minmax has no gain; calibrate with 1, or with ls")
            bits = 2 if version == 1 else _count(own, "bits", 2)
            if bits not in (allowed := VALUE_BITS if tensor.endswith(".v") else KEY_BITS):
                raise SidecarCorruptError(f"metadata: {tensor}: {bits} bits, not one of {allowed}; calibrate again")
            encoders[tensor] = {"encoder": encoder, "gain": gain, "clip": _number(own, "clip", 0.5, 1.0), "bits": bits}
        return cls(
            fingerprint=fingerprint,
            method=_choice(given, "method", METHODS),
            per=_choice(given, "per", GRANULARITIES),
            group_size=group_size,
            sink=_count(given, "sink", 0),
            window=_count(given, "window", 0),
            absent=absent,
            encoders=encoders,
            calibration=_field(given, "calibration", dict),
        )

    @property
    def present(self) -> list[int]:
        """The layers that have tensors."""
        absent = set(self.absent)
        return [index for index in range(self.fingerprint.num_layers) if index not in absent]

    def check_model(self, expected: ModelFingerprint) -> None:
        """The file was made for this model."""
        if differences := self.fingerprint.differences(expected):
            raise SidecarMismatchError(
                "made for another model: " + "; ".join(differences) + " (file, then model); calibrate this model"
            )

    def check_names(self, names: set[str]) -> None:
        """Every tensor that is called for is there, and nothing else."""
        layers = self.fingerprint.num_layers - len(set(self.absent))
        if len(names) < 4 * layers:  # means and transforms; before anything is made for so many layers
            raise SidecarCorruptError(
                f"tensors are missing: {layers} layers take {4 * layers} at least, not {len(names)}; calibrate again"
            )
        tensors = {f"{index}.{letter}" for index in self.present for letter in "kv"}
        if odd := sorted(tensors ^ self.encoders.keys()):
            raise SidecarCorruptError(f"metadata: `encoders` and the layers disagree about {odd[0]}; calibrate again")
        required = {f"layers.{tensor}.{kind}" for tensor in tensors for kind in ("mean", "transform")}
        required |= {f"layers.{tensor}.metric" for tensor in tensors if self.encoders[tensor]["encoder"] == "metric"}
        optional = {f"layers.{tensor}.spectrum" for tensor in tensors}
        for index in self.present:  # of keys only, both or none
            pair = {f"layers.{index}.k.{kind}" for kind in ("frequency", "turning")}
            (required if pair & names else optional).update(pair)
        if missing := sorted(required - names):
            raise SidecarCorruptError(f"tensor {missing[0]} is missing; calibrate again")
        if unknown := sorted(names - required - optional):
            raise SidecarCorruptError(f"unknown tensor {unknown[0]!r}; calibrate again, or upgrade vllm-oscar")

    def check_shapes(self, tensors: dict[str, Any]) -> None:
        """Dtype and shape of every tensor, by its slice of the file (safetensors' PySafeSlice)."""
        heads, head_size = self.fingerprint.num_kv_heads, self.fingerprint.head_size
        transforms = heads if self.per == "head" else 1
        shapes: dict[str, tuple[int, ...]] = {
            "mean": (heads, head_size),
            "transform": (transforms, head_size, head_size),
            "metric": (transforms, head_size, head_size),
            "spectrum": (transforms, head_size),
        }
        for name, tensor in tensors.items():
            layer, _, kind = name.rpartition(".")
            pairs = 0
            if kind not in shapes:
                pairs = min(math.prod(tensors[f"{layer}.frequency"].get_shape()), MAX_TURNING_PAIRS)
            shape = (shapes | {"frequency": (pairs,), "turning": (heads, pairs, 2, head_size)})[kind]
            if tensor.get_dtype() != "F32":
                raise SidecarCorruptError(f"{name} is {tensor.get_dtype()}, not float32; calibrate again")
            if tuple(tensor.get_shape()) != shape:
                raise SidecarShapeError(f"{name} has shape {tuple(tensor.get_shape())}, not {shape}; calibrate again")

    def held(self, name: str, tensor: torch.Tensor, heads: range | None) -> torch.Tensor:
        """What some heads need of a tensor of the file."""
        kind = name.rpartition(".")[2]
        shared = kind == "frequency" or (self.per == "layer" and kind in _OF_TRANSFORMS)
        return tensor if heads is None or shared else tensor[heads.start : heads.stop]

    def sidecar(self, tensors: dict[str, torch.Tensor], digest: str, held: range | None) -> Sidecar:
        """The sidecar of the heads that are held, transforms expanded to one for each of them."""
        heads = self.fingerprint.num_kv_heads if held is None else len(held)

        def calibration(tensor: str) -> TensorCalibration:
            kinds = (*_KINDS, "frequency", "turning")
            own = {kind: tensors[name] for kind in kinds if (name := f"layers.{tensor}.{kind}") in tensors}
            turning = TurningMean(own.pop("frequency"), own.pop("turning")) if "turning" in own else None
            per_head: dict[str, Any] = {kind: part.expand(heads, *part.shape[1:]) for kind, part in own.items()}
            return TensorCalibration(turning=turning, **per_head, **self.encoders[tensor])

        loaded = Sidecar(
            layers={i: LayerCalibration(calibration(f"{i}.k"), calibration(f"{i}.v")) for i in self.present},
            fingerprint=self.fingerprint,
            method=self.method,
            group_size=self.group_size,
            sink=self.sink,
            window=self.window,
            per=self.per,
            absent=self.absent,
            metadata=self.calibration,
            heads=held,
        )
        loaded.__dict__["digest"] = digest  # fills the cached property
        return loaded


def _field(given: dict[str, Any], name: str, kind: type) -> Any:
    value = given.get(name)
    if type(value) is not kind:
        raise SidecarCorruptError(f"metadata: {name} must be a {kind.__name__}, not {value!r:.80}; calibrate again")
    return value


def _count(given: dict[str, Any], name: str, low: int) -> int:
    value: int = _field(given, name, int)
    if not low <= value < 1 << 31:
        raise SidecarCorruptError(f"metadata: {name} is {value}; calibrate again")
    return value


def _choice(given: dict[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value: str = _field(given, name, str)
    if value not in choices:
        raise SidecarCorruptError(f"metadata: {name} is {value!r:.80}, not one of {choices}; calibrate again")
    return value


def _number(given: dict[str, Any], name: str, low: float, high: float) -> float:
    value: float = _field(given, name, float)
    if not low <= value <= high:  # False for NaN
        raise SidecarCorruptError(f"metadata: {name} is {value}, not within {low} to {high}; calibrate again")
    return value


@contextmanager
def single_threaded() -> Iterator[None]:
    """LAPACK on many small matrices: its own threads make that several times slower on a busy machine, where MKL's have
    even been seen to hang ("Parameter 6 was incorrect on entry to DLASWP")."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _identity(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _by_layer(names: list[str]) -> list[list[str]]:
    """Names of tensors, layer by layer."""
    layers: dict[str, list[str]] = {}
    for name in sorted(names):
        layers.setdefault(name.split(".")[1], []).append(name)
    return list(layers.values())


def _check_finite(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not (tensor.sum().isfinite() or tensor.isfinite().all()):  # a sum is quicker, but may overflow
            raise SidecarNonFiniteError(f"{name} holds NaN or infinity; calibrate again")


@single_threaded()
def _check_algebra(tensors: dict[str, torch.Tensor], orthogonal: bool) -> None:
    """Transforms can be inverted (or are orthogonal), metrics are positive definite."""
    for name, tensor in tensors.items():
        if name.endswith(".transform"):
            (_check_orthogonal if orthogonal else _check_invertible)(name, tensor)
        elif name.endswith(".metric"):
            asymmetry = (tensor - tensor.mT).abs().amax() / tensor.abs().amax()
            if not asymmetry <= METRIC_ASYMMETRY or _indefinite(tensor).any():
                raise SidecarSingularError(f"{name} is not symmetric positive definite; calibrate again")


def _indefinite(matrices: torch.Tensor) -> torch.Tensor:
    """Which symmetric float32 matrices (heads, D, D) are not positive definite: bool (heads,)."""
    bad = torch.linalg.cholesky_ex(matrices).info != 0
    bad[bad.clone()] = torch.linalg.cholesky_ex(matrices[bad].double()).info != 0
    return bad


def _check_orthogonal(name: str, transform: torch.Tensor) -> None:
    error = float((transform.mT @ transform - torch.eye(transform.shape[-1])).abs().max())
    if not error <= ORTHOGONAL_TOLERANCE:
        raise SidecarNotOrthogonalError(f"{name} is not orthogonal (T'T is off by {error:.2g}); calibrate again")


def _check_invertible(name: str, transform: torch.Tensor) -> None:
    """Mostly settled without an inverse: where T'T - |T'T|_F / c^2 I is positive definite, T's condition is below c."""
    gram = transform.mT @ transform
    least = 2 * torch.linalg.matrix_norm(gram) / MAX_CONDITION**2  # twice: float32 errs by less than the other half
    shifted = gram - least[:, None, None] * torch.eye(gram.shape[-1])
    for head in (torch.linalg.cholesky_ex(shifted).info != 0).nonzero()[:, 0].tolist():
        doubtful = transform[head].double()
        inverse, info = torch.linalg.inv_ex(doubtful)
        error = (doubtful @ inverse - torch.eye(len(doubtful), dtype=torch.float64)).abs().max()
        condition = torch.linalg.cond(doubtful)
        if info != 0 or not error <= INVERSE_TOLERANCE or not condition <= MAX_CONDITION:
            raise SidecarSingularError(
                f"{name}, head {head}: not safely invertible (condition number {float(condition):.3g}, "
                f"at most {MAX_CONDITION:g}); calibrate again with more text"
            )


def find_sidecar(model: str, explicit: str | None = None, revision: str | None = None) -> Path:
    """The sidecar of a model: the explicit one, else the one in the model's folder, else the user's own.

    Args:
        model: folder or hub id of the model
        explicit: path of a sidecar, folder that holds one, or hub id of a repository that does
        revision: of the model's hub id, where one is asked for

    Raises:
        SidecarNotFoundError: says how to make one.
    """
    if explicit is not None:
        path = Path(explicit)
        if path.is_dir():
            path = path / FILE_NAME
        if path.is_file():
            return path
        if not path.exists() and _HUB_ID.fullmatch(explicit):
            return _from_hub(explicit)
        raise SidecarNotFoundError(f"{path}: no such sidecar. {_remedy(model, revision)}")
    candidates = (Path(model) / FILE_NAME, cached_path(model, revision))
    for path in candidates:
        if path.is_file():
            return path
    tried = " and ".join(str(path) for path in candidates)
    raise SidecarNotFoundError(f"no OSCAR sidecar for {model} (looked for {tried}). {_remedy(model, revision)}")


def cached_path(model: str, revision: str | None = None) -> Path:
    """Where the user's own sidecar for a model (folder or hub id, and a revision of that) belongs.

    With HF_HUB_OFFLINE vLLM replaces a hub id by the model's folder in Hugging Face's cache: both are one model.
    """
    name = str(Path(model).resolve()) if Path(model).is_dir() else model
    if snapshot := _SNAPSHOT.fullmatch(name):
        name = snapshot[1]
    if revision:
        name += f"@{revision}"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm_oscar" / (re.sub(r"[^A-Za-z0-9._-]+", "--", name).strip("-.") + ".safetensors")


def _remedy(model: str, revision: str | None) -> str:
    command = f"oscar calibrate {model}" + (f" --revision {revision}" if revision else "")
    return (
        f"Make one now: {command}  or let the start make it, once: oscar serve {model}, which is vllm serve with "
        '--additional-config \'{"oscar": {"calibrate": true}}\'; or serve without calibration, at lower quality: '
        '{"oscar": {"rotation": "hadamard"}}'
    )


def _from_hub(repository: str) -> Path:
    from huggingface_hub import hf_hub_download  # only where a hub id is given
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, FILE_NAME))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise SidecarNotFoundError(f"{FILE_NAME} cannot be fetched from {repository} on the hub: {error}") from error
