"""Options: where they come from, and what is said about bad ones."""

import json
from typing import Any

import pytest

from vllm_oscar.config import ENVIRONMENT_VARIABLE, OscarConfig
from vllm_oscar.errors import ConfigError, OscarError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def test_defaults_are_those_of_the_measurements() -> None:
    config = OscarConfig.parse(None)
    assert config == OscarConfig() == OscarConfig.parse({}) == OscarConfig.parse({"other": {"sink": 3}})
    assert (config.sink, config.window, config.rotation, config.key_encoder) == (64, 256, "calibrated", None)


def test_additional_config_wins_over_the_environment_option_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, json.dumps({"window": 512, "sink": 0}))
    assert OscarConfig.parse(None) == OscarConfig(window=512, sink=0)
    assert OscarConfig.parse({"oscar": {"window": 128}}) == OscarConfig(window=128, sink=0)
    assert OscarConfig.parse({"oscar": {}}) == OscarConfig(window=512, sink=0)
    assert OscarConfig.parse({"oscar": {"window": 256, "sink": 64}}) == OscarConfig()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"windw": 3}, "windw"),
        ({"window": 0}, "window"),
        ({"window": 2.5}, "window"),
        ({"window": 4001}, "window: 4001 is no number of tokens \\(1 to 4000\\)"),
        ({"window": True}, "window"),
        ({"window": "256"}, "window"),
        ({"sink": -1}, "sink"),
        ({"sink": None}, "sink"),
        ({"sink": 4001}, "sink"),
        ({"rotation": "none"}, "rotation"),
        ({"rotation": ["hadamard"]}, "rotation"),
        ({"key_encoder": "fast"}, "key_encoder"),
        ({"key_encoder": 1}, "key_encoder"),
        ({"pool_share": 0}, "pool_share"),
        ({"pool_share": 1.0}, "pool_share"),
        ({"pool_share": float("nan")}, "pool_share"),
        ({"pool_share": "0.1"}, "pool_share"),
        ({"pool_share": True}, "pool_share"),
        ({"sidecar": 3}, "sidecar"),
        ({"calibrate": 3}, "calibrate: 3; use true, false or a text of `oscar calibrate` options"),
        ({"calibrate": ["--sequences", "3"]}, "calibrate"),
        ({"sidecar": "a.safetensors", "rotation": "hadamard"}, "rotation"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        OscarConfig.parse({"oscar": options})
    assert isinstance(caught.value, OscarError)
    assert isinstance(caught.value, ValueError), "vLLM reports ValueErrors of a configuration as such"


def test_unknown_options_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown oscar options \['windw'\].*'window'"):
        OscarConfig.parse({"oscar": {"windw": 3, "sink": 4}})


@pytest.mark.parametrize("options", ["window=3", 7, ["window"], True], ids=str)
def test_options_that_are_no_object(options: Any) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        OscarConfig.parse({"oscar": options})


@pytest.mark.parametrize(("text", "message"), [("{window: 3}", ENVIRONMENT_VARIABLE), ("3", "must be a JSON object")])
def test_a_bad_environment_variable(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, text)
    with pytest.raises(ConfigError, match=message):
        OscarConfig.parse(None)


def test_options_survive_the_command_line() -> None:
    """What --additional-config makes of a JSON text: ints stay ints."""
    given = json.loads('{"oscar": {"sink": 16, "window": 32, "pool_share": 0.05, "key_encoder": "ls"}}')
    assert OscarConfig.parse(given) == OscarConfig(sink=16, window=32, pool_share=0.05, key_encoder="ls")
