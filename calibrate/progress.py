"""How far a long stage is and how long it takes: a bar on a terminal, two lines where nobody watches."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("vllm_oscar.calibrate")
_EARLY = 20  # the estimate comes after one part in so many


@contextmanager
def stage(total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """Yields what is called with the number of units that are done since the last call.

    The first call counts what an earlier run had done, or nothing.
    """
    start = time.perf_counter()
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=total, unit=f" {unit}", smoothing=0.02) as bar:
            yield bar.update
    else:
        yield _Estimate(total, unit)
    logger.info("%d %s in %.0f s", total, unit, time.perf_counter() - start)


class _Estimate:
    """Says once how long the rest will take."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit = total, unit
        self._before: int | None = None
        self._done = 0
        self._start = 0.0

    def __call__(self, count: int) -> None:
        if self._before is None:
            self._before, self._start = count, time.perf_counter()
        was_early = self._is_early()
        self._done += count
        if was_early and not self._is_early():
            rate = (time.perf_counter() - self._start) / (self._done - self._before)
            left = self._total - self._done
            logger.info("%d of %d %s done, about %.0f s left", self._done, self._total, self._unit, left * rate)

    def _is_early(self) -> bool:
        return (self._done - (self._before or 0)) * _EARLY < self._total
