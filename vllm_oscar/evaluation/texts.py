"""Held-out texts by name, of kinds that differ: what `oscar eval --data NAME` measures on.

None of them is in the built-in calibration text: prose and code are other topics and other modules of Python's
documentation and library, chats are made of those modules, and the stories are in texts/.
"""

import re
from collections.abc import Callable, Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

from vllm_oscar.calibrate.data import Corpus, builtin_text, open_corpus
from vllm_oscar.errors import ConfigError

Tokenizer = Any  # transformers'
Chat = list[dict[str, str]]

_DOCUMENTED = re.compile(r'^ *def ([a-z]\w+)(\([^\n]*\)):\n\s+[rR]?"""(.*?)"""', re.DOTALL | re.MULTILINE)
_SUBSTANTIAL = 200  # characters of a docstring that is an answer
_QUESTIONS = (
    "What does the function `{}` do?",
    "How do I use `{}`?",
    "I found `{}` in the library. What is it for?",
    "Please explain `{}` to me.",
)
_TURNS = 4  # questions of a chat


def chats() -> Iterator[Chat]:
    """Questions about functions of the held-out library modules, answered by their docstrings."""
    found = [match.groups() for match in _DOCUMENTED.finditer(builtin_text("held_out", "code"))]
    documented = [(name + arguments, text) for name, arguments, text in found if len(text) > _SUBSTANTIAL]
    for first in range(0, len(documented), _TURNS):
        chat = []
        for question, (function, text) in zip(_QUESTIONS, documented[first : first + _TURNS], strict=False):
            chat += [
                {"role": "user", "content": question.format(function)},
                {"role": "assistant", "content": cleandoc(text)},
            ]
        yield chat


def _built_in(kind: Any) -> Callable[[Tokenizer], Corpus]:
    return lambda _: Corpus(kind, [builtin_text("held_out", kind)], separate=False, shuffle=False)


def _chat(tokenizer: Tokenizer) -> Corpus:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--data chat: the tokenizer has no chat template; leave it out")
    rendered = (str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats())
    return Corpus("chat", rendered, separate=False, shuffle=False)


def _story(language: str) -> Callable[[Tokenizer], Corpus]:
    path = Path(__file__).parent / "texts" / f"{language}.txt"
    return lambda _: Corpus(language, [path.read_text(encoding="utf-8")], separate=False, shuffle=False)


TEXTS: dict[str, Callable[[Tokenizer], Corpus]] = {
    "prose": _built_in("prose"),
    "code": _built_in("code"),
    "chat": _chat,
    "german": _story("german"),
    "french": _story("french"),
    "spanish": _story("spanish"),
}


def open_text(name: str, tokenizer: Tokenizer) -> Corpus:
    """A text by name, or whatever calibration can read, which must not be what the sidecar was calibrated on.

    Raises:
        ConfigError: neither a name nor a file that can be read.
    """
    if name in TEXTS:
        return TEXTS[name](tokenizer)
    if not Path(name).exists():
        raise ConfigError(f"--data {name}: no such file; use one, or {', '.join(TEXTS)}")
    return open_corpus(name, tokenizer)
