"""Engines side by side, a process each, whose verdicts are printed as they come: a run that is cut short keeps them."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERDICTS = ("PASS", "FAIL", "LEFT OUT")  # how the lines of a gate begin


@dataclass(frozen=True)
class Process:
    """A command, where its output is kept, and changes of its environment."""

    command: list[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> tuple[int, list[str]]:
        """Its exit status and its lines, once it has ended. Verdicts among them are printed at once."""
        lines = []
        with (
            self.log.open("w") as log,
            subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=os.environ | dict(self.environment),
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                lines.append(line.rstrip("\n"))
                if line.startswith(VERDICTS):
                    print(line, end="", flush=True)
        return process.returncode, lines


def side_by_side(processes: Mapping[str, Process]) -> Iterator[tuple[str, list[str]]]:
    """Run all at once; yields each one's name and lines as it ends. Prints a verdict for those that failed to end."""
    with ThreadPoolExecutor(max(1, len(processes))) as pool:
        futures = {pool.submit(process.run): name for name, process in processes.items()}
        for future in as_completed(futures):
            code, lines = future.result()
            if code:
                lines.append(f"FAIL {futures[future]}: ended with {code}")
                print(lines[-1], *lines[-26:-1], sep="\n", flush=True)
            yield futures[future], lines


def failed(lines: list[str]) -> bool:
    """Whether a verdict says so."""
    return any(line.startswith("FAIL") for line in lines)


def compared(
    processes: Mapping[str, Process], outs: Mapping[str, Path], base: str
) -> Iterator[tuple[str, Any | None, Any]]:
    """Run all at once; yields each one's name and what it wrote beside what the base wrote, as soon as both have ended.
    Of one that failed, the base too: None.

    Args:
        outs: JSON files that the processes write
    """
    results: dict[str, Any] = {}
    for name, lines in side_by_side(processes):
        if failed(lines):
            yield name, None, None
            continue
        results[name] = json.loads(outs[name].read_text())
        if base in results:  # those that ended earlier have waited for it
            for other in [other for other in results if other != base]:
                yield other, results.pop(other), results[base]
