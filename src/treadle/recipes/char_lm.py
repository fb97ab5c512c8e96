"""A character-level language model of "Alice's Adventures in Wonderland".

A causal pre-norm transformer (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Xiong et al.
2020, https://arxiv.org/abs/2002.04745) predicts the next character. The metric is bits per
character, the cross-entropy to base 2. Gradients are accumulated over several batches and clipped
by their global norm; the learning rate follows a linear warm-up and a cosine decay.

Mixed precision works too: `--precision mixed_bfloat16`. With `--set remat=true` the activations
within blocks are recomputed in the backward pass instead of stored (gradient checkpointing, Chen et
al. 2016, https://arxiv.org/abs/1604.06174), which saves memory and gives the same gradients.
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
HELD_OUT = 0.1  # this last part of the book is used for validation only


class CharacterModel(treadle.Task):
    """Train a character-level transformer on a novel, with gradient accumulation and clipping.

    Args:
        width: Embedding size of the transformer.
        depth: Number of transformer blocks.
        heads: Attention heads per block.
        length: Context length in characters.
        learning_rate: Peak learning rate of AdamW, at the end of the warm-up.
        updates: Number of updates after which the learning rate has decayed to zero.
        warm_up: Number of warm-up updates among them.
        clip: Maximum global norm of an update's gradient.
        accumulate: Batches per update.
        batch_size: Texts of `length` characters in a batch.
        remat: Recompute the activations of blocks in the backward pass instead of storing them.
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
        """Accumulate a batch's gradient, and update the weights after the last batch of a group."""
        seen, following = batch
        variables = self.model.trainable_variables

        def objective() -> Any:
            return self.loss(following, self.model(seen, training=True))

        def update(grads: Any) -> None:
            clipped, norm = treadle.clip_by_global_norm(grads, self.clip)
            self.norm.assign(norm)  # stored in a variable, since the return value is not used
            self.optimizer.apply(clipped, variables)

        loss, grads = treadle.gradients(objective, variables)
        self.accumulator.add(grads, update)
        return {
            "bits_per_character": loss / log(2),
            "norm": self.norm.value,
            "learning_rate": self.rate(self.optimizer.iterations),
        }

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate a batch of the validation part of the book."""
        seen, following = batch
        loss = self.loss(following, self.model(seen, training=False))
        return {"bits_per_character": loss / log(2)}

    def write(self, text: Any) -> Any:
        """Sample continuations of texts; return character indices of shape (n, length).

        Args:
            text: The beginnings of the texts: character indices of shape (n, begun).
        """
        count, begun = text.shape
        # Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample from their softmax.
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
        """Log a sample after each epoch."""
        return [treadle.every("1 epoch", self.sample)]

    def sample(self, loop: LoopView) -> dict[str, str]:
        """Return a text sampled from the model."""
        return {"sample": decoded(loop.call(self.write, encoded(PROMPT)[None])[0])}

    def datasets(self) -> treadle.Datasets:
        """Return random excerpts for training, and the last part of the book for validation."""
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
    """A pre-norm transformer block: causal self-attention and an MLP, with residual connections.

    Args:
        width: Embedding size.
        heads: Attention heads.
        remat: Recompute the block's activations in the backward pass.
    """

    def __init__(self, width: int, heads: int, remat: bool) -> None:
        super().__init__()
        self.normalizations = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.network = [layers.Dense(4 * width, activation="gelu"), layers.Dense(width)]
        self.remat = remat

    def call(self, x: Any) -> Any:
        """Return the output of the block, (n, length, width)."""
        return treadle.remat(self.inner)(x) if self.remat else self.inner(x)

    def inner(self, x: Any) -> Any:
        """Compute the block, without rematerialization."""
        normal = self.normalizations[0](x)
        x = x + self.attention(normal, normal, use_causal_mask=True)
        normal = self.normalizations[1](x)
        for layer in self.network:
            normal = layer(normal)
        return x + normal


class Places(layers.Layer):
    """Learned position embeddings, added to the inputs."""

    def build(self, shape: Any) -> None:
        """Create an embedding for each position."""
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x: Any) -> Any:
        """Return `x`, (n, length, width), with the position embeddings added."""
        return x + self.vectors


def transformer(
    characters: int, length: int, width: int, depth: int, heads: int, remat: bool = False
) -> Any:
    """Return a model from character indices, (n, length), to logits of each next character."""
    texts = keras.Input((length,), dtype="int32")
    x = Places()(layers.Embedding(characters, width)(texts))
    for _ in range(depth):
        x = Block(width, heads, remat)(x)
    # Logits are computed in float32 also with mixed precision, for an accurate softmax.
    scores = layers.Dense(characters, dtype="float32")(layers.LayerNormalization()(x))
    return keras.Model(texts, scores)


def encoded(text: str) -> Any:
    """Return the character indices of a text, int32."""
    return np.array([CHARACTERS.index(character) for character in text], "int32")


def decoded(numbers: Any) -> str:
    """Return the text for character indices."""
    return "".join(CHARACTERS[number] for number in numbers)


def pairs(texts: Any) -> tuple[Any, Any]:
    """Return inputs (without the last character) and targets (without the first) of texts."""
    return texts[:, :-1], texts[:, 1:]
