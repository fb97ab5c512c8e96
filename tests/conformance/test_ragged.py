"""Padded and packed sequences give the gradients of the sequences alone, through every loop."""

import keras
import numpy as np
import pytest
from executions import once
from keras import ops

import treadle
from treadle.data import bucketed, packed, padded

LENGTHS = (5, 2, 8, 5, 2, 8, 5, 2)
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(1, 20, size=length).astype("int32") for length in LENGTHS]


class Sums(treadle.Task):
    """Adds up the gradients of the loss of all next tokens, with causal attention in sequences."""

    def __init__(self):
        keras.utils.set_random_seed(0)
        self.tokens = keras.layers.Embedding(20, 8)
        self.places = keras.layers.Embedding(8, 8)
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.output = keras.layers.Dense(20)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        x = np.zeros((1, 8), "int32")
        self.logits(x, x, np.ones_like(x))
        self.parts = [self.tokens, self.places, self.attention, self.output]
        self.weights = [v for part in self.parts for v in part.trainable_variables]
        self.sums = [keras.Variable(np.zeros(v.shape), trainable=False) for v in self.weights]

    def logits(self, tokens, positions, segments):
        x = self.tokens(tokens) + self.places(positions)
        within = ops.equal(segments[:, :, None], segments[:, None, :])
        return self.output(x + self.attention(x, x, attention_mask=within, use_causal_mask=True))

    def train_step(self, batch):
        if len(batch) == 3:
            tokens, segments, positions = batch
        else:
            tokens, mask = batch
            segments = ops.cast(mask, "int32")
            positions = ops.broadcast_to(ops.arange(tokens.shape[1]), tokens.shape)
        following = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        weights = ops.cast(following, "float32")

        def objective():
            logits = self.logits(tokens, positions, segments)[:, :-1]
            losses = self.loss(tokens[:, 1:], logits)
            return ops.sum(losses * weights)

        loss, grads = treadle.gradients(objective, self.weights)
        for total, grad in zip(self.sums, grads, strict=True):
            total.assign_add(grad)
        count = ops.sum(weights)
        return {"loss": treadle.weighted(loss / count, count)}


def sums(source, execution):
    options = treadle.Options(execution=execution)
    with treadle.Loop(Sums(), options=options, console=False) as loop:
        (loss,) = loop.fit(source, epochs=1)["loss"]
    return loss, [keras.ops.convert_to_numpy(v) for v in loop.task.sums]


SOURCES = {
    "padded": lambda: padded(TEXTS, 3, to=8, mask=True),
    "buckets": lambda: bucketed(TEXTS, (4, 8), 2, mask=True, in_a_row=2),
    "packed": lambda: packed(TEXTS, 10, 2),
}


@once
@pytest.mark.parametrize("execution", ["auto", "eager"])
def test_padding_and_packing_change_no_gradient(execution):
    loss, alone = sums(padded(TEXTS, 1, mask=True), "eager")
    for name, make in SOURCES.items():
        found, gradients = sums(make(), execution)
        assert found == pytest.approx(loss, rel=1e-5), name
        for one, other in zip(gradients, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)
