"""Whether the model that is measured is the one in the checkpoint.

Before the layers are taken apart, the model as `from_pretrained` made it runs over the first TOKENS tokens, by its own
forward and with its own attention, in float32: in BF16 it would round the logits, which a key bias makes as large as
thousands. What goes into each layer there, and the logits, are kept. Each measured layer is
then given the same input and has to give the same output, and the states that came through all measured layers have to
give the same logits. What differs by more than rounding ends the calibration: a layer's weights, its mask, what it is
called with, or its attention are not those of the model.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from vllm_oscar.calibrate.capture import attention_function, replaced_forwards
from vllm_oscar.errors import CalibrationError

NAME = "vllm_oscar_plain"  # of the attention function in transformers' registry
TOKENS = 128
UPDATE_SHARE = (
    0.05  # of what a layer adds to a token: an error up to it, and up to one rounding of the sum, is rounding
)
STRAY_TOKENS = 0.1  # share that may differ by more: rounding sends some tokens to other experts
LOGIT_SHARE = 0.25  # of the spread of a token's logits, at the median token, behind all layers
CHANCE_SHARE = 0.8  # of the loss of a model that knows nothing
logger = logging.getLogger("vllm_oscar.calibrate")


@contextmanager
def own_attention(config: Any) -> Iterator[None]:
    """While this is open, the models that share this transformers config attend by their own plain code (`eager`, the
    one that does all of what a model asks for, such as soft caps), in float32."""
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.llama import modeling_llama

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        plain = own or modeling_llama.eager_attention_forward
        return plain(module, query.float(), key.float(), value.float(), *mask, **options)[0].to(query.dtype), None

    AttentionMaskInterface.register(NAME, eager_mask)
    with attention_function(config, NAME, attend):
        yield


class PlainRun:
    """What the whole model did, in a file.

    Attributes:
        tokens: so many of the first sequence
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with safe_open(path, framework="pt") as file:
            self.tokens: int = file.get_slice("logits").get_shape()[0]

    @classmethod
    def record(
        cls, path: Path, whole: nn.Module, config: Any, layers: Sequence[nn.Module], ids: torch.Tensor
    ) -> "PlainRun":
        """Run the model over the first TOKENS of int64 ids (1, length), on its device; keep what it did at `path`.

        Args:
            config: the decoder's
        """
        entered: list[torch.Tensor] = []
        left: list[torch.Tensor] = []

        def noting(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(states: torch.Tensor, *args: Any, **options: Any) -> Any:
                entered.append(states.cpu())
                result = forward(states, *args, **options)
                left[:] = [result[0] if isinstance(result, tuple) else result]
                return result

            return run

        with own_attention(config), replaced_forwards(layers, [noting(layer.forward) for layer in layers]):
            logits = whole(input_ids=ids[:, :TOKENS], use_cache=False).logits[0]
        states = torch.cat([*entered, left[0].cpu()])
        save_file({"states": states, "logits": logits.cpu().contiguous()}, path)
        return cls(path)

    def compare_layer(self, number: int, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raises CalibrationError where a layer, given what went into it, gives something else than it gave.

        Args:
            run: the measured layer, states (1, tokens, hidden) to states
        """
        with safe_open(self._path, framework="pt") as file:
            states = file.get_slice("states")
            entering, expected = states[number : number + 1], states[number + 1]
        error = (run(entering)[0].cpu() - expected).float().norm(dim=-1)
        update = (expected - entering[0]).float().norm(dim=-1)
        rounding = torch.finfo(expected.dtype).eps * expected.float().norm(dim=-1)
        stray = (~(error <= UPDATE_SHARE * update + rounding)).float().mean()  # NaN as well
        if stray > STRAY_TOKENS:
            raise CalibrationError(
                f"layer {number} does not do what it does in the whole model: {stray:.0%} of {self.tokens} tokens "
                f"differ by more than rounding, the median token by {float((error / update).median()):.2g} of what the "
                "layer adds to it. Nothing is written; please report it, with the model's name"
            )

    def compare_logits(self, logits: torch.Tensor) -> None:
        """Raises CalibrationError where the measured layers, one behind the other, end in other logits.

        Args:
            logits: (tokens, vocabulary)
        """
        expected = self._logits()
        spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
        error = float(((logits.cpu().float() - expected).norm(dim=-1) / spread).median())
        if not error <= LOGIT_SHARE:
            raise CalibrationError(
                f"behind all layers the logits of the median token, of {self.tokens}, are {error:.2g} of their spread "
                "away from those of the whole model. Nothing is written; please report it, with the model's name"
            )

    def warn_at_chance(self, ids: torch.Tensor) -> None:
        """Say so where the whole model predicts the text, int64 (length,), no better than by guessing."""
        logits = self._logits()
        loss = float(nn.functional.cross_entropy(logits[:-1], ids[1 : self.tokens]))
        chance = math.log(logits.shape[-1])
        if not loss < CHANCE_SHARE * chance:
            logger.warning(
                "the model predicts the text hardly better than by guessing (%.1f nats a token, guessing has %.1f); "
                "are these its weights, and is this its tokenizer? It is calibrated as it is",
                loss,
                chance,
            )

    def _logits(self) -> torch.Tensor:
        with safe_open(self._path, framework="pt") as file:
            return file.get_tensor("logits").float()
