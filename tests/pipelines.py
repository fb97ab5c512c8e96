"""Pipelines of tf.data and PyTorch as users write them, each created again for every run.

Run as a script, it resumes runs from copies of their directories, and writes what they trained on.
"""

import json
import os
import random
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

import treadle
from tests import position_kinds
from treadle.data import as_source, limited
from treadle.errors import DataError

ROWS = np.arange(1, 12)
EPOCHS = 3


class Values(treadle.Task):
    """Returns a number that tells each batch from others, also from other orders of its rows."""

    def __init__(self) -> None:
        self.count = keras.Variable(0.0)

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.count.assign_add(1.0)
        found = 0.0
        for leaf in keras.tree.flatten(batch):
            row = keras.ops.reshape(keras.ops.cast(leaf, "float32"), (-1,))
            size = int(row.shape[0])
            found += keras.ops.sum(row * keras.ops.arange(1, size + 1, dtype="float32")) / 7
        return {"value": found}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        return {"count": self.count + 0.0}


def files(name: str) -> str:
    """Return a path in the folder of the test, which lasts as long as a user's files do."""
    return os.path.join(os.environ["PIPELINE_FILES"], name)


def write_files() -> None:
    """Write the files that pipelines read."""
    import tensorflow as tf

    for part in range(3):
        rows = [str(10 * part + i) for i in range(4)]
        Path(files(f"rows-{part}.txt")).write_text("\n".join(rows))
        with tf.io.TFRecordWriter(files(f"rows-{part}.tfrecord")) as writer:
            for row in rows:
                writer.write(row.encode())
        Path(files(f"texts/{part}")).mkdir(parents=True)
        for row in rows:
            Path(files(f"texts/{part}/{row}.txt")).write_text("word " * int(row))
    tf.data.Dataset.range(11).save(files("saved"), shard_func=lambda row: row % 3)


def base() -> Any:
    import tensorflow as tf

    tf.random.set_seed(1)
    return tf.data.Dataset.from_tensor_slices(ROWS)


def shuffled(**arguments: Any) -> Any:
    return base().shuffle(11, **arguments)


def number(text: Any) -> Any:
    import tensorflow as tf

    return tf.strings.to_number(text)


def noisy(row: Any) -> Any:
    import tensorflow as tf

    return tf.cast(row, tf.float32) + tf.random.uniform([])


def one(row: Any) -> Any:
    import tensorflow as tf

    return tf.cast(row % 2, tf.int32)


def created(row: Any, seed: int | None = 5) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(row % 4 + 2).shuffle(4, seed=seed)


def choice(**arguments: Any) -> Any:
    import tensorflow as tf

    parts = tf.data.Dataset.range(2).repeat(8)
    return parts.shuffle(9, **arguments) if arguments else parts


def choose(parts: Any, **arguments: Any) -> Any:
    import tensorflow as tf

    both = [parts.filter(lambda row: row % 2 == 0), parts.filter(lambda row: row % 2 == 1)]
    return tf.data.Dataset.choose_from_datasets(both, choice(**arguments))


def sample(parts: Any, then: Any = lambda part: part, **arguments: Any) -> Any:
    import tensorflow as tf

    both = [
        then(parts.filter(lambda row: row % 2 == 0)),
        then(parts.filter(lambda row: row % 2 == 1)),
    ]
    return tf.data.Dataset.sample_from_datasets(both, [0.5, 0.5], **arguments)


def resampled(parts: Any) -> Any:
    return parts.rejection_resample(one, [0.5, 0.5], seed=3).map(lambda kind, row: row)


def zipped(parts: Any) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.zip((parts, parts.map(lambda row: row * 10)))


def drawn(**arguments: Any) -> Any:
    import tensorflow as tf

    base()
    return tf.data.Dataset.random(seed=4, **arguments).take(7).map(lambda row: row % 100)


def captured(inner: Any) -> Any:
    return base().take(2).flat_map(lambda row: inner.map(lambda other: other * row))


