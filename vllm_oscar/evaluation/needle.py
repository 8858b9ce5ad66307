"""Needles in a haystack: can the model still read what stands far back, among things that are labelled almost alike?

A prompt is a text with sentences in it like "The code for Lisbon is 4821.", which differ in the town and the number
only, and ends with the start of one of them. The cache has to keep the towns apart for the model to copy the right
number. Each sentence is there twice in a row: a small model cannot do it otherwise, over any cache.

    needle              one number is asked for
    keys                four, in one answer
    uuid, digits, name  strings to be copied from given distances, fifteen in one answer

The model is made to give the right answer, token by token, through the cache's decode path. So there is a log
probability whether or not it would have said so by itself, which it would where every token was the likeliest: that
counts as right.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import torch

from vllm_oscar.calibrate.data import builtin_text
from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.measure import running
from vllm_oscar.evaluation.methods import BF16, Method

DEPTHS = (0.1, 0.3, 0.5, 0.7)  # of the needle: outside sink and window from 1,024 tokens on
BY_DEPTH = ("needle", "keys")  # kinds that are placed by depth, the others by distance
DISTANCES = (700, 2000, 8000, 16000, 30000)  # tokens that strings to be copied stand back
CHUNK = 256  # tokens of a prefill step; the question has a step of its own
ANSWER = 8  # tokens that an answer may have beside the string asked for, where it is free
_TOWNS = ("Lisbon", "Vienna", "Prague", "Dublin", "Athens", "Warsaw", "Madrid", "London")
_DISTRACTORS = 3
_LABEL = "The code for {} is"
_TWICE = "\n\n{0} {1}. {0} {1}.\n\n"
_COPIED = {
    "uuid": "The node in {} has the id",
    "digits": "The office in {} has the account",
    "name": "The handler for {} is the function",
}
_WORDS = (
    "merge", "pending", "header", "remote", "cache", "flush", "index", "parse", "table", "worker", "retry", "signal",
    "buffer", "window", "commit", "filter", "stream", "token", "group", "event", "state", "queue", "local", "bound",
)  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One thing that is asked for.

    Attributes:
        kind: "needle", "keys", "uuid", "digits" or "name"
        depth: where in the haystack it is, 0 to 1
        back: about how many tokens before the haystack's end
        label, text: its sentence is "label text."
        start, stop: its tokens in the answer
    """

    kind: str
    depth: float
    back: int
    label: str
    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Needle:
    """A prompt and what it asks for.

    Attributes:
        length: of the context, in tokens
        ids: of the prompt: a haystack and the start of the answer's first sentence
        haystack: how many of these are the haystack's
        answer: token ids of the right answer
        keys: what in the answer is scored
    """

    length: int
    ids: list[int]
    haystack: int
    answer: list[int]
    keys: list[Key]


@dataclass(frozen=True)
class Found:
    """How well a method's model answered.

    Attributes:
        method, bits: its name, and what it stores for an element; None where not known
        emulated: whether its values were put into vLLM's BF16 cache
        kind: of the needles
        length: of the contexts, in tokens
        depth, back: of the needles, from 0 to 1, and in tokens from the haystack's end
        right, asked: answers, and all of them
        log_p, log_p_error: log probability of a right answer in nats, mean and standard error; None where not known
    """

    method: str
    bits: float | None
    emulated: bool
    kind: str
    length: int
    depth: float
    back: int
    right: int
    asked: int
    log_p: float | None
    log_p_error: float | None


class _Sentence(NamedTuple):
    """What stands in a haystack, at a depth from 0 to 1."""

    kind: str
    depth: float
    label: str
    text: str


