"""Free answers to long chat prompts: does the model say the same over a compressed cache as over BF16, and as well?

One different token makes a different text, and BF16 itself does not answer alike when its sums are made in another
order. So it answers twice, the second time in other batches and other chunks: that is the floor. How good a different
text is, BF16 says: every answer is read again over its cache, and the distributions that its tokens were chosen from
are compared with those that BF16 has there. Errors that build up while decoding show in the answer's later parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from vllm_oscar.calibrate.data import builtin_text
from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.engine import Answer, Engine
from vllm_oscar.evaluation.measure import running
from vllm_oscar.evaluation.methods import BF16, Method
from vllm_oscar.evaluation.metrics import Scores
from vllm_oscar.evaluation.report import bits_of
from vllm_oscar.evaluation.texts import Chat

CONTEXTS = (1024, 2048, 4096)  # tokens of the prompts, in turn
_QUESTIONS = {
    "prose": ("Summarize the text above.", "Which rules does the text above state? List them.", "Explain the text."),
    "code": ("What does the code above do?", "Write documentation for the code above.", "Review the code above."),
}
_CHUNK, _CONCURRENT = 256, 64
_PARTS = 4  # of an answer's length, by which its KL is reported
_GRAM = 8  # tokens whose repetition is counted
_NOTES = (
    "agreed: tokens before the first difference from bf16; endless: not ended by the model; repeated: sequences of 8",
    "tokens that stood in the answer before; KL: to the BF16 cache along the answer, by position",
    "bf16: in other batches and chunks, against itself",
)
_POSITIONS = 256  # whose logits are compared at once


@dataclass(frozen=True)
class Answers:
    """A method's answers, beside those over BF16.

    Attributes:
        method, bits: its name, and what it stores for an element; None where not known
        emulated: whether its values were put into vLLM's BF16 cache
        equal: share of the answers that are the same to the last token
        agreed: mean number of tokens before the first difference (all of them, where there is none)
        prompts, tokens: answers, and the most tokens of one
        endless: answers that the model did not end
        repeated: share of an answer's sequences of 8 tokens that stood in it before, mean over answers
        kl, kl_error: KL(BF16 || method) in nats along the method's answers, in each quarter of `tokens`: mean over the
            positions, and its standard error over answers; None where no answer is that long
    """

    method: str
    bits: float | None
    emulated: bool
    equal: float
    agreed: float
    prompts: int
    tokens: int
    endless: int
    repeated: float
    kl: list[float | None]
    kl_error: list[float | None]


def chats(tokenizer: Any, count: int) -> list[Chat]:
    """Questions about passages of held-out prose and code in turn, of about 1,024, 2,048 and 4,096 tokens."""
    texts = {kind: tokenizer(builtin_text("held_out", kind), verbose=False).input_ids for kind in _QUESTIONS}
    read = dict.fromkeys(_QUESTIONS, 0)
    asked = []
    for number in range(count):
        kind = list(_QUESTIONS)[number % len(_QUESTIONS)]
        question = _QUESTIONS[kind][number // len(_QUESTIONS) % len(_QUESTIONS[kind])]
        length = CONTEXTS[number % len(CONTEXTS)] - 64  # the template and the question take the rest
        start = read[kind] % (len(texts[kind]) - length)
        read[kind] += length
        passage = tokenizer.decode(texts[kind][start : start + length])
        asked.append([{"role": "user", "content": f"{passage}\n\n{question}"}])
    return asked


def chat_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """The same as token ids.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--generate needs a tokenizer with a chat template; leave it out")
    rendered = (tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                for chat in chats(tokenizer, count))  # fmt: skip
    return [list(tokenizer(text, add_special_tokens=False).input_ids) for text in rendered]


