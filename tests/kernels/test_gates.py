"""What the gate on GPUs asks for can be asked for: every case of gates.kernels is one that pages exist for."""

import importlib

import pytest

from gates.kernels import modules

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("name", modules(None))
def test_every_case_has_a_layout(name: str) -> None:
    cases = importlib.import_module(name).gpu_cases()
    assert cases
    for case in cases:
        assert case.layout.block_size == case.block_size, str(case)
