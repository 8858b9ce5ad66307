"""oscar eval MODEL: what a compressed cache costs, through the real engine: perplexity and KL to the BF16 cache on
held-out text, needles in a haystack, answers."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
    parser.add_argument("--windows", type=int, default=4, help="of each text (default: 4; 0: no texts)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a window (default: 2048)")
    parser.add_argument("--needle", type=int, nargs="+", metavar="TOKENS", default=[],
                        help="also look for needles in contexts of these lengths, such as 1024 2048")  # fmt: skip
    parser.add_argument("--keys", type=int, nargs="+", metavar="TOKENS", default=[],
                        help="also ask for four needles in one answer, in contexts of these lengths")  # fmt: skip
    parser.add_argument("--copy", type=int, nargs="+", metavar="TOKENS", default=[],
                        help="also copy UUIDs, digits and names from up to 30,000 tokens back, in contexts of these "
                        "lengths")  # fmt: skip
    parser.add_argument("--haystack", type=Path, metavar="FILE", help="text around needles (default: built-in prose)")
    parser.add_argument("--trials", type=int, default=4, help="needles of each length and place (default: 4)")
    parser.add_argument("--generate", type=int, metavar="PROMPTS", default=0,
                        help="also compare answers to so many chats of 1,024 to 4,096 tokens")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of answers (default: 0, greedy)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="append each result as a line of JSON once it is known"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE",
                        help="also draw the KL of texts, and of needles a heat map, length by depth (needs matplotlib; "
                        "with both, the latter goes to FILE-needles)")  # fmt: skip
    parser.add_argument("--server", nargs="+", metavar="URL",
                        help="ask these OpenAI APIs (URL, or NAME=URL) instead of engines of this process; MODEL is "
                        "what they serve, for its tokenizer")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        OscarError: something about the options, the sidecar, the model or a server.
    """
    if min(options.windows, options.generate) < 0 or min(options.trials, options.tokens) < 1:
        raise ConfigError("--trials and --tokens must be 1 or more, --windows and --generate 0 or more")
    lengths = [*options.needle, *options.keys, *options.copy]
    if options.plot and not (lengths or options.windows):
        raise ConfigError("--plot draws the KL of texts and right answers about needles; ask for one of them")
    report = _Report(options)
    (_measure_servers if options.server else _measure)(options, report)
    report.print()
    return 0


class _Report:
    """Collects results, writes them down as they come, and prints them at the end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._parts: dict[str, list[Any]] = {"texts": [], "needles": [], "answers": [], "drift": []}

    def add(self, part: str, results: Sequence[Any], shown: str) -> None:
        self._parts[part] += results
        print(shown, file=sys.stderr, flush=True)
        if self._options.out:
            with self._options.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"part": part, **asdict(one)}) + "\n" for one in results)

    def print(self) -> None:
        from vllm_oscar.evaluation.generation import answer_table
        from vllm_oscar.evaluation.report import heat_map, needle_table, plot, table

        texts, found, answers, _ = self._parts.values()
        if self._options.json:
            parts = {name: [asdict(one) for one in part] for name, part in self._parts.items()}
            print(json.dumps(parts, indent=2))
        else:
            shown = (texts and table(texts), found and needle_table(found), answers and answer_table(answers))
            print("\n\n".join(text for text in shown if text))
        picture: Path | None = self._options.plot
        if picture and texts:
            plot(texts, picture)
        if picture and found:
            heat_map(found, picture.with_stem(f"{picture.stem}-needles") if texts else picture)


def _asked(options: argparse.Namespace, tokenizer: Any, config: Any) -> list[Any]:
    from vllm_oscar.evaluation.needle import Haystacks, copies, needles, several_keys

    lengths = [*options.needle, *options.keys, *options.copy]
    if not lengths:
        return []
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    haystacks = Haystacks(tokenizer, max(lengths), options.haystack, limit)
    return [
        *needles(haystacks, options.needle, options.trials),
        *several_keys(haystacks, options.keys, options.trials),
        *copies(haystacks, options.copy, options.trials),
    ]


def _measure(options: argparse.Namespace, report: _Report) -> None:
    """Methods, in engines of this process."""
    from transformers import AutoConfig, AutoTokenizer

    from vllm_oscar.evaluation.drift import drifts
    from vllm_oscar.evaluation.generation import answer, answer_table, chat_prompts
    from vllm_oscar.evaluation.measure import measure
    from vllm_oscar.evaluation.needle import find
    from vllm_oscar.evaluation.report import HEAD, line, needle_table
    from vllm_oscar.evaluation.windows import held_out
    from vllm_oscar.sidecar import ModelFingerprint, Sidecar, find_sidecar

    config = AutoConfig.from_pretrained(options.model)
    own = Sidecar.load(find_sidecar(options.model, options.sidecar), ModelFingerprint.of(config))
    methods = [parse(text, own) for text in options.methods]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # everything that can be refused is refused before an engine starts
    texts = (
        {name: held_out(tokenizer, name, options.windows, options.context) for name in options.data}
        if options.windows
        else {}
    )
    asked = _asked(options, tokenizer, config)
    prompts = chat_prompts(tokenizer, options.generate) if options.generate else []

    for drift in drifts(options.model, own, texts):
        report.add("drift", [drift], str(drift))
    if texts:
        for result in measure(options.model, methods, texts):
            report.add("texts", [result], f"{HEAD}\n{line(result)}  ({result.seconds:.0f} s)")
    if asked:
        for results in find(options.model, methods, asked):
            report.add("needles", results, needle_table(results))
    if prompts:
        for one in answer(options.model, methods, prompts, options.tokens, options.temperature):
            report.add("answers", [one], answer_table([one]))


def _measure_servers(options: argparse.Namespace, report: _Report) -> None:
    """Servers that run already: needles and answers."""
    from transformers import AutoConfig, AutoTokenizer

    from vllm_oscar.evaluation.generation import answer_table, chats
    from vllm_oscar.evaluation.report import needle_table
    from vllm_oscar.evaluation.serving import Server, answer_through, find_through

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    asked = _asked(options, tokenizer, AutoConfig.from_pretrained(options.model))
    if not (asked or options.generate):
        raise ConfigError("--server answers --needle, --keys, --copy and --generate; ask for one of them")
    servers = [Server(text) for text in options.server]
    if asked:
        for results in find_through(servers, tokenizer, asked):
            report.add("needles", results, needle_table(results))
    if options.generate:
        questions = chats(tokenizer, options.generate)
        for one in answer_through(servers, tokenizer, questions, options.tokens, options.temperature):
            report.add("answers", [one], answer_table([one]))
