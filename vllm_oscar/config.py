"""The options and where they come from.

    vllm serve MODEL --kv-cache-dtype oscar --additional-config '{"oscar": {"window": 512}}'
    LLM(MODEL, kv_cache_dtype="oscar", additional_config={"oscar": {"window": 512}})

The environment variable VLLM_OSCAR_CONFIG takes the same JSON object (that of "oscar"), for options not given there.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_oscar.errors import ConfigError

ENVIRONMENT_VARIABLE = "VLLM_OSCAR_CONFIG"
KEY_ENCODERS = ("ls", "metric")
MAX_TOKENS = 4000  # of the sink, and of the window; the kernel that gives slots away counts their blocks in registers


@dataclass(frozen=True)
class OscarConfig:
    """Options of the cache.

    Attributes:
        sidecar: path or Hugging Face repo id of the calibrated rotations; None: looked up, see `sidecar.find_sidecar`
        calibrate: make the sidecar before the engine starts where none is found; True, or options of `oscar calibrate`
            for it ("--data chats.jsonl")
        rotation: "calibrated" (a sidecar), or "hadamard" to serve without a calibration, at a loss of quality
        sink: first tokens of a request that are also kept in BF16
        window: last tokens of a request that are also kept in BF16
        key_encoder: "ls" or "metric"; None: what the sidecar says
        pool_share: BF16 copies' share of the memory left for the KV cache
    """

    sidecar: str | None = None
    calibrate: bool | str = False
    rotation: str = "calibrated"
    sink: int = 64
    window: int = 256
    key_encoder: str | None = None
    pool_share: float = 0.08

    def __post_init__(self) -> None:
        def check(good: bool, text: str) -> None:
            if not good:
                raise ConfigError(f"oscar option {text}")

        check(self.sidecar is None or isinstance(self.sidecar, str), f"sidecar: {self.sidecar!r} is no path or repo id")
        check(
            isinstance(self.calibrate, bool | str),
            f"calibrate: {self.calibrate!r}; use true, false or a text of `oscar calibrate` options",
        )
        check(
            self.rotation in ("calibrated", "hadamard"), f"rotation: {self.rotation!r}; use 'calibrated' or 'hadamard'"
        )
        for name, least in (("sink", 0), ("window", 1)):
            tokens = getattr(self, name)
            check(
                _is_int(tokens) and least <= tokens <= MAX_TOKENS,
                f"{name}: {tokens!r} is no number of tokens ({least} to {MAX_TOKENS})",
            )
        check(
            self.key_encoder is None or self.key_encoder in KEY_ENCODERS,
            f"key_encoder: {self.key_encoder!r}; use one of {KEY_ENCODERS} or leave it out",
        )
        check(
            isinstance(self.pool_share, int | float) and 0 < self.pool_share < 1,
            f"pool_share: {self.pool_share!r} is no fraction between 0 and 1",
        )
        check(
            not (self.rotation == "hadamard" and self.sidecar),
            "rotation: 'hadamard' needs no sidecar; leave one of the two out",
        )

    @classmethod
    def parse(cls, additional_config: Mapping[str, Any] | None) -> "OscarConfig":
        """Each option from the "oscar" object of vLLM's additional_config, else the environment variable, else its
        default.

        Raises:
            ConfigError: unknown option or bad value; the message names the option.
        """
        given = (additional_config or {}).get("oscar", {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"oscar options must be a JSON object, not {given!r}")
        options = {**environment_options(), **given}
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown oscar options {unknown}; known: {sorted(known)}")
        return cls(**options)


def environment_options() -> dict[str, Any]:
    """Options that the environment gives.

    Raises:
        ConfigError: they are no JSON object.
    """
    try:
        options = json.loads(os.environ.get(ENVIRONMENT_VARIABLE, "{}"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} is no JSON object: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} must be a JSON object, not {options!r}")
    return options


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
