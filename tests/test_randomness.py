"""Random states that belong to no variable: what is set where the machine is another one."""

import numpy as np
import pytest

from treadle.core.randomness import random_states, set_random_states

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("there", [0, 1, 2, 3])
def test_states_of_gpus_that_are_not_there_are_left_out(monkeypatch, there):
    states = random_states()
    states["torch"]["cuda"] = [np.full(16, number, np.uint8) for number in range(2)]
    found = {}

    def set_state(state, device):
        if device >= there:
            raise IndexError("tuple index out of range")  # as PyTorch does
        found[device] = state.tolist()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", set_state)
    set_random_states(states)
    assert found == {number: [number] * 16 for number in range(min(there, 2))}
