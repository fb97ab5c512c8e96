"""Runs Keras' own trainer tests with `fit`, `evaluate` and `predict` replaced by Treadle's.

    KERAS_BACKEND=jax python tests/keras_trainer_tests.py [pytest arguments]

The tests are those of the installed Keras, whose wheel contains them; nothing of them is part of
this repository. The exit status is 0 if exactly the tests fail that `DIFFERENCES` names, each with
its reason. Tests of `LEFT_OUT` do not run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

import treadle
from tests.keras_callback_tests import fit, results_of

# A part of the name: why these tests do not run.
LEFT_OUT = {
    "sparse": "sparse arrays are refused",
    "raggeds": "ragged tensors are refused",
    "steps_per_execution": "steps_per_execution is ignored, so batches have other numbers",
    "stop_loop": "callbacks are not called for the batches of evaluate and predict",
}
# The name: why the test cannot pass.
DIFFERENCES = {
    "test_callbacks_can_update_state_at_batch_boundary": "predictions do not call callbacks",
    "test_fit_with_data_adapter_generator": "a generator that ends within the epochs is refused",
    "test_rng_updated_during_predict": "predictions do not change the state, nor its seeds",
}
OWN_DIFFERENCES = {
    "jax": {
        "test_fit_eval_flow_for_jax_model_weights": "Keras' variables hold no values during `fit`"
    },
    "tensorflow": {"test_retracing": "the number of traces is another one"},
}


def main(arguments: Sequence[str]) -> int:
    """Run the tests, and compare the failed ones with those that are expected to fail."""
    backend = keras.config.backend()
    trainer: Any = next(k for k in keras.Model.__mro__ if k.__name__.endswith("Trainer"))
    trainer.fit, trainer.evaluate, trainer.predict = fit, treadle.evaluate, treadle.predict
    file = Path(keras.src.trainers.__file__).parent / "trainer_test.py"
    chosen = " and ".join(f"not {part}" for part in LEFT_OUT)
    results = results_of(file.parent, "-k", chosen, *arguments, str(file))
    expected = {**DIFFERENCES, **OWN_DIFFERENCES.get(backend, {})}
    failed = {name.rpartition("::")[2]: why for name, why in results.failed.items()}
    count = len(results.passed)
    print(f"\n{backend}, Keras {keras.__version__}: {count} of {count + len(failed)} tests passed")
    for name, why in sorted(failed.items()):
        print(f"  failed  {name}: {expected.get(name) or f'UNEXPECTED: {why}'}")
    passed = [name for name in expected if name not in failed]
    for name in passed:
        print(f"  passed  {name}, which is expected to fail: remove it from DIFFERENCES")
    return 1 if passed or failed.keys() - expected.keys() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
