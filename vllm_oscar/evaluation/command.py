"""oscar eval MODEL: perplexity and KL to the BF16 cache on held-out text, through the real engine."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.methods import NAMES, parse
from vllm_oscar.evaluation.texts import TEXTS

HELP = "measure quality against the BF16 cache"
DEFAULT = ("oscar", "naive")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    names = "; ".join(f"{name}: {text}" for name, text in NAMES.items())
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--data", nargs="+", default=["prose"], metavar="TEXT",
                        help=f"names ({', '.join(TEXTS)}), or text, .jsonl or .parquet files that were not calibrated "
                        "with (default: prose, English)")  # fmt: skip
    parser.add_argument("--sidecar", help="the model's sidecar; without it: where serving looks for it")
    parser.add_argument("--methods", nargs="+", default=DEFAULT, metavar="METHOD",
                        help=f"beside bf16 (default: {' '.join(DEFAULT)}). {names}; NAME=FILE: another sidecar, such "
                        "as one of `oscar calibrate --method reference`")  # fmt: skip
    parser.add_argument("--windows", type=int, default=4, help="of each text (default: 4)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a window (default: 2048)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a picture (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        OscarError: something about the options, the sidecar or the model.
    """
    from transformers import AutoConfig, AutoTokenizer

    from vllm_oscar.evaluation.measure import measure
    from vllm_oscar.evaluation.report import HEAD, line, plot, table
    from vllm_oscar.evaluation.windows import held_out
    from vllm_oscar.sidecar import ModelFingerprint, Sidecar, find_sidecar

    if options.windows < 1:
        raise ConfigError("--windows must be 1 or more")
    fingerprint = ModelFingerprint.of(AutoConfig.from_pretrained(options.model))
    own = Sidecar.load(find_sidecar(options.model, options.sidecar), fingerprint)
    methods = [parse(text, own) for text in options.methods]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = {name: held_out(tokenizer, name, options.windows, options.context) for name in options.data}
    results = []
    for result in measure(options.model, methods, texts):
        results.append(result)
        print(f"{HEAD}\n{line(result)}  ({result.seconds:.0f} s)", file=sys.stderr, flush=True)
    print(json.dumps([asdict(result) for result in results], indent=2) if options.json else table(results))
    if options.plot:
        plot(results, options.plot)
    return 0
