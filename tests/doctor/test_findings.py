"""How the findings of a replay are shown."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from treadle.doctor import findings


@pytest.mark.parametrize("width", [60, 200])
def test_numbers_of_a_table_are_not_broken(width):
    numbers = ("6.550e-05", "0.06310", "1.073e-05")
    path = "optimizer/velocities/model/layers/2/kernel"
    table = findings._table("variable", "shape", "value", "gradient", "update", "not finite")
    findings._row(table, 0, path, "64×64", *numbers, "")
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    text = console.file.getvalue()
    assert all(number in text for number in numbers)
    assert (path in text) == (width == 200)
    assert Text(path).plain in "".join(line.split()[0] for line in text.splitlines()[1:])
