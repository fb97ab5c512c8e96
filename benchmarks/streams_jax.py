"""Who is timed on Grain and on generators: Treadle, and a jitted step over the same batches."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from .contestants import Contestant, TreadleLoop
from .contestants_jax import over_batches
from .streams import batches_of
from .workloads import Job


def makers_of(job: Job, stream: str) -> dict[str, Callable[[], Contestant]]:
    """Return the contestants by name."""
    if stream == "generator":
        source: Any = partial(batches_of, job)
        epochs: Callable[[], Iterable[Any]] = source
    else:
        source = grain_stream(job)
        epochs = source.__iter__
    return {
        "treadle": lambda: TreadleLoop(job, source),
        "jitted step by hand": lambda: over_batches(job, epochs),
    }


def grain_stream(job: Job) -> Any:
    """Return a Grain data set of augmented batches, which two threads prepare."""
    import grain

    images, labels = job.arrays

    def augmented(index: int, rng: np.random.Generator) -> Any:
        image = images[index]
        if rng.random() < 0.5:
            image = image[:, ::-1]
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        top, left = rng.integers(0, 9, 2)
        return padded[top : top + 32, left : left + 32], labels[index]

    data = grain.MapDataset.range(len(images)).seed(0).shuffle()
    data = data.random_map(augmented).batch(job.batch_size)
    return data.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16))
