"""The recipes in which a network learns from something else than labels alone, shrunken."""

import numpy as np
import pytest
from recipe_runs import make, run

import treadle
from treadle.recipes.teacher_forcing import WORDS, examples, spelling

STUDENTS = ("student", "alone")
EAGER = treadle.Options(execution="eager")


@pytest.mark.long
def test_distillation():
    made, loop = run("distillation", "teacher_steps=8", "units=8", "batch_size=50", epochs=3)
    steps = {name: int(o.iterations) for name, o in made.task.optimizers.items()}
    assert steps == {"teacher": 8, "student": 16, "alone": 16}
    # Each loss counts where it was followed, and nowhere else.
    assert len(loop.history["teacher_loss"]) == 1
    assert len(loop.history["student_loss"]) == 2
    for name in ("teacher", *STUDENTS):
        assert len(loop.history[f"val_{name}_accuracy"]) == 3
    assert loop.history["val_teacher_accuracy"][1:] == [loop.history["val_teacher_accuracy"][0]] * 2


def test_students_differ_only_in_their_training_targets():
    settings = ["teacher_steps=0", "units=8", "batch_size=50", "distillation_weight=0.0"]
    made = make("distillation", *settings)
    task = made.task
    teacher = task.teacher.get_weights()
    with treadle.Loop(task, console=False) as loop:
        loop.fit(made.datasets().train, steps=6)
    for ours, theirs in zip(task.student.get_weights(), task.alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)  # who trusts no teacher is alone
    for before, after in zip(teacher, task.teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.long
def test_adversarial_training():
    _, loop = run(
        "adversarial-training",
        "units=32",
        "epsilon=0.4",
        "attack_steps=3",
        "batch_size=50",
        epochs=6,
    )
    found = loop.history.epochs[-1]
    assert found["val_plain_clean"] > 0.9
    assert found["val_plain_attacked"] < found["val_plain_clean"]
    assert found["val_robust_attacked"] > found["val_plain_attacked"]


def test_an_attack_stays_within_epsilon_and_raises_the_loss():
    task = make("adversarial-training", "epsilon=0.2", "units=32").task
    random = np.random.default_rng(0)
    x, y = random.random((32, 784)).astype("float32"), random.integers(0, 10, 32)

    def attack(x, y):
        attacked = task.attack(task.plain, x, y)
        losses = [task.cross_entropy(y, task.plain(image)) for image in (x, attacked)]
        return attacked, losses

    with treadle.Loop(task, options=EAGER, console=False) as loop:
        attacked, (before, after) = loop.call(attack, x, y)
    assert np.abs(attacked - x).max() == pytest.approx(0.2, abs=1e-5)
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert after > before + 0.1


@pytest.mark.long
def test_teacher_forcing():
    settings = ("units=16", "batch_size=32", "decay_steps=20", "learning_rate=0.002")
    _, loop = run("teacher-forcing", *settings, steps=30)
    probability = loop.history.steps("teacher_forcing")
    np.testing.assert_allclose(probability, np.maximum(1 - np.arange(30) / 20, 0), atol=1e-6)
    loss = loop.history.steps("loss")
    assert loss[0] == pytest.approx(np.log(len(WORDS)), abs=0.3)
    assert loss[-1] < 0.8 * loss[0]
    assert 0 <= loop.history["val_exact_match"][-1] <= 1


def test_a_true_word_is_the_input_of_the_next_step():
    task = make("teacher-forcing", "units=16").task
    digits, words = examples(np.array([4207, 777777]))
    others = words.copy()
    others[:, 3] = (others[:, 3] + 1) % len(WORDS)
    with treadle.Loop(task, options=EAGER, console=False) as loop:
        loop.prepare([(digits, words)])
        told = loop.call(task.decode, digits, words, np.float32(1))
        told_otherwise = loop.call(task.decode, digits, others, np.float32(1))
        untold = loop.call(task.decode, digits, words, np.float32(0))
        alone = loop.call(task.decode, digits)
    assert told.shape == (2, 10, len(WORDS))
    np.testing.assert_array_equal(told[:, :4], told_otherwise[:, :4])
    assert np.abs(told[:, 4:] - told_otherwise[:, 4:]).max(axis=(1, 2)).min() > 1e-6
    np.testing.assert_allclose(untold, alone, atol=1e-6)
    assert np.abs(told - alone).max() > 1e-6


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (407, "four hundred seven"),
        (4207, "four thousand two hundred seven"),
        (20019, "twenty thousand nineteen"),
        (300000, "three hundred thousand"),
    ],
)
def test_spelling(number, words):
    assert " ".join(spelling(number)) == words
    digits, found = examples(np.array([number]))
    assert int("".join(map(str, digits[0]))) == number
    assert " ".join(WORDS[word] for word in found[0]).strip() == words


def test_numbers_of_the_validation_set_are_never_trained_on():
    datasets = make("teacher-forcing").datasets()
    place = 10 ** np.arange(6)[::-1]
    reader = datasets.train.read(0, seed=0)
    trained = {int(n) for _ in range(20) for n in (reader.take(1).batches[0][0] @ place)}
    held_out = {int(n) for n in datasets.validation.arrays[0] @ place}
    assert len(trained) > 1000
    assert len(held_out) > 1900
    assert not trained & held_out
    assert {len(str(n)) for n in trained} == {1, 2, 3, 4, 5, 6}
