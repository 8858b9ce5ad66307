"""`oscar serve` of a model without a sidecar, as a newcomer starts it, with an OpenAI client and Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.conftest import Server, linked
from vllm_oscar import cli
from vllm_oscar.evaluation.needle import DEPTHS

pytestmark = pytest.mark.serve
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "grafana.json"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where calibrations go; empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(model_path: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = linked(model_path, tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        server = Server(
            model, tmp_path_factory.mktemp("log") / "serve.log",
            {"sink": 16, "window": 48, "calibrate": "--sequences 1 --length 1024"},
            "--max-model-len", 1280, "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--enable-prompt-tokens-details",
            command=["oscar", "serve"],
        )  # fmt: skip
    server.wait_until_ready()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return server.client()


def test_the_missing_sidecar_was_made_first(server: Server, cache: Path) -> None:
    """Before any process of the engine's is there."""
    text = server.output()
    (sidecar,) = (cache / "vllm_oscar").glob("*.safetensors")
    calibrating, wrote = text.index("making it, once"), text.index(f"wrote {sidecar}")
    assert calibrating < text.index("1 sequences of 1024 tokens from") < wrote < text.index("EngineCore")
    assert f"OSCAR sidecar {sidecar}: method aware" in text[wrote:]


def test_options_arrive(server: Server) -> None:
    text = server.output()
    assert "sink 16 and window 48 differ from the calibration's 64 and 256" in text
    # 8 requests, each a sink block and twice the four blocks that 48 tokens can touch
    assert "OSCAR BF16 pool: 72 blocks of 16 tokens" in text


def test_one_line_says_what_is_served(server: Server) -> None:
    """SmolLM2: 30 layers of 3 KV heads of size 64: 80 bytes of 512 a token and head, 6.4 times less without copies."""
    lines = [line for line in server.output().splitlines() if "torch reference on CPU" in line]
    assert len(lines) == 1
    assert "30 layers with 2.5 bits an element, 0 not; 3,600 bytes a token in the former, 23,040 with" in lines[0]
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