def nested() -> Any:
    windows = shuffled().window(3)
    return windows.flat_map(lambda window: window.batch(3, drop_remainder=True))


def sequences() -> Any:
    import tensorflow as tf

    return shuffled().map(lambda row: tf.range(row % 5 + 1))


def grouped() -> Any:
    return shuffled().group_by_window(
        key_func=lambda row: row % 3,
        reduce_func=lambda key, rows: rows.shuffle(3, seed=2).batch(2),
        window_size=4,
    )


def bucketed() -> Any:
    import tensorflow as tf

    data = sequences().bucket_by_sequence_length(lambda row: tf.shape(row)[0], [3], [2, 2])
    return data.map(lambda rows: rows + 1)


def ragged() -> Any:
    return sequences().ragged_batch(2).map(lambda rows: rows.to_tensor())


def scanned() -> Any:
    return shuffled().scan(np.int64(0), lambda total, row: (total + row, total + row))


def texts(**arguments: Any) -> Any:
    import tensorflow as tf

    base()
    names = tf.data.Dataset.list_files(files("rows-*.txt"))
    lines = names.interleave(tf.data.TextLineDataset, cycle_length=2, **arguments)
    return lines.map(number).shuffle(4)


def records(**arguments: Any) -> Any:
    import tensorflow as tf

    base()
    names = tf.data.Dataset.list_files(files("rows-*.tfrecord"))
    return tf.data.TFRecordDataset(names, **arguments).map(number)


def keras_texts() -> Any:
    import tensorflow as tf

    data: Any = keras.utils.text_dataset_from_directory(files("texts"), batch_size=2, seed=1)
    return data.map(lambda text, label: (tf.strings.length(text), label))


def loaded() -> Any:
    import tensorflow as tf

    def read(parts: Any) -> Any:
        return parts.shuffle(3).interleave(lambda part: part, cycle_length=2)

    base()
    return tf.data.Dataset.load(files("saved"), reader_func=read)


def generated() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_generator(
        lambda: iter(range(7)), output_signature=tf.TensorSpec([], tf.int64)
    )


def with_generator() -> Any:
    import tensorflow as tf

    generator = tf.random.Generator.from_seed(1)
    return base().map(lambda row: generator.uniform([]) + tf.cast(row, tf.float32))


def with_iterator() -> Any:
    others = iter(shuffled().repeat())
    return base().map(lambda row: row + next(others))


def with_table() -> Any:
    import tensorflow as tf

    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def counted(row: Any) -> Any:
        count = table.lookup(row) + 1
        table.insert(row, count)
        return count * 100 + row

    return base().map(counted)


def with_options(**values: Any) -> Any:
    import tensorflow as tf

    options: Any = tf.data.Options()
    for name, value in values.items():
        setattr(options, name, value)
    return shuffled().map(lambda row: row * 2, num_parallel_calls=2).with_options(options)


def adapted() -> Any:
    import tensorflow as tf
    from tensorflow.python.data.ops.dataset_ops import DatasetV1Adapter

    return tf.data.Dataset.zip((DatasetV1Adapter(shuffled()), base()))


def globally_shuffled() -> Any:
    from tensorflow.python.data.experimental.ops.global_shuffle_op import _global_shuffle

    return _global_shuffle(base(), seed=3)


def batched(make: Any) -> Any:
    return lambda: make().batch(2)


