"""Needles and answers through the OpenAI API of running servers, ours or any other, to compare what is in production.

A server reads its own tokens of the same texts, and its cache is read as it is there: the haystack is sent by itself
first, so that a server with prefix caching reads it from its cache when the question comes.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vllm_oscar.errors import ConfigError
from vllm_oscar.evaluation.engine import Answer
from vllm_oscar.evaluation.generation import Answers, compared
from vllm_oscar.evaluation.needle import ANSWER, Found, Key, Needle, says, summarised
from vllm_oscar.evaluation.texts import Chat

CONCURRENT = 8  # requests


class Server:
    """A model behind an OpenAI API.

    Attributes:
        name: in tables

    Args:
        text: URL, or NAME=URL, up to the port or to /v1

    Raises:
        ConfigError: nothing answers there.
    """

    def __init__(self, text: str) -> None:
        from openai import OpenAI, OpenAIError

        name, equals, url = text.rpartition("=")
        self.name = name if equals else url.partition("://")[2]
        base = url.rstrip("/").removesuffix("/v1")
        self._client = OpenAI(base_url=f"{base}/v1", api_key="none", timeout=3600)
        try:
            self._model = self._client.models.list().data[0].id
        except (OpenAIError, IndexError) as error:
            raise ConfigError(f"--server {url}: no model answers at {base}/v1/models ({error})") from error

    def continues(self, prompt: str, tokens: int) -> str:
        """The greedy continuation of a text."""
        reply = self._client.completions.create(model=self._model, prompt=prompt, max_tokens=tokens, temperature=0)
        return str(reply.choices[0].text)

    def answers(self, chat: Chat, tokens: int, temperature: float, seed: int) -> tuple[str, bool]:
        """The next message of a chat, and whether it came to its end."""
        messages: Any = chat
        reply = self._client.chat.completions.create(
            model=self._model, messages=messages, max_tokens=tokens, temperature=temperature, seed=seed
        )
        return reply.choices[0].message.content or "", reply.choices[0].finish_reason == "stop"


def find_through(servers: Sequence[Server], tokenizer: Any, asked: Sequence[Needle]) -> Iterator[list[Found]]:
    """Ask every server for every key by itself; results as of `needle.find`, without log probabilities."""

    def ask(server: Server, needle: Needle) -> list[tuple[Needle, Key, float | None, bool]]:
        haystack = tokenizer.decode(needle.ids[: needle.haystack])
        server.continues(haystack, 1)
        return [
            (needle, key, None, says(server.continues(f"{haystack}\n\n{key.label}", tokens), key.text))
            for key in needle.keys
            for tokens in [key.stop - key.start + ANSWER]
        ]

    for server in servers:
        with ThreadPoolExecutor(CONCURRENT) as pool:
            scores = [score for part in pool.map(lambda needle: ask(server, needle), asked) for score in part]  # noqa: B023
        yield summarised(server.name, None, False, scores)


def answer_through(
    servers: Sequence[Server], tokenizer: Any, asked: Sequence[Chat], tokens: int, temperature: float
) -> Iterator[Answers]:
    """Chats answered by every server, beside the first one's answers, which answers twice."""

    def answers(server: Server) -> list[Answer]:
        with ThreadPoolExecutor(CONCURRENT) as pool:
            said = pool.map(lambda n: server.answers(asked[n], tokens, temperature, n), range(len(asked)))
            return [
                Answer(list(tokenizer(text, add_special_tokens=False).input_ids), torch.empty(0), ended)
                for text, ended in said
            ]

    reference = [one.ids for one in answers(servers[0])]
    for server in servers:
        yield compared(server.name, None, False, reference, answers(server), [], tokens)
