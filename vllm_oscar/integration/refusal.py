"""How everything that an INT2 cache cannot serve is refused: at start-up, by name, with what to use instead."""

from typing import Any

from vllm_oscar.errors import UnsupportedError
from vllm_oscar.integration.seams import DTYPE


def refuse(condition: Any, what: str, instead: str = "use --kv-cache-dtype fp8 or auto") -> None:
    """Raise UnsupportedError if the condition holds.

    Args:
        what: ends "... does not support"
        instead: the remedy, a clause
    """
    if condition:
        raise UnsupportedError(f"--kv-cache-dtype {DTYPE} does not support {what}; {instead}")
