"""Needles in a haystack: can the model still read one number far back, among others that are labelled almost alike?

A prompt is held-out prose with sentences in it like "The code for Lisbon is 4821.", which differ in the town and the
number only, and ends with the start of one of them. The cache has to keep the towns apart for the model to copy the
right number. Each sentence is there twice in a row: a small model cannot do it otherwise, over any cache.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_oscar.calibrate.data import builtin_text
from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.measure import running
from vllm_oscar.evaluation.methods import BF16, Method

DEPTHS = (0.1, 0.3, 0.5, 0.7)  # of the needle: outside sink and window from 1,024 tokens on
CHUNK = 256  # tokens of a prefill step; the question has a step of its own
_TOWNS = ("Lisbon", "Vienna", "Prague", "Dublin", "Athens", "Warsaw", "Madrid", "London")
_DISTRACTORS = 3
_LABEL = "The code for {} is"
_SENTENCE = "\n\n{0} {1}. {0} {1}.\n\n"
_ANSWER = 8  # tokens


@dataclass(frozen=True)
class Needle:
    """A prompt and what it asks for.

    Attributes:
        length, depth: of the haystack in tokens, and where in it the needle is, 0 to 1
        ids: of the prompt: a haystack of `length` tokens and the question
        answer: digits
    """

    length: int
    depth: float
    ids: list[int]
    answer: str


@dataclass(frozen=True)
class Found:
    """How often a method's model answered right.

    Attributes:
        method, bits: its name, and what it stores for an element
        emulated: whether its values were put into vLLM's BF16 cache
        length, depth: of the needles
        right, asked: answers, and all of them
    """

    method: str
    bits: float
    emulated: bool
    length: int
    depth: float
    right: int
    asked: int


def needles(tokenizer: Any, lengths: Sequence[int], trials: int) -> list[Needle]:
    """`trials` prompts for each length and depth; always the same ones.

    Raises:
        ConfigError: haystacks that do not end with a chunk, or for which there is no text.
    """
    if wrong := [length for length in lengths if length % CHUNK or length < 4 * CHUNK]:
        raise ConfigError(f"--needle {wrong[0]}: lengths are multiples of {CHUNK}, {4 * CHUNK} or more")
    prose = tokenizer(builtin_text("held_out"), add_special_tokens=False, verbose=False).input_ids
    if max(lengths) > len(prose):
        raise ConfigError(f"--needle {max(lengths)}: there is text for {len(prose)} tokens only")
    draw = random.Random(0)
    return [
        _needle(tokenizer, prose, length, depth, draw) for length in lengths for depth in DEPTHS for _ in range(trials)
    ]


def _needle(tokenizer: Any, prose: list[int], length: int, depth: float, draw: random.Random) -> Needle:
    towns = draw.sample(_TOWNS, 1 + _DISTRACTORS)
    codes = [str(code) for code in draw.sample(range(1000, 10000), 1 + _DISTRACTORS)]
    # the distractors lie at even distances, and outside sink and window too
    depths = [depth, *(DEPTHS[-1] * (i + 0.5) / _DISTRACTORS for i in range(_DISTRACTORS))]

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    placed = sorted(
        (at, tokens(_SENTENCE.format(_LABEL.format(town), code)))
        for at, town, code in zip(depths, towns, codes, strict=True)
    )
    room = length - sum(len(sentence) for _, sentence in placed)
    start = draw.randrange(len(prose) - room + 1)
    ids: list[int] = []
    taken = 0
    for at, sentence in placed:
        ids += prose[start + taken : start + int(at * room)] + sentence
        taken = int(at * room)
    ids += prose[start + taken : start + room]
    return Needle(length, depth, ids + tokens("\n\n" + _LABEL.format(towns[0])), codes[0])


def find(model: str, methods: Sequence[Method], asked: Sequence[Needle]) -> Iterator[list[Found]]:
    """Ask every method, BF16 first; a list of all lengths and depths as soon as a method is through."""
    from vllm import SamplingParams

    context = max(len(needle.ids) for needle in asked) + _ANSWER
    prompts: Any = [{"prompt_token_ids": needle.ids} for needle in asked]
    for method in [BF16, *methods]:
        with running(model, method, context, CHUNK) as engine:
            outputs = engine.llm.generate(prompts, SamplingParams(max_tokens=_ANSWER, temperature=0))
        right = [
            (needle.length, needle.depth, says(output.outputs[0].text, needle.answer))
            for needle, output in zip(asked, outputs, strict=True)
        ]
        cells = dict.fromkeys((length, depth) for length, depth, _ in right)
        yield [
            Found(
                method.name,
                method.bits,
                method.codec is not None,
                *cell,
                right=sum(correct for *at, correct in right if tuple(at) == cell),
                asked=sum(tuple(at) == cell for *at, _ in right),
            )
            for cell in cells
        ]


def says(text: str, answer: str) -> bool:
    """Whether the first number of a text is the answer."""
    first = re.search(r"\d+", text)
    return first is not None and first[0] == answer


def needle_table(results: Sequence[Found]) -> str:
    """Fixed-width text: right answers, a line for each method and length, a column for each depth."""
    depths = list(dict.fromkeys(r.depth for r in results))
    head = f"{'needles':<14}{'bits':>6}{'length':>8}" + "".join(f"{f'at {depth:.0%}':>10}" for depth in depths)
    lines = [head + f"{'all':>10}", "-" * (len(head) + 10)]
    for length, name in dict.fromkeys((r.length, r.method) for r in results):
        row = [r for r in results if (r.length, r.method) == (length, name)]
        cells = [f"{r.right}/{r.asked}" for r in row] + [f"{sum(r.right for r in row) / sum(r.asked for r in row):.0%}"]
        star = "*" * row[0].emulated
        lines.append(f"{name + star:<14}{row[0].bits:>6.2f}{length:>8}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)
