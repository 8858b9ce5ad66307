"""What the workers count, as Prometheus metrics and as a line in the log.

vLLM's statistics travel from the engine core to the front end in records that have no place for ours. Prometheus'
client can share values between processes through files instead: where PROMETHEUS_MULTIPROC_DIR names a folder, as vLLM
sees to itself with more than one API server, the workers' values are in the server's /metrics. With everything in one
process they are in the registry that `LLM.get_metrics` reads. Else the log line remains.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Mapping

from prometheus_client import REGISTRY, Counter, Gauge

logger = logging.getLogger("vllm.oscar")

# name in OscarRuntime.statistics -> help text
GAUGES = {
    "pool_blocks": "BF16 blocks that a layer's pool has",
    "used_blocks": "of those, blocks in use (in the fullest of several KV-cache groups)",
    "sink_tokens": "first tokens of a request that are kept in BF16 now; less than asked for when the pool is short",
    "window_tokens": "recent tokens of a request that are kept in BF16 now; less than asked for when the pool is short",
}
COUNTERS = {
    "shrunk_steps": "steps in which the sink or the window was smaller than asked for",
    "evicted_blocks": "BF16 blocks given up for others",
    "saturated_rows": "key or value rows in which something was not representable",
    "int2_reads": "stored tokens read from INT2, over layers and KV heads",
    "bf16_reads": "stored tokens read from their BF16 copy, likewise",
    "int2_sink_reads": "sink tokens read from INT2, likewise",
}
LABELS = ("engine", "worker")


@functools.cache
def _collectors() -> dict[str, Gauge | Counter]:
    gauges = {
        name: Gauge(f"vllm:oscar_{name}", text, LABELS, registry=None, multiprocess_mode="mostrecent")
        for name, text in GAUGES.items()
    }
    return gauges | {
        name: Counter(f"vllm:oscar_{name}", text, LABELS, registry=None) for name, text in COUNTERS.items()
    }


class Publisher:
    """Of one worker.

    Args:
        engine: data-parallel rank
        worker: rank within the engine
    """

    def __init__(self, engine: int, worker: int) -> None:
        self._labels = {"engine": str(engine), "worker": str(worker)}
        self._published: dict[str, int] = {}
        self._failed = False
        self._logged = (time.monotonic(), "")

    def publish(self, statistics: Mapping[str, int]) -> None:
        """Set the metrics; log them when they changed, at vLLM's interval for statistics. Never raises: an engine does
        not end for want of statistics."""
        try:
            self._set(statistics)
        except (OSError, ValueError) as problem:  # the folder of shared values is gone, or full
            if not self._failed:
                logger.warning("OSCAR: metrics cannot be set, only this log has them: %r", problem)
            self._failed = True
        line = ", ".join(f"{name} {statistics[name]:,}" for name in (*GAUGES, *COUNTERS) if name in statistics)
        now, (then, last) = time.monotonic(), self._logged
        if line != last and now - then >= float(os.environ.get("VLLM_LOG_STATS_INTERVAL", 10)):
            logger.info("OSCAR: %s", line)
            self._logged = now, line

    def _set(self, statistics: Mapping[str, int]) -> None:
        for name, collector in _collectors().items():
            if name not in statistics:
                continue
            with contextlib.suppress(ValueError):  # it is registered; vLLM's own metrics, when made, take ours out
                REGISTRY.register(collector)
            metric, value = collector.labels(**self._labels), statistics[name]
            if isinstance(metric, Gauge):
                metric.set(value)
            else:
                published = self._published.get(name, 0)
                metric.inc(value - published if value >= published else value)  # fallen: it began anew
                self._published[name] = value