def answer(
    model: str, methods: Sequence[Method], prompts: Sequence[list[int]], tokens: int, temperature: float = 0.0
) -> Iterator[Answers]:
    """Answer with every method; BF16 is the first result, against itself in other batches.

    Args:
        model: folder or hub id
        prompts: token ids
        tokens: of an answer, at most
        temperature: 0: greedy; else every method draws with the same seeds
    """
    context = max(map(len, prompts)) + tokens
    concurrent = min(_CONCURRENT, len(prompts))

    def answers(method: Method, chunk: int, concurrent: int) -> list[Answer]:
        with running(model, method, context, chunk, concurrent) as engine:
            return engine.answer(prompts, tokens, temperature=temperature)

    reference = [one.ids for one in answers(BF16, _CHUNK, concurrent)]
    for method in [BF16, *methods]:
        # BF16 again, differently
        others = answers(method, *((_CHUNK // 2, -(-concurrent // 2)) if method is BF16 else (_CHUNK, concurrent)))
        with running(model, BF16, context, _CHUNK, concurrent) as engine:
            reread = engine.reread(prompts, [one.ids for one in others])
            kl = [divergence(engine, one, states) for one, states in zip(others, reread, strict=True)]
        yield compared(method.name, method.bits, method.codec is not None, reference, others, kl, tokens)


def divergence(engine: Engine, answer: Answer, reference: torch.Tensor) -> torch.Tensor:
    """KL(reference || answer) in nats of each of an answer's tokens, float32 (tokens,).

    Args:
        reference: (tokens, hidden size), the states that BF16 has there
    """
    parts = []
    for start in range(0, len(answer.ids), _POSITIONS):
        rows = slice(start, start + _POSITIONS)
        ours, theirs = engine.logits(answer.hidden[rows]), engine.logits(reference[rows])
        parts.append(Scores.of(theirs, ours, torch.tensor(answer.ids[rows], device=ours.device)).kl.cpu())
    return torch.cat(parts)


def compared(
    name: str,
    bits: float | None,
    emulated: bool,
    reference: Sequence[list[int]],
    others: Sequence[Answer],
    kl: Sequence[torch.Tensor],
    tokens: int,
) -> Answers:
    """Score answers.

    Args:
        name, bits, emulated: of the method
        reference: BF16's answers, token ids each
        others: the method's
        kl: of each of these, KL to BF16 at each token; none where not known
        tokens: of an answer, at most
    """
    pairs = list(zip(reference, (one.ids for one in others), strict=True))
    agreed = [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair))) for pair in pairs
    ]
    bounds = [tokens * part // _PARTS for part in range(_PARTS + 1)]
    quarters = [_mean([one[a:b] for one in kl if len(one) > a]) for a, b in pairwise(bounds)]
    return Answers(
        name,
        bits,
        emulated,
        sum(one == other for one, other in pairs) / len(pairs),
        sum(agreed) / len(agreed),
        len(pairs),
        tokens,
        endless=sum(not one.ended for one in others),
        repeated=sum(repeated(one.ids) for one in others) / len(others),
        kl=[mean for mean, _ in quarters],
        kl_error=[error for _, error in quarters],
    )


def _mean(parts: Sequence[torch.Tensor]) -> tuple[float | None, float | None]:
    """Mean over all positions of some answers' parts, and its standard error over answers."""
    if not parts:
        return None, None
    count = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    total = torch.stack([part.double().sum() for part in parts])
    mean = total.sum() / count.sum()
    if len(parts) == 1:
        return float(mean), None
    # a ratio of two sums over answers
    error = (total - mean * count).std() * len(parts) ** 0.5 / count.sum()
    return float(mean), float(error)


def repeated(ids: Sequence[int]) -> float:
    """Share of a text's sequences of 8 tokens that stood in it before."""
    grams = [tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def answer_table(results: Sequence[Answers]) -> str:
    """Fixed-width text, a line for each method."""
    r = results[0]
    bounds = [r.tokens * part // _PARTS for part in range(_PARTS + 1)]
    head = f"{'answers':<14}{'bits':>6}{'equal':>8}{'agreed':>9}{'endless':>9}{'repeated':>10}"
    head += "".join(f"{f'KL {a}-{b}':>20}" for a, b in pairwise(bounds))
    lines = [head, "-" * len(head)]
    for r in results:
        line = f"{r.method + '*' * r.emulated:<14}{bits_of(r.bits):>6}{r.equal:>8.0%}{r.agreed:>9.1f}"
        line += f"{f'{r.endless}/{r.prompts}':>9}{r.repeated:>10.1%}"
        lines.append(line + "".join(f"{_with_error(*one):>20}" for one in zip(r.kl, r.kl_error, strict=True)))
    return "\n".join([*lines, f"{r.prompts} prompts, at most {r.tokens} tokens each", *_NOTES])


def _with_error(mean: float | None, error: float | None) -> str:
    if mean is None:
        return "-"
    return f"{mean:.4f}" + ("" if error is None else f" +-{error:.4f}")
