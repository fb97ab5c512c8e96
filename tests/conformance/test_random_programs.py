"""Random programs agree with themselves however they run; see `tests/fuzz`."""

import pytest

from tests.fuzz.grammar import FEATURES
from tests.fuzz.report import examined

PROGRAMS = 30


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program_agrees(seed: int) -> None:
    found = examined(seed, frozenset(FEATURES), shrink=False)
    assert found["result"] == "agree", (
        f"{found['message']}\n{found['program']}\n{found['script']}\nshrink it with scripts/fuzz "
        f"--programs 1 --seed {seed} --backend NAME"
    )
