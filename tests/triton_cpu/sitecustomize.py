"""vLLM's model runner V2 on its CPU platform, with Triton's interpreter in place of the backend of triton-cpu.

V2's own kernels are Triton's, and vLLM's CPU build takes triton only where it has a backend "cpu". The interpreter
needs none: a name that says it is there is enough. Python imports this module in every process that has its folder on
PYTHONPATH, before vLLM looks.
"""

from types import SimpleNamespace
from typing import Any

import triton.backends

backends: dict[str, Any] = triton.backends.backends
backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True)))
