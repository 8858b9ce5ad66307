"""More bits for some layers' keys: those where they take the most off the loss, up to an average (`--bits auto:2.5`).

A layer's loss is the squared error that its stored keys leave in its attention output, next to the squared norm of the
residual stream that the output is added to. Both come from the layer itself, so that layers can still be measured one
by one. Errors of different layers are taken to add up as noise does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from vllm_oscar.calibrate.refit import Keys, refit
from vllm_oscar.calibrate.solve import Recipe
from vllm_oscar.calibrate.statistics import LayerStatistics
from vllm_oscar.errors import ConfigError
from vllm_oscar.page_layout import KEY_BITS, PageLayout

_FITTED = ("key_refit_transform", "key_loss")  # what `refit` finds, of keys of so many bits


def refits(statistics: LayerStatistics, samples: Sequence[Keys], recipe: Recipe) -> LayerStatistics:
    """`refit` for keys of every number of bits; `fitted` picks one."""
    found: dict[str, torch.Tensor] = {}
    for bits in KEY_BITS:
        own = refit(statistics, samples, replace(recipe, key_bits=bits)).tensors
        found |= {f"{name}.{bits}": own[name] for name in _FITTED}
    return LayerStatistics(statistics.tensors | found)


def fitted(statistics: LayerStatistics, bits: int) -> LayerStatistics:
    """The statistics with what `refits` found for keys of so many bits."""
    return LayerStatistics(statistics.tensors | {name: statistics.tensors[f"{name}.{bits}"] for name in _FITTED})


def losses(statistics: LayerStatistics) -> list[float]:
    """Of one layer after `refits`, by KEY_BITS; only ratios mean something."""
    residual = statistics.tensors["residual"]
    return [float(statistics.tensors[f"key_loss.{bits}"] / residual) for bits in KEY_BITS]


def steps(layout: PageLayout, layers: int, average: float) -> int:
    """How often one layer's keys may get one more bit.

    Args:
        layout: of layers that have the fewest bits
        average: bits of an element, scales and offsets counted

    Raises:
        ConfigError: no layer may, or all may have the most.
    """
    fewest = layout.bits_per_element
    most = replace(layout, key_bits=KEY_BITS[-1]).bits_per_element
    if not fewest < average < most:
        raise ConfigError(
            f"--bits auto:{average:g}: at head size {layout.head_size} an average is above {fewest:g} (k2v2) and "
            f"below {most:g} (k4v2)"
        )
    one_bit = replace(layout, key_bits=layout.key_bits + 1).bits_per_element - fewest
    return int((average - fewest) * layers / one_bit + 1e-6)


def allocated(losses: Mapping[int, Sequence[float]], steps: int) -> dict[int, int]:
    """Bits of each layer's keys: `steps` times, one bit more for the layer whose loss it lowers most.

    Args:
        losses: of each layer, by KEY_BITS
    """
    chosen = dict.fromkeys(losses, 0)

    def gain(layer: int) -> float:
        level = chosen[layer]
        return losses[layer][level] - losses[layer][level + 1]

    for _ in range(steps):
        chosen[max((layer for layer in chosen if chosen[layer] + 1 < len(KEY_BITS)), key=gain)] += 1
    return {layer: KEY_BITS[level] for layer, level in chosen.items()}
