"""What decides on a GPU, as far as it can be told without one."""

import importlib
import sys
from pathlib import Path

import pytest

from gates import kernels
from gates.side_by_side import Process, failed, side_by_side
from vllm_oscar.page_layout import PageLayout


@pytest.mark.parametrize("name", kernels.modules(None))
def test_cases_have_pages_that_exist(name: str) -> None:
    cases = importlib.import_module(name).gpu_cases()
    assert cases
    for case in cases:
        if hasattr(case, "head_size"):
            PageLayout(case.head_size, case.block_size, case.group_size, *getattr(case, "bits", ()))


def test_a_process_that_dies_fails_and_what_it_had_said_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    says = {
        "sound": "print('PASS one'); print('noise')",
        "dies": "import os; print('PASS two', flush=True); os.abort()",
        "finds": "print('FAIL three')",
    }
    processes = {
        name: Process([sys.executable, "-c", program], tmp_path / f"{name}.log") for name, program in says.items()
    }
    ended = dict(side_by_side(processes))
    assert {name: failed(lines) for name, lines in ended.items()} == {"sound": False, "dies": True, "finds": True}
    printed = capfd.readouterr().out
    assert "PASS one" in printed and "PASS two" in printed and "FAIL dies: ended with -6" in printed
    assert (tmp_path / "sound.log").read_text() == "PASS one\nnoise\n"
