"""What the tests of data sources share: arrays, and batches that `==` compares."""

import numpy as np

X = np.arange(24, dtype=np.float32).reshape(12, 2)
Y = np.arange(12)


def one(window, i):
    """Return batch `i` of a window as what `==` compares: paths, types, shapes, dtypes, bits."""
    from keras import tree

    def told(leaf):
        return None if leaf is None else (leaf[i].shape, str(leaf.dtype), leaf[i].tobytes())

    leaves = tree.flatten_with_path(window.batches)
    return type(window.batches), [(path, told(leaf)) for path, leaf in leaves]


def all_batches(source, epoch=0, start=0, most=1, count=None, **arguments):
    reader, found = source.read(epoch, start, **arguments), []
    while (count is None or len(found) < count) and (window := reader.take(most)) is not None:
        assert 1 <= window.count <= most
        found += [one(window, i) for i in range(window.count)]
    reader.close()
    return found[:count]


class View:
    """Stands for the running loop."""
