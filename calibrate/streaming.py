"""A model, one decoder layer at a time.

The decoder's own forward runs once for each sequence with layers that only note how they were called; what would have
gone into the first layer is written to a file. Then each layer is loaded, run over all sequences from that file into
another, and dropped. In memory at a time: the embedding or one layer, one sequence's activations, and the attention
statistics (`capture.BLOCK_ELEMENTS`); of one layer, where it is tuned, the keys of refit.SAMPLES sequences and the
attention calls of as many as the caller wants; on disk: two files of sequences x length x hidden size in the run dtype.
That what is measured is the checkpoint's model is checked on the way: `self_check`.
"""

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_oscar.calibrate.capture import Attention, capturing, replaced_forwards
from vllm_oscar.calibrate.dequantize import dequantize, quantization
from vllm_oscar.calibrate.explain import explained
from vllm_oscar.calibrate.refit import SAMPLES, Keys
from vllm_oscar.calibrate.rope import as_served, turning_frequencies
from vllm_oscar.calibrate.self_check import PlainRun
from vllm_oscar.calibrate.statistics import FarSet, LayerStatistics
from vllm_oscar.errors import CalibrationError, ConfigError, UnsupportedError

WEIGHTS = (".safetensors", ".bin", ".json", ".py")  # files that a model is made of
_FAR_POSITION = 1 << 24  # beyond every context
_LOCK = "lock"  # in a state's folder


