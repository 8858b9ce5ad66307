"""Held-out text as windows of tokens."""

from typing import Any

import torch

from vllm_oscar.calibrate.data import sequences
from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.texts import open_text


def held_out(tokenizer: Any, data: str, count: int, context: int) -> torch.Tensor:
    """Windows of text, int64 (windows, context).

    Args:
        tokenizer: the model's
        data: a name in `texts`, or a text, .jsonl or .parquet file that was not calibrated with
        count: windows
        context: tokens of a window

    Raises:
        ConfigError: no such text, or one that is too short.
    """
    corpus = open_text(data, tokenizer)
    ids = sequences(corpus, tokenizer, count, context, seed=0).ids
    if len(ids) < count:
        raise ConfigError(f"{corpus.name} fills {len(ids)} windows of {context} tokens, not {count}; use fewer windows")
    return ids
