"""The process that an engine's start waits for where a sidecar is missing (vllm_oscar/integration/calibration.py):
`oscar calibrate`, with the reason of a failure on standard output. Progress is on standard error, as ever."""

import logging
import sys
from collections.abc import Sequence

from vllm_oscar.calibrate.__main__ import parser, run
from vllm_oscar.errors import OscarError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run(parser().parse_args(arguments))
    except Exception as error:  # whatever it is: the start ends with it
        print(f"{type(error).__name__}: {error}")
        if isinstance(error, OscarError):  # it says all there is to say
            return 1
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
