"""Sequence-to-sequence learning with scheduled sampling (annealed teacher forcing).

An encoder-decoder with attention learns to spell numbers: 4207 is "four thousand two hundred
seven". In training, the next decoder input is the target word instead of the decoder's own output
with a probability that decreases over the steps (scheduled sampling, Bengio et al. 2015,
https://arxiv.org/abs/1506.03099). The metric `val_exact` is the fraction of held-out numbers that
the decoder spells correctly from its own outputs.

Compare with no teacher forcing, `--set truth_begins=0`, and with full teacher forcing,
`--set truth_ends=1`.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
ONES = NUMBERS.split()
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS = ["", *ONES, *TENS[2:], "hundred", "thousand"]  # "" starts and ends a spelling
INDEX = {word: i for i, word in enumerate(WORDS)}
DIGITS, LENGTH = 6, 10  # maximum number of digits, and of words with the end token
HELD_OUT = 11  # one number in 11 is used for validation only


class TeacherForcing(treadle.Task):
    """Spell numbers with an encoder-decoder and annealed teacher forcing (scheduled sampling).

    Args:
        units: Width of encoder and decoder.
        truth_begins: Teacher forcing probability in the first step.
        truth_ends: Teacher forcing probability from step `decay_steps` on.
        decay_steps: Steps of the linear decay between them.
        learning_rate: Learning rate of Adam.
        batch_size: Numbers per step.
    """

    epochs = 4

    def __init__(
        self,
        units: int = 128,
        truth_begins: float = 1.0,
        truth_ends: float = 0.0,
        decay_steps: int = 2000,
        learning_rate: float = 1e-3,
        batch_size: int = 128,
    ) -> None:
        self.digit_vectors = layers.Embedding(10, 32)
        self.encoder = layers.GRU(units, return_sequences=True)
        self.word_vectors = layers.Embedding(len(WORDS), 32)
        self.decoder = layers.GRUCell(units)
        self.scores = layers.Dense(len(WORDS))
        self.optimizer = keras.optimizers.Adam(learning_rate)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.seeds = keras.random.SeedGenerator()
        self.truth_begins, self.truth_ends = truth_begins, truth_ends
        self.decay_steps, self.batch_size = decay_steps, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Minimize the loss on one batch, with the current teacher forcing probability."""
        digits, words = batch
        passed = ops.minimum(ops.cast(treadle.step(), "float32") / self.decay_steps, 1.0)
        truth = self.truth_begins + (self.truth_ends - self.truth_begins) * passed

        def objective() -> Any:
            return self.loss(words, self.spelled(digits, words, truth))

        parts = (
            self.digit_vectors,
            self.encoder,
            self.word_vectors,
            self.decoder,
            self.scores,
        )
        variables = [variable for part in parts for variable in part.trainable_variables]
        return {"loss": treadle.minimize(objective, variables, self.optimizer), "truth": truth}

    def spelled(self, digits: Any, words: Any = None, truth: Any = 0.0) -> Any:
        """Return the logits of all words at each position, of shape (n, LENGTH, words).

        Args:
            digits: Input digits of shape (n, DIGITS).
            words: Target words of shape (n, LENGTH); None decodes without teacher forcing.
            truth: Teacher forcing probability.
        """
        places = self.encoder(self.digit_vectors(digits))
        state = places[:, -1]
        word = ops.zeros_like(digits[:, 0])
        told = keras.random.uniform((*digits.shape[:1], LENGTH), seed=self.seeds) < truth
        scores: list[Any] = []
        for i in range(LENGTH):
            _, state = self.decoder(self.word_vectors(word), state)
            attention = ops.softmax(ops.einsum("nu,npu->np", state, places))
            seen = ops.einsum("np,npu->nu", attention, places)
            scores.append(self.scores(ops.concatenate([state, seen], axis=-1)))
            word = ops.cast(ops.argmax(scores[-1], axis=-1), digits.dtype)
            if words is not None:
                word = ops.where(told[:, i], words[:, i], word)
        return ops.stack(scores, axis=1)

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Measure the loss, and the fraction of numbers that are spelled completely right."""
        digits, words = batch
        scores = self.spelled(digits)
        right = ops.equal(ops.cast(ops.argmax(scores, axis=-1), words.dtype), words)
        exact = ops.mean(ops.cast(ops.all(right, axis=-1), "float32"))
        return {"loss": self.loss(words, scores), "exact": exact}

    def datasets(self) -> treadle.Datasets:
        """Return random numbers of one to six digits, and 2,000 held-out ones for validation."""

        def drawn(random: np.random.Generator) -> Any:
            largest = 10 ** random.integers(1, DIGITS + 1, self.batch_size)
            numbers = random.integers(0, largest)
            return translations(numbers + (numbers % HELD_OUT == 3))

        random = np.random.default_rng(0)
        held_out = HELD_OUT * random.integers(0, 10**DIGITS // HELD_OUT, 2000) + 3
        return treadle.Datasets(
            train=data.from_function(drawn, length=500),
            validation=data.from_arrays(*translations(held_out), batch_size=500, shuffle=False),
        )


def translations(numbers: Any) -> tuple[Any, Any]:
    """Return digits of shape (n, DIGITS) and words of shape (n, LENGTH), both int32."""
    digits = numbers[:, None] // 10 ** np.arange(DIGITS)[::-1] % 10
    words = np.zeros((len(numbers), LENGTH), "int32")
    for row, number in zip(words, numbers.tolist(), strict=True):
        found = spelling(number)
        row[: len(found)] = [INDEX[word] for word in found]
    return digits.astype("int32"), words


def spelling(number: int) -> list[str]:
    """Return the words of a number below a million."""
    thousands, rest = divmod(number, 1000)
    words = [*_below_1000(thousands), "thousand"] if thousands else []
    return [*words, *_below_1000(rest)] or ["zero"]


def _below_1000(number: int) -> list[str]:
    hundreds, rest = divmod(number, 100)
    words = [ONES[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10])
        rest %= 10
    return [*words, ONES[rest]] if rest else words
