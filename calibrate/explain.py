"""Why a checkpoint cannot be read, in one line that says what to do: transformers' own reasons fill a screen."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from vllm_oscar.errors import CalibrationError, OscarError


@contextmanager
def explained(name: str, part: str, remedy: str = "") -> Iterator[None]:
    """Around reading a part of a checkpoint.

    Args:
        name: folder or hub id
        part: what is read
        remedy: where the reason is none that is known here

    Raises:
        CalibrationError: it could not be read.
    """
    try:
        yield
    except OscarError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise CalibrationError(f"{name}: {_reason(name, error) or _first_line(part, error, remedy)}") from error


def _reason(name: str, error: BaseException) -> str:
    """A known reason, with what to do; empty: none."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    kinds = {type(cause) for cause in _causes(error)}
    if any(issubclass(kind, GatedRepoError) for kind in kinds):
        return (
            f"access is gated: accept its terms on https://huggingface.co/{name} and log in (hf auth login, or "
            "HF_TOKEN), or name a folder that it was downloaded to"
        )
    if any(issubclass(kind, RepositoryNotFoundError) for kind in kinds):
        return "neither a folder nor a repository that you may read (private ones: hf auth login, or HF_TOKEN)"
    if any(issubclass(kind, LocalEntryNotFoundError) for kind in kinds):
        return "not in the local cache, and the hub cannot be reached: download it, or name a folder that it is in"
    if "trust_remote_code" in str(error):
        return "it brings code of its own; --trust-remote-code runs that, if you trust its author"
    return ""


def _first_line(part: str, error: BaseException, remedy: str) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"its {part} cannot be read ({lines[0]:.300})" + (f"; {remedy}" if remedy else "")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
