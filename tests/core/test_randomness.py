"""Random states that belong to no variable: what is set where the machine is another one."""

import numpy as np
import pytest

from treadle.core.randomness import random_states, set_random_states
from treadle.data import random_states as module
from treadle.data.random_states import numpy_state

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


@pytest.fixture
def numpy_generator():
    """Let a test change NumPy's global generator."""
    before, state = np.random.get_bit_generator(), np.random.get_state()
    yield
    np.random.set_bit_generator(before)
    np.random.set_state(state)


def drawn():
    return [np.random.random(), np.random.standard_normal(), np.random.randint(1000)]


@pytest.mark.parametrize("normal", [0, 1, 2])
@pytest.mark.parametrize("uniform", [0, 5, 700])
def test_the_state_of_numpys_generator_is_restored(numpy_generator, uniform, normal):
    np.random.seed(3)
    np.random.random(uniform)
    for _ in range(normal):  # an odd number leaves one that was drawn already
        np.random.standard_normal()
    state = np.random.get_state()
    expected = drawn()
    np.random.set_state(state)
    restore = numpy_state()
    assert drawn() == expected  # taking the state changes nothing
    for _ in range(2):
        np.random.seed(4)
        np.random.standard_normal()
        restore()
        assert all(map(np.array_equal, np.random.get_state(), state))
        assert drawn() == expected


@pytest.mark.parametrize("known", [True, False])
def test_generators_of_another_kind_and_layout_are_restored(numpy_generator, monkeypatch, known):
    monkeypatch.setattr(module, "_has_known_layout", lambda: known)
    np.random.set_bit_generator(np.random.PCG64(1) if known else np.random.MT19937(1))
    np.random.standard_normal()
    restore = numpy_state()
    expected = drawn()
    restore()
    assert drawn() == expected


def test_the_memory_of_numpys_generator_has_the_expected_layout():
    assert module._has_known_layout()  # otherwise all sources are read 0.1 ms slower


def test_another_layout_of_the_memory_is_noticed(monkeypatch):
    monkeypatch.setattr(module, "SIZE", module.SIZE - 4)
    assert not module._has_known_layout.__wrapped__()
