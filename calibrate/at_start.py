"""A missing sidecar, made before an engine starts: once, by a process of its own.

The process that starts the engine waits for it and so holds no GPU memory of the calibration's; the state of a
calibration that was killed is gone on from, as always.
"""

import fcntl
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_oscar.errors import CalibrationError, ConfigError, OscarError, SidecarNotFoundError
from vllm_oscar.sidecar import ModelFingerprint, cached_path, find_sidecar

logger = logging.getLogger("vllm.oscar")


def make_missing(
    model: str,
    fingerprint: ModelFingerprint,
    options: str = "",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Calibrate a model into the user's cache unless a sidecar is found for it.

    Of several processes that ask at once one calibrates and the others wait.

    Args:
        model: folder or hub id
        fingerprint: the model as the engine will run it
        options: further ones of `oscar calibrate`, as a shell takes them
        revision: of a hub id
        trust_remote_code: run code that comes with the checkpoint

    Raises:
        ConfigError: the engine changes the checkpoint's configuration, so that a calibration of that would not fit.
        CalibrationError: the calibration failed; the message is its reason.
    """
    if _exists(model, revision):
        return
    _check_configuration(model, fingerprint, revision, trust_remote_code)
    out = cached_path(model, revision)
    command = [sys.executable, "-m", __name__, model, *shlex.split(options), "--out", str(out)]
    command += ["--revision", revision] if revision else []
    command += ["--trust-remote-code"] if trust_remote_code else []
    with _one_at_a_time(out) as lock:
        if _exists(model, revision):  # made by the process that was waited for
            return
        logger.info("no OSCAR sidecar for %s yet: calibrating, once (%s)", model, shlex.join(command[3:]))
        # it holds the lock too: if this process is killed, the next start waits for the calibration
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, pass_fds=[lock], check=False)
    if done.returncode:
        reason = done.stdout.strip() or f"exit status {done.returncode}, see above"
        raise CalibrationError(f"the calibration of {model} failed: {reason}")


def _exists(model: str, revision: str | None) -> bool:
    try:
        find_sidecar(model, revision=revision)
    except SidecarNotFoundError:
        return False
    return True


def _check_configuration(
    model: str, fingerprint: ModelFingerprint, revision: str | None, trust_remote_code: bool
) -> None:
    """Before minutes are spent on a sidecar that would be refused."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    if differences := ModelFingerprint.of(config).differences(fingerprint):
        raise ConfigError(
            f"calibrate: the engine changes the configuration of {model}, whose calibration would not fit: "
            f"{'; '.join(differences)} (checkpoint, then engine); write the change into the checkpoint's config.json"
        )


@contextmanager
def _one_at_a_time(out: Path) -> Iterator[int]:
    """Holds the lock of a sidecar to be made.

    Yields:
        The descriptor: a process that inherits it holds the lock until it ends.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(f"{out.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process calibrates into %s: waiting for it", out)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def main(arguments: Sequence[str] | None = None) -> int:
    """The process of its own: `oscar calibrate`, with the reason of a failure on standard output."""
    from vllm_oscar.calibrate.__main__ import parser, run

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run(parser().parse_args(arguments))
    except Exception as error:  # whatever it is: the waiting process ends with it
        print(f"{type(error).__name__}: {error}")
        if isinstance(error, OscarError):  # it says all there is to say
            return 1
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
