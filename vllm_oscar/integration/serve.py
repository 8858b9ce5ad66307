"""oscar serve MODEL ...: `vllm serve MODEL ... --kv-cache-dtype oscar`, calibrated first where no sidecar is found.

The workers' counters are in its /metrics (docs/metrics.md).
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence

from vllm_oscar.config import ENVIRONMENT_VARIABLE, environment_options
from vllm_oscar.errors import ConfigError
from vllm_oscar.integration.seams import DTYPE, vllm_version

DTYPE_OPTIONS = ("--kv-cache-dtype", "--kv_cache_dtype")


def main(arguments: Sequence[str]) -> int:
    """Become `vllm serve`; returns when the server ends.

    Args:
        arguments: all that `vllm serve` takes, handed on as they are

    Raises:
        VllmVersionError: vLLM is absent or outside the supported range.
        ConfigError: another KV cache dtype is asked for.
    """
    vllm_version()
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, _, value = argument.partition("=")
        if option in DTYPE_OPTIONS and (asked := value or following) != DTYPE:
            raise ConfigError(f"oscar serve is vllm serve with {option} {DTYPE}; use vllm serve for {asked}")
    # as defaults: what --additional-config says wins, whichever way it is given
    os.environ[ENVIRONMENT_VARIABLE] = json.dumps({"calibrate": True, **environment_options()})
    sys.argv = ["vllm", "serve", *arguments, DTYPE_OPTIONS[0], DTYPE]
    with tempfile.TemporaryDirectory(prefix="oscar_metrics_") as shared:
        # how counts get from the workers to the server; Prometheus' client looks at it when it is imported
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", shared)
        from vllm.entrypoints.cli.main import main as vllm

        vllm()
    return 0
