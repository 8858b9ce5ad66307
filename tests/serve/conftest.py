"""`vllm serve` as a user starts it: the plugin in every process of it.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_oscar.sidecar import FILE_NAME

START_LIMIT, STOP_LIMIT = 300, 60  # seconds; a machine that is busy takes a minute to start


class Server:
    """A running `vllm serve`; its output goes to a file.

    Args:
        model: folder
        log: file for the output, in a folder of its own
        oscar: options of the plugin
        options: further ones of `vllm serve`
        command: which serves
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        oscar: dict[str, Any],
        *options: object,
        command: Sequence[str] = ("vllm", "serve", "--kv-cache-dtype", "oscar"),
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        program, subcommand, *first = command
        words = [
            Path(sys.executable).with_name(program), subcommand, model, *first, "--served-model-name", "small",
            "--additional-config", json.dumps({"oscar": oscar}),
            "--host", "127.0.0.1", "--port", self.port, "--max-model-len", 512, "--max-num-seqs", 8,
            "--enforce-eager", "--block-size", 16,
            # with vLLM's default of 0 the server may kill its engine before that has heard of the end
            "--shutdown-timeout", STOP_LIMIT // 2, *options,
        ]  # fmt: skip
        shared = log.parent / "prometheus"  # how metrics get from the workers to the server
        self.temporary = log.parent / "tmp"
        shared.mkdir()
        self.temporary.mkdir()
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_LOG_STATS_INTERVAL": "1",
            "TMPDIR": str(self.temporary),
        }
        if program == "vllm":  # `oscar serve` has a folder of its own
            environment["PROMETHEUS_MULTIPROC_DIR"] = str(shared)
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the engine core is a process of its own
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(word) for word in words],
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

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=240, max_retries=0)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as reply:
            text: str = reply.read().decode()
        return text

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

    def shared_memory(self) -> set[str]:
        """Files in /dev/shm that the processes have mapped."""
        maps = "".join(Path(f"/proc/{process}/maps").read_text() for process in self.processes())
        return set(re.findall(r"/dev/shm/\S+", maps))

    def wait_until_gone(self) -> None:
        """Returns when no process of the session runs any more, or after a while."""
        deadline = time.monotonic() + STOP_LIMIT
        while (self.process.poll() is None or self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)

    def kill(self) -> None:
        if self.processes():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_LIMIT)


def linked(model: Path, folder: Path) -> Path:
    """The model in another folder, without a sidecar."""
    for file in model.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file.resolve())
    return folder


@pytest.fixture(scope="module")
def folder(model_path: Path, sidecar_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its sidecar in place."""
    folder = linked(model_path, tmp_path_factory.mktemp("model"))
    (folder / FILE_NAME).parent.mkdir()
    (folder / FILE_NAME).symlink_to(sidecar_path.resolve())
    return folder


@pytest.fixture(scope="module")
def serve(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Server(oscar, *options) of the test model; the servers end with the module."""
    servers: list[Server] = []

    def start(oscar: dict[str, Any], *options: object) -> Server:
        servers.append(Server(folder, tmp_path_factory.mktemp("log") / "serve.log", oscar, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
