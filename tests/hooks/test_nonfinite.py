"""`NonFinite`: which step, value and rows it names, and its actions."""

import ml_dtypes
import numpy as np
import pytest

from tests.hook_loop import INF, NAN, Loop
from treadle import hooks
from treadle.errors import ConfigurationError, NonFiniteError


def nonfinite(loop, action="raise", **values):
    with pytest.raises(NonFiniteError) as caught:
        loop.window(hooks.NonFinite(action), **values)
    return str(caught.value)


def test_nonfinite_names_the_rows_of_the_batch():
    x = np.zeros((8, 3), np.float32)
    x[2, 1], x[5, 0] = NAN, INF
    y = np.zeros(8)
    y[7] = NAN
    loop = Loop(step=20, batches={22: (x, {"label": y, "id": np.arange(8), "none": None})})
    assert nonfinite(loop, loss=[1.0, NAN, NAN]) == (
        "loss is nan at step 22, epoch 1, batch 2. The batch held it already: the first array, "
        "rows 2, 5; the array [1]['label'], row 7. Fix or remove these rows (numbered within "
        "the batch)"
    )


def test_nonfinite_names_a_few_rows_of_many():
    x = np.full((9, 2), NAN, ml_dtypes.bfloat16)
    message = nonfinite(Loop(batches={1: x}), loss=[INF])
    assert message.startswith("loss is inf at step 1, epoch 1, batch 1. ")
    assert "held it already: the batch, rows 0, 1, 2, 3, 4 and 4 more. Fix" in message


def test_nonfinite_names_a_leaf_without_rows():
    message = nonfinite(Loop(batches={1: {"weight": np.float32(NAN)}}), loss=[INF])
    assert "held it already: the array 'weight'. Fix" in message


def test_nonfinite_says_that_it_was_the_step():
    loop = Loop(batches={1: (np.zeros((4, 2)), np.arange(4))})
    assert nonfinite(loop, loss=[-INF]) == (
        "loss is -inf at step 1, epoch 1, batch 1. All inputs of this batch are finite, so the "
        "step caused it. Lower the learning rate, or clip gradients (clipnorm=1.0 in the "
        "optimizer); treadle.Options(checked=True) finds labels and indices out of range; "
        'treadle.Options(execution="eager") lets you debug the step'
    )


def test_nonfinite_takes_the_first_step_of_all_values():
    loop = Loop(batches={2: np.zeros(4)})
    message = nonfinite(loop, loss=[1, 2, NAN], norm=[1, INF, INF], count=np.arange(3))
    assert message.startswith("norm is inf at step 2, ")


def test_nonfinite_can_stop():
    loop = Loop(batches={1: np.zeros(4)})
    loop.window(hooks.NonFinite(action="stop"), loss=[NAN])
    assert loop.reason.startswith("loss is nan at step 1, epoch 1, batch 1. All inputs")


def test_nonfinite_lets_numbers_pass():
    loop = Loop()
    largest = np.array([3e38, 3e38], np.float32)  # their sum is infinite
    loop.window(hooks.NonFinite(), loss=largest, count=np.arange(2), flag=np.array([True, False]))
    loop.window(hooks.NonFinite())
    assert loop.reason is None


def test_nonfinite_lets_steps_pass_that_were_undone():
    loop = Loop(batches={2: np.zeros(4)})
    scaling = {"loss_scale": [4.0, 4.0], "undone": [0.0, 1.0]}
    loop.window(hooks.NonFinite(), loss=[1.0, INF], **scaling)
    loop = Loop(batches={2: np.array([0.0, NAN])})
    message = nonfinite(loop, loss=[1.0, NAN], **scaling)
    assert "The batch held it already: the batch, row 1. Fix" in message


def test_nonfinite_says_what_float16_may_have_done():
    loop = Loop(batches={1: np.zeros(4)})
    message = nonfinite(loop, loss=[INF], loss_scale=[4.0], undone=[0.0])
    assert "Compute the loss in float32, since float16 ends at 65,504. Lower the" in message


def test_nonfinite_ends_what_no_scale_can_save():
    smallest = 2.0**-14
    scaling = {"loss_scale": [2 * smallest, smallest], "undone": [1.0, 1.0]}
    assert nonfinite(Loop(batches={}), loss=[1.0, 1.0], **scaling) == (
        "gradients are not finite at step 2, epoch 1, batch 2, not even with a loss scale of "
        "2**-14, so it is not the scale that is too large for float16. Look for a division by "
        "zero, or a logarithm or a root of zero, or train in mixed_bfloat16"
    )


def test_nonfinite_knows_its_actions():
    with pytest.raises(ConfigurationError) as caught:
        hooks.NonFinite(action="stopp")
    assert (
        str(caught.value)
        == "unknown action 'stopp'. Did you mean 'stop'? Known: raise, stop, skip, rollback."
    )