class Model:
    """A decoder whose layers are made resident one by one.

    Attributes:
        decoder: embedding, layers, rotary embedding; the layers' parameters are on the meta device until `resident`
        device: where everything runs
        whole: the model around the decoder, with its head; None: there is none to check against
        checkpoint: folder of its files; None: it was made in memory
    """

    def __init__(
        self,
        decoder: nn.Module,
        device: torch.device,
        whole: nn.Module | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        self.decoder = decoder
        self.device = device
        self.whole = whole
        self.checkpoint = checkpoint
        self.layers: list[nn.Module] = list(_layers(decoder))

    @classmethod
    @contextmanager
    def opened(
        cls,
        name: str,
        device: torch.device,
        dtype: torch.dtype | None,
        context: int = 0,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Iterator["Model"]:
        """A checkpoint (folder or hub id) with its layers left on disk.

        Args:
            dtype: None: the checkpoint's, BF16 for FP32
            context: tokens of the longest context to serve, where RoPE depends on it
            revision, trust_remote_code: transformers' own

        Raises:
            UnsupportedError: its layers cannot be run one by one.
            CalibrationError: the checkpoint cannot be read, or lacks weights.
        """
        from transformers import AutoConfig
        from transformers.utils import is_accelerate_available

        if not is_accelerate_available():  # it leaves layers on disk
            raise UnsupportedError("accelerate is not installed: pip install 'vllm-oscar[calibrate]'")
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # layers on disk are no surprise
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        config = as_served(config, context)
        text_config = config.get_text_config()
        if dtype is None:
            kept = getattr(text_config, "dtype", None)
            dtype = kept if kept in (torch.bfloat16, torch.float16) else torch.bfloat16
        checkpoint = _folder(name, revision)
        settings = quantization(config)
        # what is quantized, or has other names or shapes in the checkpoint than in the model (experts), is rewritten
        with tempfile.TemporaryDirectory(prefix="vllm_oscar_") as folder:
            source: str | Path = name
            if settings:
                source = Path(folder) / "dequantized"
                dequantize(_downloaded(name, revision), source, settings, dtype)
                for part in (config, text_config):
                    part.__dict__.pop("quantization_config", None)
            with torch.device("meta"), explained(name, "model"):
                auto = auto_class(config)
                skeleton = auto.from_config(config, trust_remote_code=trust_remote_code)
            _layers(skeleton.get_decoder())
            # what the decoder is inside of may want to know where it is
            rest = "disk" if isinstance(skeleton.get_decoder(), type(skeleton.base_model)) else str(device)
            places = _places(skeleton, skeleton.get_decoder(), str(device), rest)
            with explained(name, "weights"):
                model, report = auto.from_pretrained(
                    source,
                    config=config,
                    device_map=places,
                    offload_folder=folder,
                    dtype=dtype,
                    output_loading_info=True,
                    revision=revision,
                    trust_remote_code=trust_remote_code,
                    attn_implementation="eager",  # `own_attention` builds on it
                )
            if missing := sorted(report["missing_keys"]):
                raise CalibrationError(
                    f"{name} lacks {len(missing)} weights of its model, such as {missing[0]}: transformers would make "
                    "them up. Is the checkpoint whole, and of this architecture?"
                )
            yield cls(model.eval().get_decoder(), device, model, checkpoint)

    def files(self) -> list[list[Any]]:
        """Name, size, time and inode of each file of the checkpoint: they change where the weights do."""
        if self.checkpoint is None:
            return []
        found = [(path, path.stat()) for path in sorted(self.checkpoint.iterdir()) if path.suffix in WEIGHTS]
        return [[path.name, status.st_size, status.st_mtime_ns, status.st_ino] for path, status in found]

    @contextmanager
    def resident(self, index: int) -> Iterator[nn.Module]:
        """One layer with its parameters, once: what came from disk is dropped afterwards and cannot be read again."""
        layer = self.layers[index]
        offloaded = any(parameter.is_meta for parameter in layer.parameters())
        if offloaded:
            _materialise(layer, self.device)
        try:
            yield layer
        finally:
            if offloaded:
                layer.to("meta")


def auto_class(config: Any) -> Any:
    """transformers' class that makes models of this configuration; some are known as models of images and text only."""
    import transformers

    with_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if with_images and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _folder(name: str, revision: str | None) -> Path:
    """Where the files of a folder or hub id are."""
    from transformers.utils import cached_file

    return Path(name) if Path(name).is_dir() else Path(cached_file(name, "config.json", revision=revision)).parent


def _downloaded(name: str, revision: str | None) -> Path:
    """A checkpoint's folder, with all of it there."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.json", "*.py"]))


def _layers(decoder: nn.Module) -> nn.ModuleList:
    """Raises UnsupportedError where they cannot be found."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise cannot_stream(decoder, "keeps its layers in another way than as `layers`")
    return layers


def cannot_stream(decoder: nn.Module, why: str) -> UnsupportedError:
    """What is said of a model whose layers cannot be run one by one."""
    return UnsupportedError(
        f"{type(decoder).__name__} {why}, and cannot be calibrated; serve it without calibration, at lower quality "
        '(--additional-config \'{"oscar": {"rotation": "hadamard"}}\'), or with --kv-cache-dtype fp8'
    )


def _places(model: nn.Module, decoder: nn.Module, device: str, rest: str, prefix: str = "") -> dict[str, str]:
    """A device map: what the decoder has besides its layers on `device`, the head on disk unless it is the embedding.

    Args:
        rest: for what is beside the decoder, such as a vision tower
    """
    places: dict[str, str] = {}
    embedding = decoder.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    for name, child in model.named_children():
        path = prefix + name
        if child is decoder:
            parts = {part for part, _ in child.named_children()}
            places |= {f"{path}.{part}": "disk" if part == "layers" else device for part in parts}
        elif any(module is decoder for module in child.modules()):
            places |= _places(child, decoder, device, rest, f"{path}.")
        else:
            tied = any(parameter is embedding.weight for parameter in child.parameters())
            places[path] = device if tied else "disk" if child is head else rest
    return places


def _materialise(layer: nn.Module, device: torch.device) -> None:
    """Read a layer's parameters from where transformers left them, and take accelerate's hooks away."""
    from accelerate.hooks import remove_hook_from_module  # type: ignore[import-untyped]
    from accelerate.utils import align_module_device  # type: ignore[import-untyped]

    for module in layer.modules():
        with align_module_device(module, device):
            loaded = {
                name: parameter.detach().to(device, copy=True)
                for name, parameter in module.named_parameters(recurse=False)
            }
        remove_hook_from_module(module)
        for name, tensor in loaded.items():
            dtype = getattr(module, name).dtype
            setattr(module, name, nn.Parameter(tensor.to(dtype), requires_grad=False))


class HiddenStates:
    """Hidden states of all sequences, (sequences, length, hidden), in a file; one sequence in memory at a time."""

    def __init__(self, path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self._bytes = shape[0] * shape[1] * dtype.itemsize
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def read(self, index: int) -> torch.Tensor:
        """(1, length, hidden) of one sequence, on the CPU."""
        data = bytearray(self._bytes)
        view, offset = memoryview(data), index * self._bytes
        while view:  # one call reads at most 2 GiB
            count = os.preadv(self._file, [view], offset)
            if not count:
                raise EOFError(f"the hidden states of sequence {index} are not all there; delete the state folder")
            view, offset = view[count:], offset + count
        return torch.frombuffer(data, dtype=self.dtype).view(1, *self.shape)

    def write(self, index: int, states: torch.Tensor) -> None:
        """Keep (1, length, hidden) of one sequence."""
        view = memoryview(states.detach().cpu().contiguous().view(torch.uint8).numpy().data).cast("B")
        offset = index * self._bytes
        while view:
            count = os.pwrite(self._file, view, offset)
            view, offset = view[count:], offset + count

    def close(self) -> None:
        os.close(self._file)


class State:
    """A folder that lets a killed calibration go on: statistics of finished layers, hidden states before the next.

    A state of another job (other model, weights, data, options) is thrown away. One process at a time has it, until it
    is closed or dies.

    Raises:
        ConfigError: another process has it.
    """

    def __init__(self, folder: Path, job: dict[str, Any], resume: bool = True) -> None:
        self.folder = folder
        self.job = job
        self.done = -1  # layers finished; -1: not even the embedding
        self._lock = _locked(folder)
        try:
            found = json.loads((folder / "job.json").read_text())
        except (OSError, json.JSONDecodeError):
            found = {}
        if resume and found.get("job") == job:
            self.done = found["done"]
        else:
            for path in folder.iterdir():
                if path.name != _LOCK:
                    path.unlink()

    def __enter__(self) -> "State":
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def hidden(self, layer: int, shape: tuple[int, int], dtype: torch.dtype) -> HiddenStates:
        """The file that a layer's input is in; two files take turns."""
        return HiddenStates(self.folder / f"hidden.{layer % 2}", shape, dtype)

    def finish(self, layer: int, statistics: LayerStatistics | None = None) -> None:
        """A layer (-1: the embedding) is done; survives a kill from here on."""
        if statistics is not None:
            temporary = self.folder / "statistics.tmp"
            save_file({name: t.cpu().contiguous() for name, t in statistics.tensors.items()}, temporary)
            os.replace(temporary, self._statistics(layer))
        self.done = layer + 1
        temporary = self.folder / "job.tmp"
        temporary.write_text(json.dumps({"job": self.job, "done": self.done}))
        os.replace(temporary, self.folder / "job.json")

    def statistics(self, layer: int) -> LayerStatistics:
        """Of a finished layer; empty if it has no attention."""
        return LayerStatistics(load_file(self._statistics(layer)))

    def discard(self) -> None:
        """Delete it: it is not needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def plain_run(self) -> Path:
        """The file of what the model did as a whole (`self_check`)."""
        return self.folder / "plain.safetensors"

    def _statistics(self, layer: int) -> Path:
        return self.folder / f"layer.{layer}.safetensors"


def _locked(folder: Path) -> IO[bytes]:
    """The open lock file of a folder, which is made where it is missing."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = (folder / _LOCK).open("ab")
        except FileNotFoundError:  # another process has just deleted the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).stat()):
                return lock
        except FileNotFoundError:  # ... or the file that we have locked
            pass
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"another calibration is at work in {folder} ({error.strerror}): wait for it, or take another --out"
            ) from error
        lock.close()


@dataclass(frozen=True)
class Call:
    """How the decoder calls a layer, besides the hidden states."""

    options: dict[str, Any]

    def __call__(self, layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
        result = layer(states, **self.options)
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output


Tune = Callable[[LayerStatistics, Sequence[Keys], Sequence[Attention]], LayerStatistics]


@torch.inference_mode()
def collect(
    model: Model,
    ids: torch.Tensor,
    far: FarSet | None,
    state: State,
    progress: Callable[[int], object],
    tune: Tune | None = None,
    calls_kept: int = 0,
) -> None:
    """Run all sequences through all layers; the statistics end up in `state`.

    Args:
        model: opened model
        ids: int64 (sequences, length)
        far: None: only what `reference` needs
        state: goes on where it was left
        progress: called with the number of (sequence, layer) pairs finished
        tune: given a layer's statistics, and of the first sequences its keys and its attention calls: the statistics
            to keep, with what it found
        calls_kept: attention calls that `tune` is given, at most
    """
    calls, first = _record(model, ids[:1])
    fixed, without = _fixed(model, calls, ids[:1]), _without_rope(model, calls)
    shape, dtype = (first.shape[1], first.shape[2]), first.dtype
    if state.done < 0:
        states = state.hidden(0, shape, dtype)
        for index in range(len(ids)):
            own_calls, own = _record(model, ids[index : index + 1])
            _refuse_other_calls(model, calls, own_calls)
            states.write(index, own)
        states.close()
        if model.whole is not None:
            PlainRun.record(state.plain_run, model.whole, model.decoder.config, model.layers, ids[:1].to(model.device))
        state.finish(-1)
    check = None
    if model.whole is not None:
        check = PlainRun(state.plain_run)
        short_calls, _ = _record(model, ids[:1, : check.tokens])
        check.warn_at_chance(ids[0])
    progress(state.done * len(ids))
    _drop_embedding(model)
    for number in range(state.done, len(model.layers)):
        statistics = LayerStatistics()
        keys: list[Keys] = []
        samples: list[Attention] = []
        source, target = state.hidden(number, shape, dtype), state.hidden(number + 1, shape, dtype)
        with model.resident(number) as layer:
            frequency = None
            if without:
                frequency = torch.zeros(0, device=model.device)
            elif fixed[number]:
                frequency = _frequencies(model, layer, calls[number], source.read(0).to(model.device))

            def observe(attention: Attention) -> None:
                weight = statistics.add(attention, far, frequency)  # noqa: B023
                if tune and weight is not None and len(keys) < SAMPLES:  # noqa: B023
                    keys.append(Keys(attention.key, weight.float()))  # noqa: B023
                if len(samples) < calls_kept:  # noqa: B023
                    samples.append(attention)  # noqa: B023

            with capturing(model.decoder.config, observe):
                for index in range(len(ids)):
                    entering = source.read(index).to(model.device)
                    target.write(index, calls[number](layer, entering))
                    if statistics.tensors:
                        statistics.add_residual(entering)
                    progress(1)
            if check:
                with capturing(model.decoder.config, lambda attention: None):
                    check.compare_layer(number, lambda s: short_calls[number](layer, s.to(model.device)))  # noqa: B023
            if tune and statistics.tensors:  # of a layer with attention
                statistics = tune(statistics, keys, samples)
        if check and number == len(model.layers) - 1:
            check.compare_logits(_logits(model, ids[:1, : check.tokens], target.read(0)[:, : check.tokens]))
        source.close()
        target.close()
        state.finish(number, statistics)


def _record(model: Model, ids: torch.Tensor, **options: Any) -> tuple[list[Call], torch.Tensor]:
    """How the decoder calls each layer for (1, length) tokens, and the first layer's input."""
    calls: list[Call] = []
    inputs: list[torch.Tensor] = []

    def note(states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args:
            raise cannot_stream(model.decoder, "gives its layers more than hidden states")
        calls.append(Call(options))
        inputs.append(states)
        return states

    with replaced_forwards(model.layers, [note] * len(model.layers)), capturing(model.decoder.config, _refuse):
        model.decoder(input_ids=ids.to(model.device), use_cache=False, **options)
    if len(calls) != len(model.layers) or any(states is not inputs[0] for states in inputs):
        raise cannot_stream(model.decoder, "does not hand hidden states from one layer to the next")
    return calls, inputs[0]


def _refuse(attention: Attention) -> None:
    raise UnsupportedError("the model has attention outside its decoder layers")


def _refuse_other_calls(model: Model, calls: Sequence[Call], others: Sequence[Call]) -> None:
    """All sequences must have the layers called alike: the first one's calls serve for all."""
    same: set[tuple[int, int]] = set()  # layers mostly share their masks and angles

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            if (id(a), id(b)) not in same and isinstance(b, torch.Tensor) and torch.equal(a, b):
                same.add((id(a), id(b)))
            return (id(a), id(b)) in same
        if isinstance(a, tuple | list):
            return len(a) == len(b) and all(map(equal, a, b))
        return type(a) is type(b)

    for call, other in zip(calls, others, strict=True):
        if call.options.keys() != other.options.keys() or not all(
            equal(value, other.options[name]) for name, value in call.options.items()
        ):
            raise cannot_stream(model.decoder, "gives its layers more of each text than hidden states")


def _fixed(model: Model, calls: Sequence[Call], ids: torch.Tensor) -> list[bool]:
    """Whether the angles that each layer is given for a position are the same whatever comes behind it."""
    given = [call.options.get("position_embeddings") for call in calls]
    if all(angles is None for angles in given):
        return [False] * len(given)
    position = torch.arange(ids.shape[1], device=model.device)[None]
    position[0, -1] = _FAR_POSITION
    far = [call.options.get("position_embeddings") for call in _record(model, ids, position_ids=position)[0]]
    _record(model, ids)  # RoPE that grows with the position is as it was after a short sequence
    return [
        own is not None
        and all(
            torch.equal(a[..., :-1, :], b[..., :-1, :]) for a, b in zip(_tensors(own), _tensors(other), strict=True)
        )
        for own, other in zip(given, far, strict=True)
    ]


def _without_rope(model: Model, calls: Sequence[Call]) -> bool:
    """Whether no layer has RoPE (Granite 4, Nemotron-H): none is given angles, and nothing could make them."""
    given = any(call.options.get("position_embeddings") is not None for call in calls)
    return not given and not any(name.endswith("inv_freq") for name, _ in model.decoder.named_buffers())


def _tensors(angles: Any) -> list[torch.Tensor]:
    parts = angles if isinstance(angles, tuple | list) else [angles]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _frequencies(model: Model, layer: nn.Module, call: Call, states: torch.Tensor) -> torch.Tensor | None:
    """By how much RoPE turns the layer's keys; see `turning_frequencies`."""
    angles = call.options["position_embeddings"]
    if not (isinstance(angles, tuple) and len(angles) == 2):
        return None
    still: dict[str, Any] = {"position_embeddings": (torch.ones_like(angles[0]), torch.zeros_like(angles[1]))}
    if isinstance(position := call.options.get("position_ids"), torch.Tensor):
        still["position_ids"] = torch.zeros_like(position)
    after, before = (_keys(model, layer, Call(call.options | more), states) for more in ({}, still))
    if after is None or before is None:
        return None
    buffers = [buffer for name, buffer in model.decoder.named_buffers() if name.endswith("inv_freq")]
    return turning_frequencies(before, after, [buffer for buffer in buffers if not buffer.is_meta])


class _Seen(Exception):
    """Nothing more of the layer has to run."""


def _keys(model: Model, layer: nn.Module, call: Call, states: torch.Tensor) -> torch.Tensor | None:
    """(heads, T, D), the keys that the layer's attention is called with; None: it has no attention."""
    seen: list[torch.Tensor] = []

    def look(attention: Attention) -> None:
        seen.append(attention.key.clone())
        raise _Seen

    with capturing(model.decoder.config, look), suppress(_Seen):
        call(layer, states)
    return seen[0] if seen else None


def _embedding(model: Model) -> nn.Embedding:
    embedding: nn.Embedding = model.decoder.get_input_embeddings()  # type: ignore[operator]
    return embedding


def _drop_embedding(model: Model) -> None:
    """It is not needed any more, unless it is the head as well."""
    head = model.whole.get_output_embeddings() if model.whole is not None else None  # type: ignore[operator]
    if head is None or head.weight is not _embedding(model).weight:
        _embedding(model).to("meta")


def _logits(model: Model, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """What the rest of the model makes of states (1, T, hidden) behind the last layer: (T, vocabulary)."""
    assert model.whole is not None
    embedding = _embedding(model)
    embedded = torch.zeros(*ids.shape, embedding.embedding_dim, dtype=states.dtype, device=model.device)
    behind = states.to(model.device)
    passing: list[Callable[..., Any]] = [lambda states, **options: states] * (len(model.layers) - 1)
    with replaced_forwards(
        [embedding, *model.layers], [lambda ids: embedded, *passing, lambda states, **options: behind]
    ):
        return model.whole(input_ids=ids.to(model.device), use_cache=False).logits[0]
