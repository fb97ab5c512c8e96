"""Seeds and states of the global random generators of Python, NumPy and PyTorch.

Hooks, sources, native steps and PyTorch's dropout draw from these generators, so a resumed run
restores their states. The seeds of Keras and Treadle are variables, and part of `State`.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def random_states() -> dict[str, Any]:
    """Return the states of all global generators in use, as numbers and arrays.

    Example:
        >>> state = random_states()
        >>> first = random.random()
        >>> set_random_states(state)
        >>> random.random() == first
        True
    """
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": _numpy_state(),
    }
    torch = sys.modules.get("torch")  # if it is not imported, its generator is not used
    if torch is not None:
        found["torch"] = {"cpu": torch.get_rng_state().numpy().copy()}
        if torch.cuda.is_initialized():
            states = torch.cuda.get_rng_state_all()
            found["torch"]["cuda"] = [state.cpu().numpy() for state in states]
    return found


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states returned by `random_states`; other generators are not changed.

    States of GPUs that are not available any more are ignored.
    """
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state({**states["numpy"], "state": dict(states["numpy"]["state"])})
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.from_numpy(np.array(states["torch"]["cpu"])))
        # This machine may have fewer GPUs than the one that saved the states.
        cuda = list(states["torch"].get("cuda", ()))[: torch.cuda.device_count()]
        if cuda:
            torch.cuda.set_rng_state_all([torch.from_numpy(x) for x in cuda])


def seed_everything(seed: int) -> None:
    """Do what `keras.utils.set_random_seed` does, without importing TensorFlow.

    Keras seeds TensorFlow on every backend. If TensorFlow is installed, importing it takes 2 to 3
    seconds.
    """
    import keras

    from . import keras_internals

    if "tensorflow" in sys.modules:
        keras.utils.set_random_seed(seed)
    keras_internals.set_random_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _numpy_state() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    return {
        "bit_generator": state["bit_generator"],
        "state": {"key": state["state"]["key"].copy(), "pos": int(state["state"]["pos"])},
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }
