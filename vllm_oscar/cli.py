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
    "calibrate": ("vllm_oscar.calibrate.__main__", "measure a model on text and write its sidecar"),
    "convert": ("vllm_oscar.calibrate.rotation_zoo", "RotationZoo files to a sidecar, and back"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `oscar`; returns the exit status."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results
    given = list(sys.argv[1:] if arguments is None else arguments)
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
    status: int
    if given and given[0] in TOOLS:
        status = import_module(TOOLS[given[0]][0]).main(given[1:])
        return status
    options = parser.parse_args(given)
    try:
        status = options.run(options)
    except OscarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
