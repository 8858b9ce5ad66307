"""`vllm serve` with an OpenAI client in front."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_oscar.sidecar import FILE_NAME

if TYPE_CHECKING:
    from tests.serve.conftest import Server

pytestmark = pytest.mark.serve
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server]) -> Server:
    server = serve({"sink": 16, "window": 48})
    server.wait_until_ready()
    return server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return server.client()


def test_options_arrive(server: Server, folder: Path) -> None:
    text = server.output()
    assert f"OSCAR sidecar {folder / FILE_NAME}: method aware" in text
    assert "sink 16 and window 48 differ from the calibration's 64 and 256" in text
    # 8 requests, each a sink block and twice the four blocks that 48 tokens can touch
    assert "OSCAR BF16 pool: 72 blocks of 16 tokens" in text


def test_one_line_says_what_is_served(server: Server) -> None:
    """SmolLM2: 30 layers of 3 KV heads of size 64: 80 bytes of 512 a token and head, 6.4 times less without copies."""
    lines = [line for line in server.output().splitlines() if "torch reference on CPU" in line]
    assert len(lines) == 1
    assert "30 layers in INT2, 0 not; 3,600 bytes a token in the former, 23,040 with 16 bits, room for" in lines[0]
    match = re.search(r"room for ([\d,]+) tokens \((\d\.\d+) times", lines[0])
    assert match
    tokens, ratio = int(match[1].replace(",", "")), float(match[2])
    pool = 72 * 16 * 30 * 3 * (2 * 64 * 2 + 8)
    assert ratio == pytest.approx(tokens * 23040 / (tokens * 3600 + pool), abs=0.01)


def test_a_chat_answer_streams(client: Any) -> None:
    stream = client.chat.completions.create(
        model="small",
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    usage = chunks[-1].usage
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 3
    assert usage.completion_tokens <= 24


def test_eight_requests_at_once(client: Any) -> None:
    """Prompts of 50 to 300 tokens, most of them beyond sink + window; each answer knows its own prompt."""

    def ask(n: int) -> Any:
        prompt = f"The number is {n}{n}{n}. " * (4 * n) + "The number is"
        return client.completions.create(model="small", prompt=prompt, temperature=0, max_tokens=6)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(1, 9)))
    assert [answer.choices[0].finish_reason for answer in answers] == ["length"] * 8
    for n, answer in enumerate(answers, 1):
        assert answer.choices[0].text.startswith(f" {n}{n}{n}")
    tokens = [answer.usage.prompt_tokens for answer in answers]
    assert tokens[0] < 64 < tokens[1] < 200 < tokens[-1]


def test_the_workers_counters_are_in_the_servers_metrics(server: Server, client: Any) -> None:
    """The engine core is another process. The window is whole and INT2 was read by the requests before."""
    client.completions.create(
        model="small", prompt="One, two,", max_tokens=70, temperature=0, extra_body={"ignore_eos": True}
    )  # a look at the counters at least
    found = dict(re.findall(r'^vllm:oscar_(\w+){engine="0",worker="0"} (\S+)$', server.metrics(), re.MULTILINE))
    values = {name: float(value) for name, value in found.items()}
    assert values["pool_blocks"] == 72
    assert 0 < values["used_blocks"] <= 72
    assert values["window_tokens"] == 48
    assert values["int2_reads_total"] > 1000
    assert values["bf16_reads_total"] > values["int2_reads_total"]
    assert values["shrunk_steps_total"] == values["int2_sink_reads_total"] == values["saturated_rows_total"] == 0


def test_errors_leave_the_server_alive(client: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="512"):
        client.completions.create(model="small", prompt="word " * 600, max_tokens=6)
    assert client.completions.create(model="small", prompt="One, two,", max_tokens=2, temperature=0).choices


def test_shutdown_is_clean(server: Server) -> None:
    """After the others: one SIGTERM, every process gone, no traceback in the log."""
    assert len(server.processes()) > 1, "the engine core should be a process of its own"
    server.process.send_signal(signal.SIGTERM)
    server.wait_until_gone()
    assert server.process.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    assert server.processes() == []
    # on a busy machine vLLM's front end sees its engine gone before it has stopped listening, and logs that
    odd = [line for line in server.output().splitlines() if "Traceback" in line and "[async_llm.py:" not in line]
    assert odd == [], server.output()[-5000:]
