"""Greedy answers to long chat prompts: does the model say the same over a compressed cache as over BF16?

One different token makes a different text, and BF16 itself does not answer alike when its sums are made in another
order. So it answers twice, the second time in other batches and other chunks: that is the floor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_oscar.calibrate.data import builtin_text
from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.measure import running
from vllm_oscar.evaluation.methods import BF16, Method

CONTEXTS = (1024, 2048, 4096)  # tokens of the prompts, in turn
_QUESTIONS = {
    "prose": ("Summarize the text above.", "Which rules does the text above state? List them.", "Explain the text."),
    "code": ("What does the code above do?", "Write documentation for the code above.", "Review the code above."),
}
_CHUNK, _CONCURRENT = 256, 8


@dataclass(frozen=True)
class Answers:
    """How far a method's answers are those over BF16.

    Attributes:
        method, bits: its name, and what it stores for an element
        emulated: whether its values were put into vLLM's BF16 cache
        equal: share of the answers that are the same to the last token
        agreed: mean number of tokens before the first difference (all of them, where there is none)
        prompts, tokens: answers, and the most tokens of one
    """

    method: str
    bits: float
    emulated: bool
    equal: float
    agreed: float
    prompts: int
    tokens: int


def chat_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Questions about passages of held-out prose and code in turn, as token ids of about 1,024, 2,048 and 4,096 tokens.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--generate needs a tokenizer with a chat template; leave it out")
    texts = {kind: tokenizer(builtin_text("held_out", kind), verbose=False).input_ids for kind in _QUESTIONS}
    read = dict.fromkeys(_QUESTIONS, 0)
    prompts = []
    for number in range(count):
        kind = list(_QUESTIONS)[number % len(_QUESTIONS)]
        question = _QUESTIONS[kind][number // len(_QUESTIONS) % len(_QUESTIONS[kind])]
        length = CONTEXTS[number % len(CONTEXTS)] - 64  # the template and the question take the rest
        start = read[kind] % (len(texts[kind]) - length)
        read[kind] += length
        passage = tokenizer.decode(texts[kind][start : start + length])
        chat = [{"role": "user", "content": f"{passage}\n\n{question}"}]
        prompts.append(tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
                                 add_special_tokens=False).input_ids)  # fmt: skip
    return prompts


def answer(model: str, methods: Sequence[Method], prompts: Sequence[list[int]], tokens: int) -> Iterator[Answers]:
    """Answer with every method; BF16 is the first result, against itself in other batches.

    Args:
        model: folder or hub id
        prompts: token ids
        tokens: of an answer, at most
    """
    from vllm import SamplingParams

    context = max(map(len, prompts)) + tokens
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]

    def answers(method: Method, chunk: int, concurrent: int) -> list[list[int]]:
        with running(model, method, context, chunk, concurrent) as engine:
            outputs = engine.llm.generate(given, SamplingParams(max_tokens=tokens, temperature=0))
            return [list(output.outputs[0].token_ids) for output in outputs]

    reference = answers(BF16, _CHUNK, _CONCURRENT)
    for method in [BF16, *methods]:
        # BF16 again, differently
        others = answers(method, *((_CHUNK // 2, _CONCURRENT // 2) if method is BF16 else (_CHUNK, _CONCURRENT)))
        yield compared(method, reference, others, tokens)


def compared(method: Method, reference: Sequence[list[int]], others: Sequence[list[int]], tokens: int) -> Answers:
    """Score answers, token ids each, against the reference's."""
    agreed = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for one, other in zip(reference, others, strict=True)
    ]
    return Answers(
        method.name,
        method.bits,
        method.codec is not None,
        sum(one == other for one, other in zip(reference, others, strict=True)) / len(reference),
        sum(agreed) / len(agreed),
        len(reference),
        tokens,
    )


def answer_table(results: Sequence[Answers]) -> str:
    """Fixed-width text, a line for each method."""
    head = f"{'answers':<14}{'bits':>6}{'equal':>8}{'tokens before the first difference':>38}"
    lines = [head, "-" * len(head)]
    for r in results:
        lines.append(f"{r.method + '*' * r.emulated:<14}{r.bits:>6.2f}{r.equal:>8.0%}{r.agreed:>38.1f}")
    r = results[0]
    note = f"{r.prompts} prompts, at most {r.tokens} tokens each; bf16: against itself in other batches and chunks"
    return "\n".join([*lines, note])
