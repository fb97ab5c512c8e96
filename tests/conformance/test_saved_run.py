"""What `treadle.load_run` returns is what the run computed, on each backend."""

import numpy as np
from executions import long_to_compile
from keras import ops
from loops import arrays, loop_of, make, same, source

import treadle


@long_to_compile
def test_a_loaded_run_is_the_run(tmp_path):
    task = make()
    with loop_of(task, directory=tmp_path / "run") as loop:
        before = loop.fit(source(), source(1), epochs=2)
        state = loop.state.arrays()
    run = treadle.load_run(tmp_path / "run")
    assert repr(run).endswith("run': WithEverything, finished, 12 steps, 2 epochs)")
    assert run.checkpoints == (0, 12) and run.models == ("model",)
    assert run.history.epochs == before.epochs
    np.testing.assert_array_equal(run.history.steps("loss"), before.steps("loss"))
    for found in (run.variables(), run.variables(12)):
        same(dict(sorted(found.items())), dict(sorted(state.items())))
    assert not np.array_equal(
        run.variables(0)["model/layers/0/kernel"], state["model/layers/0/kernel"]
    )
    model, x = run.model(), arrays()[0]
    for loaded, trained in zip(model.weights, task.model.weights, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(loaded), ops.convert_to_numpy(trained))
    expected = task.model.predict(x, verbose=0)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)
