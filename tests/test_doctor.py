"""Examinations: each wrong program has its finding, and its sound twin has none."""

import numpy as np
import pytest
from tests.doctor.programs import PAIRS, Pair

import treadle


@pytest.mark.filterwarnings("ignore:.*received `from_logits=True`")  # Keras on TensorFlow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_mistake_is_found_and_its_twin_is_silent(pair: Pair) -> None:
    task, data = pair.program(True)
    wrong = treadle.doctor.examine(task, data)
    assert pair.code in wrong.codes(), str(wrong)
    task, data = pair.program(False)
    sound = treadle.doctor.examine(task, data)
    assert sound.codes() == [], str(sound)
