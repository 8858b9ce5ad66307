"""Publishing what workers count never ends an engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_oscar.integration.metrics import Publisher, _collectors


def value(name: str, engine: int) -> float:
    return _collectors()[name].labels(engine=str(engine), worker="0")._value.get()


def test_a_counter_that_begins_anew_goes_on() -> None:
    publisher = Publisher(77, 0)
    for count in (5, 9, 2, 2, 4):  # slots were forgotten between the second and the third
        publisher.publish({"evicted_blocks": count, "used_blocks": count})
    assert value("evicted_blocks", 77) == 9 + 4
    assert value("used_blocks", 77) == 4


GONE = """
import logging, sys
logging.basicConfig(format="%(message)s")
from vllm_oscar.integration.metrics import Publisher
publisher = Publisher(0, 0)
for count in (1, 2):
    publisher.publish({"evicted_blocks": count})
"""


@pytest.mark.parametrize("folder", ["gone", "a file"])
def test_a_folder_of_shared_values_that_is_gone_is_said_once(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").touch()
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / folder)}
    run = subprocess.run([sys.executable, "-c", GONE], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("metrics cannot be set") == 1
