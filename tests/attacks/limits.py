"""A file that is refused must be refused before it costs anything."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = 200 << 20  # bytes beyond what the process has; the files here ask for gigabytes
SECONDS = 20  # of this process's own computing; the files here ask for minutes


@contextmanager
def cheap() -> Iterator[None]:
    """While this is open, more memory or time than a refusal takes is an error."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, before)