class Haystacks:
    """Texts of given lengths with sentences in them.

    Args:
        tokenizer: the model's
        longest: tokens of the longest one
        path: a text; None: held-out prose, and for long ones held-out code behind it
        limit: tokens of the model's context; haystacks as long as that end early enough for question and answer

    Raises:
        ConfigError: not enough text.
    """

    def __init__(self, tokenizer: Any, longest: int, path: Path | None = None, limit: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        if path is not None:
            self._text = self.tokens(path.read_text(encoding="utf-8"))
        else:
            self._text = self.tokens(builtin_text("held_out"))
            if longest > len(self._text):
                self._text += self.tokens(builtin_text("held_out", "code"))
        if longest > len(self._text):
            raise ConfigError(
                f"there is text for a haystack of {len(self._text)} tokens, not {longest}; give --haystack a longer one"
            )

    def tokens(self, text: str) -> list[int]:
        """Of a text that stands in the middle of another."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def room(self, length: int, answer: int) -> int:
        """Tokens of the haystack in a context of `length`, a multiple of CHUNK.

        Raises:
            ConfigError: not a length that the needles are made for.
        """
        if length % CHUNK or length < 4 * CHUNK:
            raise ConfigError(f"{length} tokens: contexts with needles are multiples of {CHUNK}, {4 * CHUNK} or more")
        if self._limit is None or length + answer <= self._limit:
            return length
        return min(length, self._limit - answer) // CHUNK * CHUNK

    def make(self, length: int, sentences: Sequence[_Sentence], draw: random.Random) -> list[int]:
        """A text of `length` tokens, from some place of the text on, with each sentence twice at its depth."""
        placed = sorted((one.depth, self.tokens(_TWICE.format(one.label, one.text))) for one in sentences)
        room = length - sum(len(sentence) for _, sentence in placed)
        start = draw.randrange(len(self._text) - room + 1)
        ids: list[int] = []
        taken = 0
        for depth, sentence in placed:
            ids += self._text[start + taken : start + int(depth * room)] + sentence
            taken = int(depth * room)
        return ids + self._text[start + taken : start + room]

    def ask(self, length: int, ids: list[int], asked: Sequence[_Sentence]) -> Needle:
        """The question behind a haystack: sentences again, of which the first is begun."""
        answer: list[int] = []
        keys = []
        for number, one in enumerate(asked):
            if number:
                answer += self.tokens(f" {one.label}")
            text = self.tokens(f" {one.text}.")
            start = len(answer) + (not self._tokenizer.decode(text[:1]).strip())  # a space alone says nothing
            answer += text
            keys.append(Key(*one[:2], round(len(ids) * (1 - one.depth)), *one[2:], start, len(answer)))
        return Needle(length, ids + self.tokens(f"\n\n{asked[0].label}"), len(ids), answer, keys)


def needles(haystacks: Haystacks, lengths: Sequence[int], trials: int) -> list[Needle]:
    """Prompts that ask for one number: for each length and depth as many as `trials`, the same ones every time.

    Raises:
        ConfigError: lengths that needles cannot be made for.
    """
    draw = random.Random(0)
    made = []
    for length in lengths:
        room = haystacks.room(length, CHUNK)
        for depth in DEPTHS:
            for _ in range(trials):
                # the distractors lie at even distances, and outside sink and window too
                depths = (depth, *(DEPTHS[-1] * (i + 0.5) / _DISTRACTORS for i in range(_DISTRACTORS)))
                sentences = _codes("needle", depths, draw)
                made.append(haystacks.ask(length, haystacks.make(room, sentences, draw), sentences[:1]))
    return made


def several_keys(haystacks: Haystacks, lengths: Sequence[int], trials: int) -> list[Needle]:
    """Prompts that ask for four numbers out of eight in one answer, one at each depth, in any order.

    Raises:
        ConfigError: lengths that needles cannot be made for.
    """
    draw = random.Random(1)
    between = (DEPTHS[0] + 0.05, *((a + b) / 2 for a, b in pairwise(DEPTHS)))
    made = []
    for length in lengths:
        room = haystacks.room(length, CHUNK)
        for _ in range(trials):
            sentences = _codes("keys", (*DEPTHS, *between), draw)
            asked = draw.sample(sentences[: len(DEPTHS)], len(DEPTHS))
            made.append(haystacks.ask(length, haystacks.make(room, sentences, draw), asked))
    return made


def copies(haystacks: Haystacks, lengths: Sequence[int], trials: int) -> list[Needle]:
    """Prompts that ask for strings of every kind from every one of DISTANCES that the length has, in any order.

    Raises:
        ConfigError: lengths that needles cannot be made for.
    """
    draw = random.Random(2)
    made = []
    for length in lengths:
        room = haystacks.room(length, 4 * CHUNK)
        distances = [back for back in DISTANCES if back < room - CHUNK]
        for _ in range(trials):
            sentences = [
                _Sentence(kind, 1 - back / room, label.format(town), _STRINGS[kind](draw))
                for kind, label in _COPIED.items()
                for back, town in zip(distances, draw.sample(_TOWNS, len(distances)), strict=True)
            ]
            asked = draw.sample(sentences, len(sentences))
            made.append(haystacks.ask(length, haystacks.make(room, sentences, draw), asked))
    return made


_STRINGS: dict[str, Callable[[random.Random], str]] = {
    "uuid": lambda draw: str(UUID(int=draw.getrandbits(128), version=4)),
    "digits": lambda draw: "".join(draw.choices("0123456789", k=16)),
    "name": lambda draw: "_".join(draw.sample(_WORDS, 4)),
}


def _codes(kind: str, depths: Sequence[float], draw: random.Random) -> list[_Sentence]:
    """Labels and numbers of four digits, all different."""
    towns = draw.sample(_TOWNS, len(depths))
    codes = draw.sample(range(1000, 10000), len(depths))
    return [_Sentence(kind, *one) for one in zip(depths, map(_LABEL.format, towns), map(str, codes), strict=True)]


def find(model: str, methods: Sequence[Method], asked: Sequence[Needle]) -> Iterator[list[Found]]:
    """Ask every method, BF16 first; a list of all kinds, lengths and depths as soon as a method is through."""
    context = max(len(needle.ids) + len(needle.answer) for needle in asked)
    for method in [BF16, *methods]:
        scores = []
        with running(model, method, context, CHUNK) as engine:
            given = [needle.answer for needle in asked]
            answers = engine.answer([needle.ids for needle in asked], max(map(len, given)), given)
            for needle, answer in zip(asked, answers, strict=True):
                log_p, likeliest = engine.log_probabilities(answer)
                scores += [
                    (needle, key, float(log_p[key.start : key.stop].sum()), bool(likeliest[key.start : key.stop].all()))
                    for key in needle.keys
                ]
        yield summarised(method.name, method.bits, method.codec is not None, scores)


def summarised(
    name: str, bits: float | None, emulated: bool, scores: Sequence[tuple[Needle, Key, float | None, bool]]
) -> list[Found]:
    """Cells of kind, length and place, from each key's log probability and whether it was right."""
    cells: dict[tuple[str, int, float, int], list[tuple[float | None, bool]]] = {}
    for needle, key, log_p, right in scores:
        cells.setdefault((key.kind, needle.length, key.depth, key.back), []).append((log_p, right))
    found = []
    for (kind, length, depth, back), results in sorted(cells.items(), key=lambda cell: _order(*cell[0])):
        known = torch.tensor([log_p for log_p, _ in results if log_p is not None], dtype=torch.float64)
        found.append(
            Found(
                name,
                bits,
                emulated,
                kind,
                length,
                depth,
                back,
                right=sum(right for _, right in results),
                asked=len(results),
                log_p=float(known.mean()) if len(known) else None,
                log_p_error=float(known.std() / len(known) ** 0.5) if len(known) > 1 else None,
            )
        )
    return found


def _order(kind: str, length: int, depth: float, back: int) -> tuple[int, int, float]:
    return [*BY_DEPTH, *_COPIED].index(kind), length, depth


def says(text: str, answer: str) -> bool:
    """Whether the first number of a text is the answer; of one that is no number, whether it is in the text."""
    if not answer.isdigit():
        return answer in text
    first = re.search(r"\d+", text)
    return first is not None and first[0] == answer
