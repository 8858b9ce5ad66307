"""Every kernel against its torch reference on this machine's GPU: one line PASS or FAIL a case.

    python -m gates.kernels [--only decode] [--jobs 8]

The cases come from the modules of gates/cases, each of which has

    gpu_cases() -> list of cases, whose str() names them
    check(case, device) -> str, some figure to print; raises AssertionError where the kernel is wrong
"""

import argparse
import importlib
import multiprocessing
import sys
import time
from pathlib import Path

import torch


def modules(only: str | None) -> list[str]:
    names = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))
    return [f"gates.cases.{name}" for name in names if only in (None, name)]


def run(job: tuple[str, int]) -> tuple[bool, str]:
    """One case: whether it passed, and its line."""
    name, index = job
    module = importlib.import_module(name)
    case = module.gpu_cases()[index]
    start = time.monotonic()
    try:
        passed, detail = True, module.check(case, torch.device("cuda"))
        torch.cuda.synchronize()
    except Exception as problem:  # also what the compiler or the GPU throws: the other cases go on
        passed, detail = False, f"{type(problem).__name__}: {str(problem)[-300:]}"
    seconds = time.monotonic() - start
    kind = name.removeprefix("gates.cases.")
    return passed, f"{'PASS' if passed else 'FAIL'} {kind:8} {detail:24} {seconds:5.1f}s  {case}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="decode, write, prefill, ...")
    parser.add_argument("--jobs", type=int, default=8, help="processes; compiling takes most of the time")
    options = parser.parse_args()
    jobs = [(name, i) for name in modules(options.only) for i in range(len(importlib.import_module(name).gpu_cases()))]
    failed = 0
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=16) as pool:
        for passed, line in pool.imap(run, jobs):
            failed += not passed
            print(line, flush=True)
    print(f"{len(jobs) - failed} of {len(jobs)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
