import keras
import numpy as np
import pytest

SHAPES = {"mnist": (28, 28), "cifar10": (32, 32, 3)}


@pytest.fixture(autouse=True)
def quick_compiling():
    """Let XLA optimize less: these steps run three times (measured: half the time on JAX).

    On TensorFlow this is set for a whole process, by `scripts/test`.
    """
    if keras.config.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """Small data sets that can be learned: a picture for each class, and noise."""
    random = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        pictures = random.integers(0, 200, (10, *shape))
        arrays = {}
        for split, rows in (("train", 400), ("test", 100)):
            y = np.arange(rows) % 10
            arrays[f"x_{split}"] = (pictures[y] + random.integers(0, 56, (rows, *shape))).astype(
                "uint8"
            )
            arrays[f"y_{split}"] = y.astype("uint8")
        np.savez(tmp_path / f"{name}.npz", **arrays)
    monkeypatch.setenv("TREADLE_DATA", str(tmp_path))
