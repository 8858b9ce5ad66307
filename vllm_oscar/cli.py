"""oscar COMMAND: each command lives in a module of its own, this one only chooses."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_oscar import __version__
from vllm_oscar.errors import OscarError

COMMANDS = {
    "eval": "vllm_oscar.evaluation.command",
    "inspect": "vllm_oscar.evaluation.inspection",
    "doctor": "vllm_oscar.evaluation.doctor",
}
# these have parsers of their own, which need torch
TOOLS = {
    "serve": ("vllm_oscar.integration.serve", "vllm serve with the INT2 cache, calibrated first where it has to be"),
    "calibrate": ("vllm_oscar.calibrate.__main__", "measure a model on text and write its sidecar"),
    "convert": ("vllm_oscar.calibrate.rotation_zoo", "RotationZoo files to a sidecar, and back"),
}


# of what is imported only where it is needed
INSTALL = {
    "vllm": "'vllm-oscar[vllm]'",
    "transformers": "'vllm-oscar[calibrate]'",
    "matplotlib": "'vllm-oscar[plot]'",
    "openai": "openai",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `oscar`; returns the exit status."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except OscarError as error:
        print(f"error: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name not in INSTALL:
            raise
        print(f"error: {error.name} is not installed: pip install {INSTALL[error.name]}", file=sys.stderr)
    return 1


def _run(given: list[str]) -> int:
    status: int
    if given[:1] != ["serve"]:  # whose log is its output
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results
    if given and given[0] in TOOLS:
        status = import_module(TOOLS[given[0]][0]).main(given[1:])
        return status
    parser = argparse.ArgumentParser(prog="oscar", description="Tools of vllm-oscar, the INT2 KV cache for vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-oscar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in TOOLS.items():
        commands.add_parser(name, help=text, add_help=False)
    for name, module in COMMANDS.items():
        command = import_module(module)
        sub = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    options = parser.parse_args(given)
    status = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
