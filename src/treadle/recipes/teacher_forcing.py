"""Sequence-to-sequence learning with scheduled sampling (annealed teacher forcing).

An encoder-decoder with attention learns to spell numbers: 4207 is "four thousand two hundred
seven". In training, the next decoder input is the target word instead of the decoder's own output
with a probability that decreases over the steps (scheduled sampling, Bengio et al. 2015,
https://arxiv.org/abs/1506.03099). `val_exact_match` is the fraction of held-out numbers that the
decoder spells correctly from its own outputs.

Compare with no teacher forcing, `--set teacher_forcing_start=0`, and with full teacher forcing,
`--set teacher_forcing_end=1`.
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
        teacher_forcing_start: Teacher forcing probability in the first step.
        teacher_forcing_end: Teacher forcing probability from step `decay_steps` on.
        decay_steps: Steps of the linear decay between them.
        learning_rate: Learning rate of Adam.
        batch_size: Numbers per step.
    """

    epochs = 4

    def __init__(
        self,
        units: int = 128,
        teacher_forcing_start: float = 1.0,
        teacher_forcing_end: float = 0.0,
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
        self.teacher_forcing_start = teacher_forcing_start
        self.teacher_forcing_end = teacher_forcing_end
        self.decay_steps, self.batch_size = decay_steps, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Minimize the loss on one batch, with the current teacher forcing probability."""
        digits, words = batch
        decayed = ops.minimum(ops.cast(treadle.step(), "float32") / self.decay_steps, 1.0)
        start, end = self.teacher_forcing_start, self.teacher_forcing_end
        probability = start + (end - start) * decayed

        def objective() -> Any:
            return self.loss(words, self.decode(digits, words, probability))

        parts = (self.digit_vectors, self.encoder, self.word_vectors, self.decoder, self.scores)
        variables = [variable for part in parts for variable in part.trainable_variables]
        loss = treadle.minimize(objective, variables, self.optimizer)
        return {"loss": loss, "teacher_forcing": probability}

    def decode(self, digits: Any, words: Any = None, probability: Any = 0.0) -> Any:
        """Return the logits of all words at each position, of shape (n, LENGTH, words).

        Args:
            digits: Input digits of shape (n, DIGITS).
            words: Target words of shape (n, LENGTH); None decodes without teacher forcing.
            probability: Teacher forcing probability.
        """
        encoded = self.encoder(self.digit_vectors(digits))
        state = encoded[:, -1]
        word = ops.zeros_like(digits[:, 0])
        random = keras.random.uniform((*digits.shape[:1], LENGTH), seed=self.seeds)
        use_target = random < probability
        logits: list[Any] = []
        for i in range(LENGTH):
            _, state = self.decoder(self.word_vectors(word), state)
            attention = ops.softmax(ops.einsum("nu,npu->np", state, encoded))
            context = ops.einsum("np,npu->nu", attention, encoded)
            logits.append(self.scores(ops.concatenate([state, context], axis=-1)))
            word = ops.cast(ops.argmax(logits[-1], axis=-1), digits.dtype)
            if words is not None:
                word = ops.where(use_target[:, i], words[:, i], word)
        return ops.stack(logits, axis=1)

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Measure the loss, and the fraction of numbers whose words are all correct."""
        digits, words = batch
        logits = self.decode(digits)
        correct = ops.equal(ops.cast(ops.argmax(logits, axis=-1), words.dtype), words)
        exact_match = ops.mean(ops.cast(ops.all(correct, axis=-1), "float32"))
        return {"loss": self.loss(words, logits), "exact_match": exact_match}

    def datasets(self) -> treadle.Datasets:
        """Return random numbers of one to six digits, and 2,000 held-out ones for validation."""

        def random_examples(random: np.random.Generator) -> Any:
            limits = 10 ** random.integers(1, DIGITS + 1, self.batch_size)
            numbers = random.integers(0, limits)
            return examples(numbers + (numbers % HELD_OUT == 3))

        random = np.random.default_rng(0)
        held_out = HELD_OUT * random.integers(0, 10**DIGITS // HELD_OUT, 2000) + 3
        return treadle.Datasets(
            train=data.from_function(random_examples, length=500),
            validation=data.from_arrays(*examples(held_out), batch_size=500, shuffle=False),
        )


def examples(numbers: Any) -> tuple[Any, Any]:
    """Return digits of shape (n, DIGITS) and words of shape (n, LENGTH), both int32."""
    digits = numbers[:, None] // 10 ** np.arange(DIGITS)[::-1] % 10
    words = np.zeros((len(numbers), LENGTH), "int32")
    for row, number in zip(words, numbers.tolist(), strict=True):
        spelled = spelling(number)
        row[: len(spelled)] = [INDEX[word] for word in spelled]
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
