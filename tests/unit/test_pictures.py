"""The README's pictures are what their script draws from the figures that are committed."""

from pathlib import Path

import pytest

from benchmarks import pictures


def test_committed_pictures_are_those_of_the_committed_figures(tmp_path: Path) -> None:
    """To the byte, with the matplotlib of scripts/requirements.txt; `python -m benchmarks.pictures` draws them anew."""
    pictures.main(tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn.keys() == pictures.PICTURES.keys()
    for name, content in drawn.items():
        assert content == (pictures.ROOT / "docs" / name).read_bytes(), name


def test_quality_is_drawn_against_what_a_token_takes() -> None:
    texts, needles = pictures.read(pictures.TEXTS), pictures.read(pictures.NEEDLES)
    assert pictures.losses(texts)["kivi"] == (3, 0.0173)
    assert pictures.found(needles)["bf16"] == (16, 1)
    assert pictures.found(needles)["oscar auto:2.5"] == (2.5, (23 + 34) / (25 + 40)), "on the same prompts"
    # Qwen2.5-Coder-1.5B: 28 layers of two KV heads of size 128, keys and values of two bytes
    assert pictures.tokens_in_a_gigabyte(16) == pytest.approx(1e9 / (28 * 2 * 2 * 128 * 2))


def test_an_appended_row_counts_and_a_variant_only_where_it_is_alone() -> None:
    def row(dtype: str, what: str, value: float) -> dict[str, str]:
        return {"model": pictures.SPEED_OF, "dtype": dtype, "what": what, "value": str(value)}

    rows = [
        row("oscar", "decode 8 x 1024", 4),
        row("oscar", "decode 8 x 1024", 5),
        row("oscar (half of it idle)", "decode 8 x 1024", 2),
        row("turboquant_4bit_nc (36 GB)", "throughput at 100000", 48.4),
        row("oscar", "prefill 32768", 960),
        {**row("oscar", "decode 8 x 1024", 1), "model": "another"},
    ]
    assert pictures.speeds(rows) == {
        "oscar": {"decode 8 x 1024": 1600.0},
        "turboquant_4bit_nc": {"throughput at 100000": 48.4},
    }
