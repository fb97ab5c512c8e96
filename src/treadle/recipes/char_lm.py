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
        context_length: Characters per training example.
        learning_rate: Peak learning rate of AdamW, at the end of the warm-up.
        decay_updates: Updates after which the learning rate has decayed to zero, including the
            warm-up.
        warmup_updates: Updates of the linear warm-up.
        clip_norm: Maximum global norm of an update's gradient.
        accumulation_steps: Batches per update.
        batch_size: Examples per batch.
        remat: Recompute the activations of blocks in the backward pass instead of storing them.
    """

    epochs = 10

    def __init__(
        self,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        context_length: int = 96,
        learning_rate: float = 3e-3,
        decay_updates: int = 1000,
        warmup_updates: int = 50,
        clip_norm: float = 1.0,
        accumulation_steps: int = 2,
        batch_size: int = 16,
        remat: bool = False,
    ) -> None:
        self.model = transformer(len(CHARACTERS), context_length, width, depth, heads, remat)
        decay_steps = decay_updates - warmup_updates
        decay = keras.optimizers.schedules.CosineDecay(learning_rate, decay_steps)
        self.schedule = treadle.schedules.WarmUp(decay, warmup_updates)
        self.optimizer = keras.optimizers.AdamW(self.schedule, weight_decay=0.01)
        self.accumulator = treadle.Accumulator(accumulation_steps)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.norm = keras.Variable(0.0, trainable=False, name="norm")
        self.seeds = keras.random.SeedGenerator()
        self.context_length, self.batch_size = context_length, batch_size
        self.clip_norm = clip_norm

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Accumulate a batch's gradient, and update the weights after the last batch of a group."""
        inputs, targets = batch
        variables = self.model.trainable_variables

        def objective() -> Any:
            return self.loss(targets, self.model(inputs, training=True))

        def update(grads: Any) -> None:
            clipped, norm = treadle.clip_by_global_norm(grads, self.clip_norm)
            self.norm.assign(norm)  # stored in a variable, since the return value is not used
            self.optimizer.apply(clipped, variables)

        loss, grads = treadle.gradients(objective, variables)
        self.accumulator.add(grads, update)
        return {
            "bits_per_character": loss / log(2),
            "gradient_norm": self.norm.value,
            "learning_rate": self.schedule(self.optimizer.iterations),
        }

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Evaluate a batch of the validation part of the book."""
        inputs, targets = batch
        loss = self.loss(targets, self.model(inputs, training=False))
        return {"bits_per_character": loss / log(2)}

    def generate(self, prompts: Any) -> Any:
        """Sample continuations of texts; return character indices of shape (n, context_length).

        Args:
            prompts: Character indices of shape (n, characters).
        """
        count, prompt_length = prompts.shape
        # Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample from their softmax.
        shape = (self.context_length, count, len(CHARACTERS))
        noise = -ops.log(-ops.log(keras.random.uniform(shape, 1e-9, seed=self.seeds)))

        def sample_next(position: Any, texts: Any) -> Any:
            logits = ops.take(self.model(texts, training=False), position - 1, axis=1)
            sampled = ops.argmax(logits + ops.take(noise, position, axis=0), axis=-1)
            is_next = ops.equal(ops.arange(self.context_length), position)
            return ops.where(is_next, ops.cast(sampled[:, None], texts.dtype), texts)

        texts = ops.pad(prompts, ((0, 0), (0, self.context_length - prompt_length)))
        return ops.fori_loop(prompt_length, self.context_length, sample_next, texts)

    def hooks(self) -> list[Any]:
        """Log a sample after each epoch."""
        return [treadle.every("1 epoch", self.sample)]

    def sample(self, loop: LoopView) -> dict[str, str]:
        """Return a text sampled from the model."""
        return {"sample": decode(loop.call(self.generate, encode(PROMPT)[None])[0])}

    def datasets(self) -> treadle.Datasets:
        """Return random excerpts for training, and the last part of the book for validation."""
        book = encode(datasets.alice())
        end = int(len(book) * (1 - HELD_OUT))
        offsets = np.arange(self.context_length + 1)

        def random_excerpts(random: np.random.Generator) -> Any:
            starts = random.integers(0, end - self.context_length, self.batch_size)
            return inputs_and_targets(book[starts[:, None] + offsets])

        held_out = np.arange(end, len(book) - self.context_length, self.context_length)
        return treadle.Datasets(
            train=data.from_function(random_excerpts, length=200),
            validation=data.from_arrays(
                *inputs_and_targets(book[held_out[:, None] + offsets]), batch_size=64, shuffle=False
            ),
        )


class TransformerBlock(layers.Layer):
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
        return treadle.remat(self.forward)(x) if self.remat else self.forward(x)

    def forward(self, x: Any) -> Any:
        """Compute the block, without rematerialization."""
        normalized = self.normalizations[0](x)
        x = x + self.attention(normalized, normalized, use_causal_mask=True)
        hidden = self.normalizations[1](x)
        for layer in self.network:
            hidden = layer(hidden)
        return x + hidden


class PositionEmbedding(layers.Layer):
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
    x = PositionEmbedding()(layers.Embedding(characters, width)(texts))
    for _ in range(depth):
        x = TransformerBlock(width, heads, remat)(x)
    # Logits are computed in float32 also with mixed precision, for an accurate softmax.
    logits = layers.Dense(characters, dtype="float32")(layers.LayerNormalization()(x))
    return keras.Model(texts, logits)


def encode(text: str) -> Any:
    """Return the character indices of a text, int32."""
    return np.array([CHARACTERS.index(character) for character in text], "int32")


def decode(indices: Any) -> str:
    """Return the text for character indices."""
    return "".join(CHARACTERS[index] for index in indices)


def inputs_and_targets(texts: Any) -> tuple[Any, Any]:
    """Return texts without the last character, and without the first: the next characters."""
    return texts[:, :-1], texts[:, 1:]
