"""What ends a server: a kill of its engine, a sidecar that cannot be used. And two engines behind one server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import START_LIMIT
from vllm_oscar import __version__
from vllm_oscar.sidecar import ModelFingerprint, Sidecar

if TYPE_CHECKING:
    from tests.serve.conftest import Server

pytestmark = pytest.mark.serve
OPTIONS = {"sink": 16, "window": 32}
COUNT = ", ".join(map(str, range(1, 40))) + ","  # 117 tokens, more than sink + window
RANKS = [{"X-data-parallel-rank": str(rank)} for rank in range(2)]


def answer(server: Server, **given: Any) -> str:
    asked = {"model": "small", "prompt": COUNT, "temperature": 0, "max_tokens": 8} | given
    reply = server.client().completions.create(**asked)
    text: str = reply.choices[0].text
    return text


def kill_engine_in_mid_stream(server: Server) -> None:
    """Kill the first engine core while it answers. The client is told, and nothing of the server remains."""
    from openai import APIError

    names = {process: Path(f"/proc/{process}/cmdline").read_text() for process in server.processes()}
    engine = min(process for process, name in names.items() if "EngineCore" in name)
    shared_memory = server.shared_memory()
    stream = server.client().completions.create(
        model="small", prompt=COUNT, temperature=0, max_tokens=300, stream=True, extra_headers=RANKS[0]
    )
    for _ in range(3):
        next(stream)
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(APIError, match="EngineCore encountered an issue"):
        list(stream)
    server.wait_until_gone()
    assert server.process.returncode is not None
    assert server.processes() == []
    assert shared_memory and not any(Path(name).exists() for name in shared_memory)
    left = [path for path in server.temporary.iterdir() if not path.is_socket()]  # vLLM's sockets remain
    assert all(path.name.startswith("torchinductor") for path in left), left


@pytest.fixture(scope="module")
def two_engines(serve: Callable[..., Server]) -> Server:
    server = serve(OPTIONS, "--data-parallel-size", 2, "--api-server-count", 1)  # a process less to start
    server.wait_until_ready()
    return server


def test_each_of_two_engines_answers(two_engines: Server) -> None:
    assert [answer(two_engines, extra_headers=rank) for rank in RANKS] == [" 40, 41,"] * 2


def test_metrics_tell_two_engines_apart(two_engines: Server) -> None:
    text = two_engines.metrics()
    for name, value in (("pool_blocks", 56), ("window_tokens", 32), ("shrunk_steps_total", 0)):
        found = re.findall(rf'^vllm:oscar_{name}{{engine="(\d)",worker="0"}} (\S+)$', text, re.MULTILINE)
        assert sorted(found) == [("0", f"{value}.0"), ("1", f"{value}.0")]


def test_a_killed_engine_of_two_ends_the_server(two_engines: Server) -> None:
    """After the others."""
    kill_engine_in_mid_stream(two_engines)


def test_a_restarted_server_answers_as_before_and_a_killed_engine_ends_it(
    serve: Callable[..., Server], sidecar_path: Path
) -> None:
    """Its pool has two thirds of what four answers to one prompt need: metrics and log say that windows shrink."""
    server = serve(OPTIONS | {"pool_share": 0.0031}, "--max-num-seqs", 4)
    server.wait_until_ready()
    assert answer(server) == " 40, 41,"
    # past the 64th step, at which the counters are looked at
    answer(server, n=4, temperature=1, max_tokens=66, extra_body={"ignore_eos": True})
    found = dict(re.findall(r"^vllm:oscar_(\w+){.*} (\S+)$", server.metrics(), re.MULTILINE))
    assert 8 <= float(found["pool_blocks"]) < 10
    assert float(found["shrunk_steps_total"]) > 30
    assert float(found["evicted_blocks_total"]) > 0
    log = server.output()
    assert re.search(rf"OSCAR {re.escape(__version__)}.*{Sidecar.load(sidecar_path).digest[:12]}", log)
    assert "raise pool_share in the oscar options, or lower --max-num-seqs" in log
    assert re.search(r"OSCAR: pool_blocks [89], .*shrunk_steps [1-9]", log)
    kill_engine_in_mid_stream(server)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"windw": 3}, r"ConfigError: unknown oscar options \['windw'\]; known: .*'window'"),
        ({"sidecar": "other"}, "SidecarMismatchError: .*other: .*head_size: 128"),
    ],
    ids=["unknown option", "sidecar of another model"],
)
def test_a_server_that_cannot_start_ends_with_the_reason(
    serve: Callable[..., Server], tmp_path: Path, fault: dict[str, Any], says: str
) -> None:
    """It is the log's last line. What else a start refuses, tests/engine/test_startup.py asks for in one process."""
    other = ModelFingerprint("llama", 30, 9, 3, 128, {"rope_type": "default", "rope_theta": 1e5})
    Sidecar.hadamard(other).save(tmp_path / "other")
    given = {name: str(tmp_path / value) if name == "sidecar" else value for name, value in fault.items()}
    server = serve(given)
    assert server.process.wait(START_LIMIT) != 0
    assert re.search(says, server.output().splitlines()[-1]), server.output()[-3000:]
