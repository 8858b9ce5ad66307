"""Families that no other test has, in small, as `python -m gates.models` tries them.

Not SmolLM3: vLLM serves it with transformers' own class, which it changes for the rest of the process.
"""

from pathlib import Path

import pytest

from benchmarks.models.families import FAMILIES
from gates.models import tried

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "name",
    ["GLM-4.5, GLM-4.7", "MiniMax-M2", "Phi-3, Phi-4", "Command R7B, Command A (Cohere2)", "EXAONE-4"],
)
def test_a_cache_that_reads_only_copies_is_exact(name: str, tmp_path: Path) -> None:
    row = tried(name, FAMILIES[name], tmp_path)
    assert row.good and row.state == "works", row