# By name: what creates it, and how its announcement begins; None if it resumes exactly.
TENSORFLOW: dict[str, tuple[Any, str | None]] = {
    "plain": (batched(base), None),
    "shuffled": (lambda: shuffled().batch(2).prefetch(2), None),
    "shuffled twice": (lambda: shuffled().map(lambda row: row + 1).shuffle(6).batch(2), None),
    "shuffled once": (batched(lambda: shuffled(reshuffle_each_iteration=False)), None),
    "shuffled by default": (batched(lambda: shuffled(reshuffle_each_iteration=None)), None),
    "shuffled globally": (batched(globally_shuffled), None),
    "shuffled for validation too": (lambda: (x := shuffled().batch(2), x.take(2)), None),
    "cached": (lambda: base().cache().shuffle(11).batch(2), None),
    "cached after the shuffle": (lambda: shuffled().cache().batch(2), "the cache after a"),
    "cached in a file": (lambda: base().cache(files("cache")).shuffle(11).batch(2), None),
    "repeated": (lambda: base().repeat(2).shuffle(11).batch(4), None),
    "repeated after the shuffle": (lambda: shuffled().repeat(2).batch(4), "the shuffle before a"),
    "without end": (lambda: limited(shuffled().repeat().batch(2), 4), None),
    "random numbers": (lambda: base().map(noisy).shuffle(5).batch(2), None),
    "random numbers, cached": (lambda: base().map(noisy).cache().shuffle(5).batch(2), None),
    "random numbers in parallel": (
        batched(lambda: base().map(noisy, num_parallel_calls=2)),
        "tf.random is drawn from in a function",
    ),
    "filtered": (lambda: shuffled().filter(lambda row: row % 3 > 0).batch(2), None),
    "chosen": (batched(lambda: choose(shuffled())), None),
    "chosen in a shuffled order": (
        batched(lambda: choose(base(), seed=3)),
        "choose_from_datasets of a tf.data.Dataset uses another data set that shuffles",
    ),
    "chosen in one shuffled order": (
        batched(lambda: choose(shuffled(), seed=3, reshuffle_each_iteration=False)),
        None,
    ),
    "resampled": (batched(lambda: resampled(base())), None),
    "shuffled and resampled": (batched(lambda: resampled(shuffled())), None),
    "sampled": (batched(lambda: sample(base(), seed=3)), None),
    "shuffled and sampled": (
        batched(lambda: sample(shuffled(), seed=3, rerandomize_each_iteration=True)),
        None,
    ),
    "balanced, shuffled again": (
        batched(lambda: sample(shuffled(), lambda part: part.shuffle(3), seed=3)),
        None,
    ),
    "balanced, prefetched": (
        batched(lambda: sample(shuffled(), lambda part: part.prefetch(2), seed=3)),
        None,
    ),
    "balanced, shuffled again and prefetched": (
        batched(lambda: sample(shuffled(), lambda part: part.shuffle(3).prefetch(2), seed=3)),
        "a shuffle of a tf.data.Dataset is followed by another shuffle on several paths",
    ),
    "zipped with a map of it": (batched(lambda: zipped(shuffled())), None),
    "random data": (batched(drawn), None),
    "other random data": (batched(lambda: drawn(rerandomize_each_iteration=True)), None),
    "interleaved shuffles": (batched(lambda: base().take(3).interleave(created)), None),
    "interleaved shuffles of the global seed": (
        batched(lambda: base().take(3).interleave(lambda row: created(row, None))),
        None,
    ),
    "interleaved in parallel": (
        batched(lambda: shuffled().take(3).interleave(created, num_parallel_calls=2)),
        None,
    ),
    "interleaved in any order": (
        batched(
            lambda: base().take(3).interleave(created, num_parallel_calls=2, deterministic=False)
        ),
        "a tf.data.Dataset with deterministic=False",
    ),
    "captured": (batched(lambda: captured(base())), None),
    "captured shuffle": (
        batched(lambda: captured(shuffled())),
        "a function of a tf.data.Dataset uses another data set that shuffles",
    ),
    "concatenated": (batched(lambda: base().concatenate(shuffled())), "a shuffle in the second"),
    "snapshot": (lambda: base().map(noisy).snapshot(files("snapshot")).shuffle(11).batch(2), None),
    "snapshot after the shuffle": (
        lambda: shuffled().snapshot(files("shuffled")).batch(2),
        "the snapshot after a shuffle",
    ),
    "loaded": (batched(loaded), None),
    "windows": (nested, None),
    "groups": (grouped, None),
    "buckets": (bucketed, None),
    "ragged": (ragged, None),
    "padded": (lambda: sequences().padded_batch(2), None),
    "scanned": (batched(scanned), None),
    "numbered": (batched(lambda: shuffled().enumerate()), None),
    "part": (batched(lambda: shuffled().skip(2).take(7).shard(2, 0)), None),
    "until": (batched(lambda: shuffled().take_while(lambda row: row != 4)), None),
    "unique": (batched(lambda: shuffled().map(lambda row: row // 2).unique()), None),
    "rebatched": (lambda: shuffled().batch(3).unbatch().batch(4).rebatch(2), None),
    "lines": (batched(texts), None),
    "lines in parallel": (batched(lambda: texts(num_parallel_calls=2)), None),
    "records": (batched(records), None),
    "records in parallel": (batched(lambda: records(num_parallel_reads=2)), None),
    "texts of Keras": (keras_texts, None),
    "generator": (batched(generated), "a Python function in a tf.data.Dataset cannot seek"),
    "random generator": (batched(with_generator), "a function of a tf.data.Dataset keeps"),
    "iterator": (batched(with_iterator), "a function of a tf.data.Dataset keeps something"),
    "table": (batched(with_table), "a function of a tf.data.Dataset keeps something"),
    "options": (batched(lambda: with_options(deterministic=True)), None),
    "options in any order": (
        batched(lambda: with_options(deterministic=False)),
        "a tf.data.Dataset with deterministic=False",
    ),
    "adapted": (batched(adapted), None),
}


def loader(data: Any = None, **arguments: Any) -> Any:
    import torch
    from torch.utils.data import DataLoader

    class Augmented(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, index: int) -> Any:
            drawn = random.random() + np.random.rand() + torch.rand(1).item()
            return torch.tensor([ROWS[index] + drawn])

    if not {"batch_sampler", "batch_size"} & set(arguments):
        arguments["batch_size"] = 2
    return DataLoader(Augmented() if data is None else data, **arguments)


def generator() -> Any:
    import torch

    return torch.Generator().manual_seed(7)


class Rows:
    """Rows with noise of a generator of their own."""

    def __init__(self, generator: Any) -> None:
        self.transforms = [generator]

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        import torch

        noise = self.transforms[0]
        if isinstance(noise, torch.Generator):
            return torch.rand(1, generator=noise) + ROWS[index]
        return np.array([noise.random() + ROWS[index]])


def stream(keeps: bool) -> Any:
    import torch

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __init__(self) -> None:
            self.generator = random.Random(3)

        def __iter__(self) -> Any:
            return (torch.tensor([row + self.generator.random()]) for row in ROWS)

    class Keeping(Stream):
        def state_dict(self) -> Any:
            return self.generator.getstate()

        def load_state_dict(self, state: Any) -> None:
            self.generator.setstate(state)

    return Keeping() if keeps else Stream()


class Sampler:
    """Batches of indices in an order of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(2)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(self.generator.permutation(10).reshape(5, 2).tolist())


def collating(generator: Any) -> Any:
    def collate(rows: Any) -> Any:
        import torch

        return torch.stack(rows) + generator.random()

    return collate


def samplers() -> Any:
    import torch.utils.data as data

    return data


def weights() -> list[float]:
    return [1.0 + index % 3 for index in range(len(ROWS))]


def batches_of(sampler: Any) -> Any:
    return samplers().BatchSampler(sampler, 2, True)


LOADERS: dict[str, tuple[Any, str | None]] = {
    "in order": (loader, None),
    "shuffled": (lambda: loader(shuffle=True), None),
    "with a generator": (lambda: loader(shuffle=True, generator=generator()), None),
    "workers": (lambda: loader(shuffle=True, num_workers=2), None),
    "workers and a generator": (
        lambda: loader(shuffle=True, num_workers=2, generator=generator()),
        None,
    ),
    "persistent workers": (
        lambda: loader(shuffle=True, num_workers=2, persistent_workers=True),
        "persistent workers of a DataLoader continue",
    ),
    "weighted": (lambda: loader(sampler=samplers().WeightedRandomSampler(weights(), 11)), None),
    "weighted with a generator": (
        lambda: loader(
            sampler=samplers().WeightedRandomSampler(weights(), 11, generator=generator())
        ),
        None,
    ),
    "a subset": (
        lambda: loader(sampler=samplers().SubsetRandomSampler(range(7), generator=generator())),
        None,
    ),
    "batches of a sampler": (
        lambda: loader(
            batch_sampler=batches_of(samplers().RandomSampler(ROWS, generator=generator()))
        ),
        None,
    ),
    "batches of an own sampler": (lambda: loader(batch_sampler=Sampler()), "the Sampler of a"),
    "a stream": (lambda: loader(stream(False)), "the Stream of a DataLoader cannot seek"),
    "a stream with a state": (lambda: loader(stream(True)), None),
    "parts": (
        lambda: loader(samplers().random_split(Rows(random.Random(5)), [7, 4], generator())[0]),
        None,
    ),
    "two sets": (
        lambda: loader(
            samplers().ConcatDataset([Rows(random.Random(5)), Rows(random.Random(6))]), shuffle=True
        ),
        None,
    ),
    "collated with noise": (
        lambda: loader(collate_fn=collating(random), shuffle=True, drop_last=True),
        None,
    ),
    "collated with own noise": (
        lambda: loader(collate_fn=collating(np.random.default_rng(1))),
        None,
    ),
    "own noise of NumPy": (lambda: loader(Rows(np.random.default_rng(5))), None),
    "own noise of old NumPy": (lambda: loader(Rows(np.random.RandomState(5))), None),
    "own noise of Python": (lambda: loader(Rows(random.Random(5)), shuffle=True), None),
    "own noise of torch": (lambda: loader(Rows(generator())), None),
    "own noise in workers": (lambda: loader(Rows(random.Random(5)), num_workers=2), None),
}
ALL = {**{f"tf.data {name}": x for name, x in TENSORFLOW.items()}, **LOADERS}
MADE = {**position_kinds.KINDS, **{name: make for name, (make, _) in ALL.items()}}


def train(name: str, directory: Path, hooks: Any = (), prepare: bool = False) -> list[float]:
    """Train on a pipeline, or resume in the directory; return the value of each batch."""
    keras.utils.set_random_seed(3)
    made = MADE[name]()
    data, validation = made if isinstance(made, tuple) else (made, None)
    options = treadle.Options(execution="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with treadle.Loop(Values(), directory, hooks, options=options, console=False) as loop:
            if prepare:
                loop.prepare(data)
            loop.fit(data, validation, epochs=EPOCHS)
    return loop.history.steps("value").tolist()


def straight(name: str, directory: Path, epochs: int = 2) -> tuple[list[float], list[Path]]:
    """Train without interruption; return the values, and a copy of the directory at each step."""
    copies: list[Path] = []

    def copy(loop: Any) -> None:
        if loop.progress.epoch < epochs:
            loop.save()
            copies.append(directory.with_name(f"{directory.name}-{loop.progress.step}"))
            shutil.copytree(directory, copies[-1])

    return train(name, directory, [treadle.every("1 step", copy)]), copies


def announced(name: str) -> str | None:
    made = MADE[name]()
    return as_source(made[0] if isinstance(made, tuple) else made).inexact


def resumed(name: str, directory: Path) -> Any:
    """Return the values of a resumed run, or the error that says that the data is different."""
    try:
        return train(name, directory)
    except DataError as error:
        return str(error)


def main(path: str) -> None:
    """Resume the runs that a file lists by name, and write their values to it."""
    listed = json.loads(Path(path).read_text())
    found = {n: [resumed(n, Path(copy)) for copy in copies] for n, copies in listed.items()}
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
