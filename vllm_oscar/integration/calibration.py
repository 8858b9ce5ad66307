"""A missing sidecar, made before an engine starts: once, by a process of its own.

The process that starts the engine waits for it, and so holds none of the GPU memory that a calibration needs.
"""

import fcntl
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_oscar.errors import CalibrationError, ConfigError, SidecarNotFoundError
from vllm_oscar.sidecar import cached_path, find_sidecar

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger("vllm.oscar")


def calibrate_missing(model_config: "ModelConfig", options: str = "") -> None:
    """Calibrate a model into the user's cache unless a sidecar is found for it.

    Of several processes that ask at once one calibrates and the others wait.

    Args:
        options: further ones of `oscar calibrate`, as a shell takes them

    Raises:
        ConfigError: the engine changes the checkpoint's configuration, so that a calibration may not fit.
        CalibrationError: the calibration failed; the message is its reason.
    """
    model, revision = model_config.model, model_config.revision
    if _exists(model, revision):
        return
    if model_config.hf_overrides:
        raise ConfigError(
            "calibrate: --hf-overrides changes the checkpoint's configuration, and a calibration is of the checkpoint "
            f"as it is. Write the change into its config.json, or, if attention is not concerned, run: "
            f"oscar calibrate {model}"
        )
    out = cached_path(model, revision)
    arguments = [model, *shlex.split(options), "--out", str(out)]
    arguments += ["--revision", revision] if revision else []
    arguments += ["--trust-remote-code"] if model_config.trust_remote_code else []
    with _one_at_a_time(out) as lock:
        if _exists(model, revision):  # made by the process that was waited for
            return
        logger.info("no OSCAR sidecar for %s yet, making it, once: oscar calibrate %s", model, shlex.join(arguments))
        done = subprocess.run(
            [sys.executable, "-m", "vllm_oscar.calibrate.at_start", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[lock],  # if this process is killed, the next start waits for the calibration
            check=False,
        )
    if done.returncode:
        reason = done.stdout.strip() or f"exit status {done.returncode}, see above"
        raise CalibrationError(f"the calibration of {model} failed: {reason}")


def _exists(model: str, revision: str | None) -> bool:
    try:
        find_sidecar(model, revision=revision)
    except SidecarNotFoundError:
        return False
    return True


@contextmanager
def _one_at_a_time(out: Path) -> Iterator[int]:
    """Holds the lock of a sidecar to be made.

    Yields:
        The descriptor: a process that inherits it holds the lock until it ends.

    Raises:
        CalibrationError: there is no place for it.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.with_name(f"{out.name}.lock").open("w")
    except OSError as error:
        raise CalibrationError(
            f"no place for a sidecar ({error}): set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process calibrates into %s: waiting for it", out)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
