"""docs/support.md lists the families that `python -m gates.models` tries."""

from pathlib import Path

from benchmarks.models.families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "support.md").read_text()


def test_the_table_has_every_family() -> None:
    table = PAGE.split("<!-- gates.models -->")[1].split("<!-- end -->")[0]
    rows = [line.split(" | ") for line in table.strip().splitlines()[2:]]
    assert sorted(row[0].removeprefix("| ") for row in rows) == sorted(FAMILIES)
    assert {row[1] for row in rows} == {"works", "refused"}
