"""`vllm serve` as a user starts it: the plugin in every process of it, an OpenAI client in front.

The model's folder holds the sidecar, in the place where it is looked up, so no option names it.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_oscar.sidecar import FILE_NAME

pytestmark = pytest.mark.serve
START_LIMIT, STOP_LIMIT = 300, 60  # seconds; a machine that is busy takes a minute to start
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


class Server:
    """A running `vllm serve`; its output goes to a file."""

    def __init__(self, model: Path, log: Path, oscar: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        command = [
            Path(sys.executable).with_name("vllm"), "serve", model, "--served-model-name", "small",
            "--kv-cache-dtype", "oscar", "--additional-config", json.dumps({"oscar": oscar}),
            "--host", "127.0.0.1", "--port", self.port, "--max-model-len", 512, "--max-num-seqs", 8,
            "--enforce-eager", "--block-size", 16,
            # with vLLM's default of 0 the server may kill its engine before that has heard of the end
            "--shutdown-timeout", STOP_LIMIT // 2,
        ]  # fmt: skip
        shared = log.parent / "prometheus"  # how metrics get from the workers to the server
        shared.mkdir()
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "PROMETHEUS_MULTIPROC_DIR": str(shared),
        }
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the engine core is a process of its own
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output()[-5000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise TimeoutError(self.output()[-5000:])

    def processes(self) -> list[int]:
        """Those of the server's session that still run."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # gone meanwhile
                continue
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    def kill(self) -> None:
        if self.processes():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_LIMIT)


@pytest.fixture(scope="module")
def folder(model_path: Path, sidecar_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its sidecar in place."""
    folder = tmp_path_factory.mktemp("model")
    for file in model_path.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file.resolve())
    (folder / FILE_NAME).parent.mkdir()
    (folder / FILE_NAME).symlink_to(sidecar_path.resolve())
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(folder, tmp_path_factory.mktemp("log") / "serve.log", {"sink": 16, "window": 48})
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", timeout=240, max_retries=0)


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
    client.completions.create(model="small", prompt="One, two,", max_tokens=140, temperature=0)  # two looks at least
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found = dict(re.findall(r'^vllm:oscar_(\w+){engine="0",worker="0"} (\S+)$', text, re.MULTILINE))
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
    assert server.process.wait(STOP_LIMIT) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    deadline = time.monotonic() + STOP_LIMIT
    while server.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.processes() == []
    assert "Traceback" not in server.output(), server.output()[-5000:]


def test_a_bad_option_stops_the_start_with_its_name(folder: Path, tmp_path: Path) -> None:
    server = Server(folder, tmp_path / "serve.log", {"windw": 3})
    try:
        assert server.process.wait(START_LIMIT) != 0
        assert "ConfigError: unknown oscar options ['windw']; known: " in server.output()
    finally:
        server.kill()