def test_a_completion_echoes_its_prompt_and_says_what_was_found(client: Any) -> None:
    prompt = "The five boxing wizards jump quickly. " * 12
    asked: dict[str, Any] = {"model": "small", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    echoed = client.completions.create(**asked, echo=True, logprobs=1)
    assert echoed.choices[0].text.startswith(prompt)
    likely = echoed.choices[0].logprobs.token_logprobs
    assert len(likely) == echoed.usage.prompt_tokens + 4
    assert likely[0] is None
    assert all(number <= 0 for number in likely[1:])
    assert sum(likely[40:]) / len(likely[40:]) > -0.5  # it repeats
    again = client.completions.create(**asked).usage
    assert again.prompt_tokens_details.cached_tokens == (again.prompt_tokens - 1) // 16 * 16


def test_a_tool_call_streams(client: Any) -> None:
    """Its arguments come in pieces, and are what the tool's schema asks for. The prompt's middle is read as INT2."""
    places = ["Paris", "London", "Berlin"]
    schema = {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": places}, "days": {"type": "integer"}},
        "required": ["place", "days"],
        "additionalProperties": False,
    }
    tool = {
        "type": "function",
        "function": {"name": "forecast", "description": "Weather to come", "parameters": schema, "strict": True},
    }
    stream = client.chat.completions.create(
        model="small",
        messages=[*QUESTION, {"role": "assistant", "content": "Paris."}] * 3
        + [{"role": "user", "content": "What will the weather be there in the next 3 days?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "forecast"}},
        temperature=0,
        max_tokens=120,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert pieces[0].function.name == "forecast"
    assert len(pieces) > 3
    arguments = json.loads("".join(piece.function.arguments or "" for piece in pieces))
    assert arguments["place"] in places
    assert isinstance(arguments["days"], int)
    assert arguments.keys() == {"place", "days"}
    assert chunks[-1].usage.prompt_tokens > 16 + 48 + 16


def test_structured_output_streams(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "enum": ["Paris", "Rome"]}, "sure": {"type": "boolean"}},
        "required": ["capital", "sure"],
        "additionalProperties": False,
    }
    stream = client.chat.completions.create(
        model="small",
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
        temperature=0,
        max_tokens=40,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) > 3
    answer = json.loads("".join(pieces))
    assert answer["capital"] == "Paris"
    assert isinstance(answer["sure"], bool)


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
    assert min(values["int2_reads_total"], values["bf16_reads_total"]) > 1000
    assert values["shrunk_steps_total"] == values["int2_sink_reads_total"] == values["saturated_rows_total"] == 0


def test_prometheus_reads_the_metrics_and_the_dashboard_asks_for_what_is_there(server: Server) -> None:
    """Every query parses, and every series that it names exists with the labels that it uses."""
    families = list(text_string_to_metric_families(server.metrics()))
    kinds = {family.name: family.type for family in families if family.name.startswith("vllm:oscar_")}
    assert kinds == {
        "vllm:oscar_pool_blocks": "gauge",
        "vllm:oscar_used_blocks": "gauge",
        "vllm:oscar_sink_tokens": "gauge",
        "vllm:oscar_window_tokens": "gauge",
        "vllm:oscar_shrunk_steps": "counter",
        "vllm:oscar_evicted_blocks": "counter",
        "vllm:oscar_saturated_rows": "counter",
        "vllm:oscar_int2_reads": "counter",
        "vllm:oscar_bf16_reads": "counter",
        "vllm:oscar_int2_sink_reads": "counter",
    }
    labels: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        labels.setdefault(sample.name, set()).update(sample.labels)
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) > 10
    asked = set()
    for query in queries:
        promql_parser.parse(query.replace("$__rate_interval", "5m"))
        names = set(re.findall(r"vllm:\w+", query))
        assert names <= labels.keys(), query
        used = {name for group in re.findall(r"by \(([^)]*)\)", query) for name in re.split(r",\s*", group)}
        used |= set(re.findall(r"[{,]\s*(\w+)\s*[=!]", query))
        assert all(used <= labels[name] for name in names), query
        asked |= names
    samples = {name + "_total" * (kind == "counter") for name, kind in kinds.items()}
    assert samples <= asked, "each of our metrics has a place in the dashboard"


def test_errors_leave_the_server_alive(client: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="1280"):
        client.completions.create(model="small", prompt="word " * 1300, max_tokens=6)
    assert client.completions.create(model="small", prompt="One, two,", max_tokens=2, temperature=0).choices


def test_oscar_eval_asks_a_running_server(
    server: Server, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Needles, each behind its haystack sent before; and a chat, asked twice: what is first is the reference."""
    picture = tmp_path / "needles.png"
    url = f"http://127.0.0.1:{server.port}"
    asked = f"--server ours={url} --needle 1024 --trials 1 --generate 1 --tokens 8 --json --plot {picture}"
    assert cli.main(["eval", str(model_path), *asked.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(r["method"], r["depth"], r["asked"], r["log_p"]) for r in report["needles"]] == [
        ("ours", depth, 1, None) for depth in DEPTHS
    ]
    # over any cache the model answers with one of the four numbers, and guessing right four times is rare
    assert sum(r["right"] for r in report["needles"]) >= 1
    (answers,) = report["answers"]
    assert (answers["method"], answers["prompts"], answers["tokens"], answers["kl"]) == ("ours", 1, 8, [None] * 4)
    assert 0 <= answers["agreed"] <= 8  # the second time the prompt comes out of the prefix cache, in INT2
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_oscar_eval_names_a_server_that_does_not_answer(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert cli.main(["eval", str(model_path), "--server", url, "--needle", "1024"]) == 1
    assert f"no model answers at {url}/v1/models" in capsys.readouterr().err


def test_the_recipe_for_lm_eval_reports_both_filters(server: Server, model_path: Path, tmp_path: Path) -> None:
    """docs/lm-eval.md's commands for gsm8k, with a task of eight small sums in its place."""
    page = (ROOT / "docs" / "lm-eval.md").read_text()
    exports = "".join(f"{line.strip()}\n" for line in page.splitlines() if line.startswith("    export ARGS="))
    (command,) = re.findall(r"^    (lm_eval .*--tasks gsm8k .*\n.*\n)", page, re.MULTILINE)
    for old, new in {
        "model=MODEL": "model=small", "tokenizer=MODEL": f"tokenizer={model_path}", ":8000": f":{server.port}",
        "max_length=40960": "max_length=1280", "max_gen_toks=1024": "max_gen_toks=48",
        "--tasks gsm8k": f"--tasks sums --include_path {ROOT / 'tests' / 'serve'}",
    }.items():  # fmt: skip
        assert old in exports + command, old
        exports, command = exports.replace(old, new), command.replace(old, new)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    shutil.copy(ROOT / "tests" / "serve" / "sums.jsonl", tmp_path)
    done = subprocess.run(
        ["bash", "-euc", exports + command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(path.read_text())
    scores = results["results"]["sums"]
    strict, flexible = (scores[f"exact_match,{name}"] for name in ("strict-match", "flexible-extract"))
    assert 0 < strict <= flexible <= 1  # the examples show the format, and the questions are among them
    assert results["n-samples"]["sums"] == {"original": 8, "effective": 8}
    (samples,) = (tmp_path / "results").rglob("samples_sums_*.jsonl")
    rows = [json.loads(row) for row in samples.read_text().splitlines()]
    assert {row["filter"] for row in rows} == {"strict-match", "flexible-extract"}


def test_shutdown_is_clean(server: Server) -> None:
    """After the others: one SIGTERM, every process gone, no traceback in the log."""
    assert len(server.processes()) > 1, "the engine core should be a process of its own"
    server.process.send_signal(signal.SIGTERM)
    server.wait_until_gone()
    assert server.process.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    assert server.processes() == []
    assert not list(server.temporary.glob("oscar_metrics_*"))
    # on a busy machine vLLM's front end sees its engine gone before it has stopped listening, and logs that
    odd = [line for line in server.output().splitlines() if "Traceback" in line and "[async_llm.py:" not in line]
    assert odd == [], server.output()[-5000:]
