"""A small language model that reads "Alice's Adventures in Wonderland" letter by letter.

A causal transformer (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; normalized before each
part, as in https://arxiv.org/abs/2002.04745) predicts each next character. How well is told in bits
per character: what one would have to write down for each, who knew all the characters before it
and the model. Several batches make one update, whose gradient is clipped by its global norm, and
whose rate warms up and then falls as a cosine.

Half the precision is enough for it: `--precision mixed_bfloat16`. With `--set remat=true` the
activations within blocks are computed twice instead of kept (gradient checkpointing, Chen et al.
2016, https://arxiv.org/abs/1604.06174): less memory, and the same gradients.
"""

from math import log
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data, datasets
from treadle.core.hook import LoopView

PROMPT = "Alice "
CHARACTERS = sorted(set(datasets.alice()))
HELD_OUT = 0.1  # the last part of the book is never trained on


class CharacterModel(treadle.Task):
    """Learn to write like Lewis Carroll, letter by letter: a causal transformer, accumulation.

    Args:
        width: Numbers for each character within the transformer.
        depth: Blocks.
        heads: Of attention, in each block.
        length: Characters that it sees at once.
        learning_rate: AdamW's, where the warm-up ends.
        updates: After how many updates the rate has fallen to nothing.
        warm_up: During how many of them it rises.
        clip: The largest global norm of an update's gradient.
        accumulate: Batches for an update.
        batch_size: Texts of `length` characters in a batch.
        remat: Compute activations of blocks again instead of keeping them.
    """

    epochs = 10

    def __init__(
        self,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        length: int = 96,
        learning_rate: float = 3e-3,
        updates: int = 1000,
        warm_up: int = 50,
        clip: float = 1.0,
        accumulate: int = 2,
        batch_size: int = 16,
        remat: bool = False,
    ) -> None:
        self.model = transformer(len(CHARACTERS), length, width, depth, heads, remat)
        falling = keras.optimizers.schedules.CosineDecay(learning_rate, updates - warm_up)
        self.rate = treadle.schedules.WarmUp(falling, warm_up)
        self.optimizer = keras.optimizers.AdamW(self.rate, weight_decay=0.01)
        self.accumulator = treadle.Accumulator(accumulate)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.norm = keras.Variable(0.0, trainable=False, name="norm")
        self.seeds = keras.random.SeedGenerator()
        self.length, self.batch_size, self.clip = length, batch_size, clip

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Add a batch's gradient to those that wait; update where it is the last of them."""
        seen, following = batch
        variables = self.model.trainable_variables

        def objective() -> Any:
            return self.loss(following, self.model(seen, training=True))

        def update(grads: Any) -> None:
            clipped, norm = treadle.clip_by_global_norm(grads, self.clip)
            self.norm.assign(norm)  # kept, because what an update returns is dropped
            self.optimizer.apply(clipped, variables)

        loss, grads = treadle.gradients(objective, variables)
        self.accumulator.add(grads, update)
        return {
            "bits_per_character": loss / log(2),
            "norm": self.norm.value,
            "learning_rate": self.rate(self.optimizer.iterations),
        }

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Measure a part of the book that was never trained on."""
        seen, following = batch
        loss = self.loss(following, self.model(seen, training=False))
        return {"bits_per_character": loss / log(2)}

    def write(self, text: Any) -> Any:
        """Return texts that go on as the model expects, (n, length), as numbers of characters.

        Args:
            text: How they begin: numbers of characters, (n, begun).
        """
        count, begun = text.shape
        # The largest of the scores with such noise is a draw from their softmax.
        shape = (self.length, count, len(CHARACTERS))
        noise = -ops.log(-ops.log(keras.random.uniform(shape, 1e-9, seed=self.seeds)))

        def written(place: Any, texts: Any) -> Any:
            scores = ops.take(self.model(texts, training=False), place - 1, axis=1)
            drawn = ops.argmax(scores + ops.take(noise, place, axis=0), axis=-1)
            here = ops.equal(ops.arange(self.length), place)
            return ops.where(here, ops.cast(drawn[:, None], texts.dtype), texts)

        texts = ops.pad(text, ((0, 0), (0, self.length - begun)))
        return ops.fori_loop(begun, self.length, written, texts)

    def hooks(self) -> list[Any]:
        """Show after each epoch what it writes."""
        return [treadle.every("1 epoch", self.sample)]

    def sample(self, loop: LoopView) -> dict[str, str]:
        """Return a text that the model has gone on with."""
        return {"sample": decoded(loop.call(self.write, encoded(PROMPT)[None])[0])}

    def datasets(self) -> treadle.Datasets:
        """Return texts from anywhere in the book but its end, and its end in turn."""
        book = encoded(datasets.alice())
        end = int(len(book) * (1 - HELD_OUT))
        reach = np.arange(self.length + 1)

        def drawn(random: np.random.Generator) -> Any:
            begins = random.integers(0, end - self.length, self.batch_size)
            return pairs(book[begins[:, None] + reach])

        held_out = np.arange(end, len(book) - self.length, self.length)
        return treadle.Datasets(
            train=data.from_function(drawn, length=200),
            validation=data.from_arrays(
                *pairs(book[held_out[:, None] + reach]), batch_size=64, shuffle=False
            ),
        )


class Block(layers.Layer):
    """Attention to all characters so far, and a small network for each; both are added.

    Args:
        width: Numbers for each character.
        heads: Of attention.
        remat: Compute what lies within again in the backward pass.
    """

    def __init__(self, width: int, heads: int, remat: bool) -> None:
        super().__init__()
        self.normalizations = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.network = [layers.Dense(4 * width, activation="gelu"), layers.Dense(width)]
        self.remat = remat

    def call(self, x: Any) -> Any:
        """Return as many numbers for each character, (n, length, width)."""
        return treadle.remat(self.inner)(x) if self.remat else self.inner(x)

    def inner(self, x: Any) -> Any:
        """Return the same, whether it is kept or not."""
        normal = self.normalizations[0](x)
        x = x + self.attention(normal, normal, use_causal_mask=True)
        normal = self.normalizations[1](x)
        for layer in self.network:
            normal = layer(normal)
        return x + normal


class Places(layers.Layer):
    """Adds to each character a vector of its own place, which is learned."""

    def build(self, shape: Any) -> None:
        """Make a vector for each place."""
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x: Any) -> Any:
        """Return `x`, (n, length, width), with the vectors added."""
        return x + self.vectors


def transformer(
    characters: int, length: int, width: int, depth: int, heads: int, remat: bool = False
) -> Any:
    """Return a model of numbers of characters, (n, length), to scores of what follows each."""
    texts = keras.Input((length,), dtype="int32")
    x = Places()(layers.Embedding(characters, width)(texts))
    for _ in range(depth):
        x = Block(width, heads, remat)(x)
    # Probabilities need all the precision that there is.
    scores = layers.Dense(characters, dtype="float32")(layers.LayerNormalization()(x))
    return keras.Model(texts, scores)


def encoded(text: str) -> Any:
    """Return the numbers of a text's characters, int32."""
    return np.array([CHARACTERS.index(character) for character in text], "int32")


def decoded(numbers: Any) -> str:
    """Return the text that numbers of characters mean."""
    return "".join(CHARACTERS[number] for number in numbers)


def pairs(texts: Any) -> tuple[Any, Any]:
    """Return texts without their last character, and what follows each of the others."""
    return texts[:, :-1], texts[:, 1:]
