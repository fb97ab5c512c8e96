"""A run does not call more functions, and has no more state, than the limits in `tests/size.py`."""

import keras
import pytest

from tests import size


@pytest.mark.long
def test_no_count_of_a_run_is_above_its_limit():
    backend = keras.config.backend()
    counts = size.in_a_new_process(backend)
    assert {*counts} == {*size.LIMITS_OF_RUNS}
    limits = {name: of[backend] for name, of in size.LIMITS_OF_RUNS.items()}
    above = {name: (found, limits[name]) for name, found in counts.items() if found > limits[name]}
    assert not above, f"above the limits in {size.__file__}: {above} (found, limit)"
