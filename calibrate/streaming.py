"""A model, one decoder layer at a time.

The decoder's own forward runs once for each sequence with layers that only note how they were called; what would have
gone into the first layer is written to a file. Then each layer is loaded, run over all sequences from that file into
another, and dropped. In memory at a time: the embedding or one layer, one sequence's activations, and the attention
statistics (`capture.BLOCK_ELEMENTS`); of one layer, where it is tuned, the keys of refit.SAMPLES sequences and the
attention calls of as many as the caller wants; on disk: two files of sequences x length x hidden size in the run dtype.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_oscar.calibrate.capture import Attention, capturing
from vllm_oscar.calibrate.refit import SAMPLES, Keys
from vllm_oscar.calibrate.rope import rope_frequencies
from vllm_oscar.calibrate.statistics import FarSet, LayerStatistics
from vllm_oscar.errors import UnsupportedError


class Model:
    """A decoder whose layers are made resident one by one.

    Attributes:
        decoder: embedding, layers, rotary embedding; the layers' parameters are on the meta device until `resident`
        device: where everything runs
    """

    def __init__(self, decoder: nn.Module, device: torch.device) -> None:
        self.decoder = decoder
        self.device = device
        self.layers: list[nn.Module] = list(decoder.layers)  # type: ignore[arg-type]

    @classmethod
    @contextmanager
    def opened(
        cls,
        name: str,
        device: torch.device,
        dtype: torch.dtype | None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Iterator["Model"]:
        """A checkpoint (folder or hub id) with its layers left on disk. dtype None: the checkpoint's, BF16 for FP32."""
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import is_accelerate_available

        if not is_accelerate_available():  # it leaves layers on disk
            raise UnsupportedError("accelerate is not installed: pip install 'vllm-oscar[calibrate]'")
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # layers on disk are no surprise
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        text_config = config.get_text_config()
        if dtype is None:
            kept = getattr(text_config, "dtype", None)
            dtype = kept if kept in (torch.bfloat16, torch.float16) else torch.bfloat16
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        places = _places(skeleton, skeleton.get_decoder(), str(device))
        # weights whose names or shapes differ between checkpoint and model (experts) are rewritten here
        with tempfile.TemporaryDirectory(prefix="vllm_oscar_") as folder:
            model = AutoModelForCausalLM.from_pretrained(
                name,
                device_map=places,
                offload_folder=folder,
                dtype=dtype,
                revision=revision,
                trust_remote_code=trust_remote_code,
            )
            yield cls(model.eval().get_decoder(), device)

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


def _places(model: nn.Module, decoder: nn.Module, device: str, prefix: str = "") -> dict[str, str]:
    """A device map: what the decoder has besides its layers on `device`, everything else on disk."""
    places: dict[str, str] = {}
    for name, child in model.named_children():
        path = prefix + name
        if child is decoder:
            parts = {part for part, _ in child.named_children()}
            places |= {f"{path}.{part}": "disk" if part == "layers" else device for part in parts}
        elif any(module is decoder for module in child.modules()):
            places |= _places(child, decoder, device, f"{path}.")
        else:
            places[path] = "disk"
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

    A state of another job (other model, data, options) is thrown away.
    """

    def __init__(self, folder: Path, job: dict[str, Any], resume: bool = True) -> None:
        self.folder = folder
        self.job = job
        self.done = -1  # layers finished; -1: not even the embedding
        try:
            found = json.loads((folder / "job.json").read_text())
        except (OSError, json.JSONDecodeError):
            found = {}
        if resume and found.get("job") == job:
            self.done = found["done"]
        else:
            self.discard(folder)
            folder.mkdir(parents=True)

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

    @staticmethod
    def discard(folder: Path) -> None:
        """Delete a state that is not needed any more."""
        shutil.rmtree(folder, ignore_errors=True)

    def _statistics(self, layer: int) -> Path:
        return self.folder / f"layer.{layer}.safetensors"


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
    shape, dtype = (first.shape[1], first.shape[2]), first.dtype
    if state.done < 0:
        states = state.hidden(0, shape, dtype)
        for index in range(len(ids)):
            states.write(index, _record(model, ids[index : index + 1])[1])
        states.close()
        state.finish(-1)
    progress(state.done * len(ids))
    frequencies = [rope_frequencies(model.decoder, call.options) for call in calls]
    for name, part in model.decoder.named_children():
        if name != "layers":
            part.to("meta")  # the embedding is not needed any more
    for number in range(state.done, len(model.layers)):
        statistics = LayerStatistics()
        keys: list[Keys] = []
        samples: list[Attention] = []
        frequency = frequencies[number]

        def observe(attention: Attention) -> None:
            weight = statistics.add(attention, far, frequency)  # noqa: B023
            if tune and weight is not None and len(keys) < SAMPLES:  # noqa: B023
                keys.append(Keys(attention.key, weight.float()))  # noqa: B023
            if len(samples) < calls_kept:  # noqa: B023
                samples.append(attention)  # noqa: B023

        source, target = state.hidden(number, shape, dtype), state.hidden(number + 1, shape, dtype)
        with model.resident(number) as layer, capturing(model.decoder.config, observe):
            for index in range(len(ids)):
                target.write(index, calls[number](layer, source.read(index).to(model.device)))
                progress(1)
            if tune and statistics.tensors:  # of a layer with attention
                statistics = tune(statistics, keys, samples)
        source.close()
        target.close()
        state.finish(number, statistics)


def _record(model: Model, ids: torch.Tensor) -> tuple[list[Call], torch.Tensor]:
    """How the decoder calls each layer for (1, length) tokens, and the first layer's input."""
    calls: list[Call] = []
    inputs: list[torch.Tensor] = []

    def note(states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args:
            raise UnsupportedError(f"{type(model.decoder).__name__} gives its layers more than hidden states")
        calls.append(Call(options))
        inputs.append(states)
        return states

    forwards = [layer.forward for layer in model.layers]
    for layer in model.layers:
        layer.forward = note
    try:
        with capturing(model.decoder.config, _refuse):
            model.decoder(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for layer, forward in zip(model.layers, forwards, strict=True):
            layer.forward = forward
    return calls, inputs[0]


def _refuse(attention: Attention) -> None:
    raise UnsupportedError("the model has attention outside its decoder layers")
