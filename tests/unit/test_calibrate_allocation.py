"""Bits of layers' keys."""

import pytest

from vllm_oscar.calibrate.allocation import allocated, steps
from vllm_oscar.errors import ConfigError
from vllm_oscar.page_layout import PageLayout


def test_a_bit_goes_where_it_takes_the_most_off_the_loss() -> None:
    losses = {0: [8.0, 2.0, 0.5], 3: [40.0, 10.0, 2.5], 7: [1.0, 0.25, 0.06]}
    assert allocated(losses, 0) == {0: 2, 3: 2, 7: 2}
    assert allocated(losses, 1) == {0: 2, 3: 3, 7: 2}
    assert allocated(losses, 2) == {0: 2, 3: 4, 7: 2}  # 7.5 off for the second bit, 6 off for layer 0's first
    assert allocated(losses, 4) == {0: 4, 3: 4, 7: 2}
    assert allocated(losses, 6) == {0: 4, 3: 4, 7: 4}


@pytest.mark.parametrize(
    ("head_size", "average", "expected"),
    [(128, 2.5, 14), (128, 2.75, 28), (128, 2.26, 0), (128, 3.0, 42), (64, 2.75, 14), (80, 2.5, 5)],
)
def test_the_average_counts_scales_and_offsets(head_size: int, average: float, expected: int) -> None:
    assert steps(PageLayout(head_size, 64), 28, average) == expected


@pytest.mark.parametrize("average", [2.0, 2.25, 3.25, 5.0])
def test_an_average_that_keys_cannot_have_is_refused(average: float) -> None:
    with pytest.raises(ConfigError, match=r"above 2.25 \(k2v2\) and below 3.25 \(k4v2\)"):
        steps(PageLayout(128, 64), 28, average)
