"""The character model, shrunken, on the active backend."""

from math import log2

import keras
import numpy as np
import pytest
from recipe_runs import make, run

import treadle
from treadle.recipes.char_lm import CHARACTERS, decode, encode, inputs_and_targets

SMALL = (
    "width=16",
    "depth=2",
    "heads=2",
    "context_length=16",
    "batch_size=4",
    "decay_updates=40",
    "warmup_updates=4",
)


@pytest.mark.long
def test_it_learns_and_writes():
    made, loop = run("char-lm", *SMALL, "learning_rate=0.01", epochs=1)
    bits = loop.history.steps("bits_per_character")
    assert bits[0] == pytest.approx(log2(len(CHARACTERS)), abs=1)
    assert bits[-20:].mean() < bits[:20].mean() - 1
    assert loop.history["val_bits_per_character"][-1] < bits[0] - 1
    # Two batches make an update; a rate stands until the next one.
    assert int(made.task.optimizer.iterations) == 100
    rates = loop.history.steps("learning_rate")
    np.testing.assert_allclose(rates[:8], 0.01 * np.array([0, 1, 1, 2, 2, 3, 3, 4]) / 4, rtol=1e-5)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    norms = loop.history.steps("gradient_norm")
    assert norms[0] == 0
    assert (norms[1:] > 0).all()
    assert len(set(norms[1::2])) == 100
    np.testing.assert_array_equal(norms[1:-1:2], norms[2::2])
    (sample,) = loop.history["sample"]
    assert len(sample) == 16
    assert sample.startswith("Alice ")


@pytest.mark.long
@pytest.mark.parametrize("execution", ["auto", "eager"])
def test_activations_that_are_computed_again_give_equal_gradients(execution):
    found = {}
    for remat in ("true", "false"):
        made = make("char-lm", *SMALL, f"remat={remat}", "accumulation_steps=1")
        options = treadle.Options(execution=execution)
        with treadle.Loop(made.task, options=options, console=False) as loop:
            loop.fit(made.datasets().train, steps=4)
        found[remat] = loop
    for name in ("bits_per_character", "gradient_norm"):
        ours, theirs = (found[remat].history.steps(name) for remat in ("true", "false"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    theirs = found["false"].state.arrays()
    for path, value in found["true"].state.arrays().items():
        np.testing.assert_allclose(value, theirs[path], atol=2e-5, err_msg=path)


@pytest.fixture
def half_the_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.long
def test_it_trains_in_half_the_precision(half_the_precision):
    made, loop = run("char-lm", *SMALL, "learning_rate=0.01", steps=100)
    bits = loop.history.steps("bits_per_character")
    assert bits[-10:].mean() < bits[:10].mean() - 1
    assert made.task.model.layers[-1].compute_dtype == "float32"


def test_generated_text_continues_from_its_last_character():
    """Where one character always follows another, that is what it writes."""
    task = make("char-lm", *SMALL).task
    task.model = Next()
    with treadle.Loop(task, console=False) as loop:
        numbers = loop.call(task.generate, encode("ab")[None])[0]
    begin = CHARACTERS.index("b")
    assert numbers.tolist()[1:] == [(begin + i) % len(CHARACTERS) for i in range(15)]


class Next(keras.Model):
    """Is sure that each character is followed by the next one of the alphabet."""

    def call(self, texts, training=False):
        following = (texts + 1) % len(CHARACTERS)
        return 1e3 * keras.ops.one_hot(following, len(CHARACTERS))


def test_the_end_of_the_book_is_not_trained_on():
    made = make("char-lm", *SMALL)
    datasets = made.datasets()
    book = treadle.datasets.alice()
    inputs, targets = datasets.validation.arrays
    held_out = decode(np.concatenate([inputs[:, :1], targets], axis=1)[0])
    end = book.index(held_out)
    assert end == int(0.9 * len(book))
    last = decode(inputs[-1])
    assert book.endswith(book[book.index(last) :])
    reader = datasets.train.read(0, seed=0)
    for _ in range(50):
        window = reader.take(1)
        for row in window.batches[0][0]:
            assert decode(row) in book[:end]


def test_targets_are_the_next_characters():
    inputs, targets = inputs_and_targets(encode("Alice was")[None])
    assert (decode(inputs[0]), decode(targets[0])) == ("Alice wa", "lice was")
