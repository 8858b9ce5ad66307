"""Held-out text as windows of tokens."""

from typing import Any

import torch

from vllm_oscar.calibrate.data import Corpus, builtin_text, open_corpus, sequences
from vllm_oscar.errors import ConfigError


def held_out(tokenizer: Any, data: str | None, count: int, context: int) -> torch.Tensor:
    """Windows of text, int64 (windows, context).

    Args:
        tokenizer: the model's
        data: text, .jsonl or .parquet file that was not calibrated with; None: the held-out part of the text that
            comes with Python, whose other part calibration uses where it is given no file
        count: windows
        context: tokens of a window

    Raises:
        ConfigError: the text is too short.
    """
    if data is None:
        corpus = Corpus("built-in, held out", [builtin_text("held_out")], separate=False, shuffle=False)
    else:
        corpus = open_corpus(data, tokenizer)
    ids = sequences(corpus, tokenizer, count, context, seed=0).ids
    if len(ids) < count:
        raise ConfigError(f"{corpus.name} fills {len(ids)} windows of {context} tokens, not {count}; use fewer windows")
    return ids
