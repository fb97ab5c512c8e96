import sys
import weakref
from collections import OrderedDict

import keras
import numpy as np
import pytest

import treadle
from tests.data_batches import all_batches
from tests.run.test_first_step import Line
from treadle.data import as_source, from_arrays, limited
from treadle.data.foreign import sources as foreign
from treadle.errors import DataError, StateError

X = np.arange(20, dtype=np.float32).reshape(10, 2)
Y = np.arange(10)
IN_ORDER = all_batches(from_arrays(X.copy(), Y.copy(), batch_size=4, shuffle=False))


def in_order(*arrays):
    arrays = arrays or (X, Y)
    return [tuple(a[i : i + 4] for a in arrays) for i in range(0, 10, 4)]


def tensorflow_dataset():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def torch_loader(**arguments):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.tensor(X), torch.tensor(Y))
    return DataLoader(data, batch_size=4, **arguments)


def grain_dataset():
    import grain

    return grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(4)


def grain_loader():
    import grain

    source = list(zip(X, Y, strict=True))
    return grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.SequentialSampler(10),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )


class Dataset(keras.utils.PyDataset):
    def __init__(self, length=3, **arguments):
        super().__init__(**arguments)
        self.length = length
        self.calls = []

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        self.calls.append(index)
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


class Hooked(Dataset):
    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


class Iterable:
    def __iter__(self):
        return iter(in_order())


class Sized(Iterable):
    def __len__(self):
        return 3


def function():
    yield from in_order()


# What is passed, its length, its batch_examples, and whether it is sure to come again.
KINDS = {
    "tf.data": (tensorflow_dataset, 3, None, True),
    "DataLoader": (torch_loader, 3, 4, True),
    "PyDataset": (Dataset, 3, None, True),
    "PyDataset with workers": (lambda: Dataset(workers=4), 3, None, True),
    "Grain MapDataset": (grain_dataset, 3, None, True),
    "Grain IterDataset": (lambda: grain_dataset().to_iter_dataset(), None, None, True),
    "Grain DataLoader": (grain_loader, None, None, True),
    "list": (in_order, 3, None, True),
    "tuple of batches": (lambda: tuple(in_order()), 3, None, True),
    "iterable": (Iterable, None, None, False),
    "iterable with a length": (Sized, 3, None, False),
    "generator function": (lambda: function, None, None, False),
    "function of a list": (lambda: in_order, None, None, False),
    "generator": (function, None, None, False),
    "iterator": (lambda: iter(in_order()), None, None, False),
}


def tuples(batches):
    """Return batches with lists made tuples: a DataLoader gives lists."""
    return [(tuple, leaves) for _, leaves in batches]


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_accepted_as_they_are(name):
    make, length, batch_examples, sure = KINDS[name]
    source = as_source(make())
    assert as_source(source) is source
    assert (source.length, source.batch_examples) == (length, batch_examples)
    assert not source.endless
    assert (source.inexact is None) == sure
    assert sure or " cannot seek: a resumed run draws and discards" in source.inexact
    for most in (1, 2, 9):
        assert tuples(all_batches(as_source(make()), most=most)) == IN_ORDER


@pytest.mark.parametrize("name", KINDS)
def test_reading_from_k_equals_skipping_k(name):
    make = KINDS[name][0]
    for start in range(4):
        assert tuples(all_batches(as_source(make()), start=start, most=2)) == IN_ORDER[start:]
    with pytest.raises(DataError, match=r"this is not the data that the run began with$"):
        as_source(make()).read(0, 4).take(1)


@pytest.mark.parametrize("name", KINDS)
def test_every_epoch_reads_all_batches_again(name):
    source = as_source(KINDS[name][0]())
    assert tuples(all_batches(source, 0)) == IN_ORDER
    if name in ("generator", "iterator"):
        with pytest.raises(
            DataError,
            match=r"^a (generator|list_iterator) gives its batches once: 3 of them are spent, and "
            r"batch 1 of epoch 2 cannot be read from it. Pass the function that makes it \(train, "
            r"not train\(\)\), or cut one long stream into epochs with treadle.data.limited",
        ):
            source.read(1)
    else:
        assert tuples(all_batches(source, 1)) == IN_ORDER


@pytest.mark.parametrize("name", ["generator", "iterator"])
def test_iterators_continue_at_their_position(name):
    source = as_source(KINDS[name][0]())
    reader = source.read(0)
    window = reader.take(2)
    reader.put_back(window)
    reader.close()
    reader = source.read(0)
    assert reader.take(2).batches[1].tolist() == window.batches[1].tolist()
    reader.close()
    with pytest.raises(DataError, match=r"2 of them are spent, and batch 1 of epoch 1 cannot be"):
        source.read(0)
    assert tuples(all_batches(source, 0, 2)) == IN_ORDER[2:]
    assert source.read(0, 3).take(1) is None


@pytest.mark.parametrize("name", ["generator", "DataLoader", "generator function"])
def test_a_stream_passed_again_continues(name):
    data = KINDS[name][0]()
    source = as_source(data)
    assert as_source(data) is source
    assert as_source(KINDS[name][0]()) is not source or data is function
    kept = id(data)
    del source, data
    assert kept not in foreign._sources


def test_tensorflow_lengths():
    data = tensorflow_dataset()
    assert as_source(data.repeat()).endless and as_source(data.repeat()).length is None
    unknown = as_source(data.filter(lambda x, y: True))
    assert unknown.length is None and not unknown.endless
    assert as_source(data.unbatch().batch(5, drop_remainder=True)).batch_examples == 5
    assert as_source(data).batch_examples is None


def test_tensorflow_stream_without_end_is_cut_into_epochs():
    source = limited(tensorflow_dataset().repeat(), 2)
    assert source.length == 2
    assert all_batches(source, 0, most=5) == IN_ORDER[:2]
    # The next epoch continues the stream, also if it is read from its second batch.
    assert all_batches(source, 1) == [IN_ORDER[2], IN_ORDER[0]]
    assert all_batches(limited(tensorflow_dataset().repeat(), 2), 1, 1) == [IN_ORDER[0]]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_tensors_that_only_tensorflow_supports(kind):
    import tensorflow as tf

    tensor = (
        tf.ragged.constant([[1], [2, 3]])
        if kind == "ragged"
        else tf.sparse.from_dense(np.eye(2, dtype=np.float32))
    )
    data = tf.data.Dataset.from_tensors({"x": tensor, "y": tf.zeros(2)})
    with pytest.raises(DataError, match=rf"^this tf.data.Dataset gives {kind} tensors"):
        as_source(data)
    with pytest.raises(DataError, match=r"^the array 'x' is a (Ragged|Sparse)Tensor of dtype"):
        as_source(lambda: iter([{"x": tensor}])).read(0).take(1)


def test_tensorflow_texts():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensors(tf.constant(["a", "b"]))
    with pytest.raises(DataError, match=r"^the batch is a ndarray of dtype object: batches are"):
        as_source(data).read(0).take(1)


def test_shuffled_loaders_have_equal_orders_for_equal_seeds():
    import torch

    expected = all_batches(as_source(torch_loader(shuffle=True)), 2, seed=1)
    torch.rand(3)
    assert all_batches(as_source(torch_loader(shuffle=True)), 2, seed=1) == expected
    assert all_batches(as_source(torch_loader(shuffle=True)), 2, 1, seed=1) == expected[1:]
    assert all_batches(as_source(torch_loader(shuffle=True)), 3, seed=1) != expected


def test_torch_iterable_data_sets_have_no_length():
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(X)

    source = as_source(DataLoader(Stream(), batch_size=4))
    assert source.length is None
    assert [leaves[0][1][0] for _, leaves in all_batches(source)] == [(4, 2), (4, 2), (2, 2)]


def test_torch_tensors_are_not_copied_on_their_way():
    import torch

    from treadle.data.leaves import as_array

    tensor = torch.zeros(3)
    assert np.shares_memory(as_array((), tensor), tensor.numpy())
    with pytest.raises(DataError, match=r"^the batch is a torch tensor of layout torch.sparse_coo"):
        as_array((), torch.eye(2).to_sparse())


def test_keras_hooks_are_called():
    dataset = Hooked()
    source = as_source(dataset)
    assert source.inexact.startswith("on_epoch_begin and on_epoch_end of Hooked may")
    reader = source.read(0)
    assert dataset.calls == []
    while reader.take(2) is not None:
        pass
    assert dataset.calls == ["begin", 0, 1, 2, "end"]
    dataset.calls.clear()
    all_batches(source, 1, 2)
    assert dataset.calls == ["begin", 2, "end"]


def test_keras_data_set_without_end():
    source = as_source(Dataset(length=None))
    assert source.endless and source.length is None
    assert all_batches(source, 0, 1, count=2) == IN_ORDER[1:3]


def test_grain_epochs_have_their_own_orders():
    import grain

    data = grain.MapDataset.source(Y).shuffle(seed=1).batch(4)
    source = as_source(data)
    first, second = all_batches(source, 0), all_batches(source, 1)
    assert len(first) == len(second) == 3 and first != second
    assert first + second == all_batches(as_source([data[i] for i in range(6)]))
    assert all_batches(source, 1, 1) == second[1:]
    endless = as_source(data.repeat())
    assert endless.endless and endless.length is None
    assert all_batches(limited(endless, 3), 1) == second


def test_grain_filters_leave_holes():
    import grain

    data = grain.MapDataset.source(Y).filter(lambda y: y > 0)
    with pytest.raises(DataError, match=r"^the source gave None where a batch was expected"):
        as_source(data).read(0).take(1)


class NotBatches:
    pass


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: X,
            r"^a numpy.ndarray is not cut into batches: use treadle\.data\.from_arrays\(x, y, "
            r"batch_size=…\), without y to predict$",
        ),
        (lambda: (X, Y), r"^a tuple of arrays is not cut into batches: use treadle.data.from_arr"),
        (lambda: (X, None), r"^a tuple of arrays is not cut into batches"),
        (lambda: {"x": X}, r"^a dict of arrays is not cut into batches"),
        (lambda: keras.ops.ones(2), r"(Tensor|Array)\w* is not cut into batches"),
        (
            NotBatches,
            r"^cannot read batches from a .*NotBatches. Accepted are: treadle.data.from_arrays\(…\)"
            r".*tf.data.Dataset, PyTorch DataLoader, keras.utils.PyDataset, Grain.*generator funct",
        ),
        (lambda: NotBatches, r"^cannot read batches from a type\. Accepted are"),
        (lambda: "train.csv", r"^cannot read batches from a str\. "),
        (lambda: {"a": 1}, r"^cannot read batches from a dict\. "),
        (lambda: None, r"^cannot read batches from a NoneType\. "),
        (lambda: 3, r"^cannot read batches from a int\. "),
        (
            lambda: torch_loader().dataset,
            r"^a torch.utils.data.dataset.TensorDataset gives single examples: wrap it in torch.ut",
        ),
    ],
)
def test_objects_that_are_not_accepted(make, message):
    with pytest.raises(DataError, match=message):
        as_source(make())


@pytest.mark.parametrize("made", [(X, Y), X, {"x": X}, None, 3])
def test_functions_that_return_no_iterator(made):
    def batch():
        return made

    with pytest.raises(DataError, match=r"^batch\(\) returned a .*, not an iterator of batches: "):
        as_source(batch).read(0).take(1)


def test_as_source_imports_no_framework(monkeypatch):
    for name in ("tensorflow", "torch", "grain", "keras"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    source = as_source(in_order())
    assert source.length == 3
    assert not {"tensorflow", "torch", "grain", "keras"} & set(sys.modules)


@pytest.mark.parametrize("shuffled", [True, False])
def test_an_iterator_of_tf_data_is_released_before_the_next_one_is_created(shuffled, monkeypatch):
    tf = pytest.importorskip("tensorflow")
    dataset, made = tf.data.Dataset.range(8).batch(2), []
    dataset = dataset.shuffle(4, seed=1) if shuffled else dataset

    create = type(dataset).__iter__

    def remembered(dataset):
        iterator = create(dataset)
        made.append(weakref.ref(iterator))
        return iterator

    monkeypatch.setattr(type(dataset), "__iter__", remembered)
    source = as_source(dataset)
    to_its_end, closed = source.read(0), source.read(1)
    while to_its_end.take(3) is not None:
        pass
    assert made[0]() is None
    assert closed.take(1) is not None
    assert made[1]() is not None
    closed.close()
    assert made[1]() is None


def test_batches_keep_the_order_of_keys_and_scalars_are_no_examples():
    import tensorflow as tf
    import torch
    from torch.utils.data import DataLoader

    rows = [OrderedDict(z=x, b=y) for x, y in zip(X, Y, strict=True)]
    slices = tf.data.Dataset.from_tensor_slices({"z": X, "b": Y}).batch(4, drop_remainder=True)
    scaled = slices.map(lambda batch: {"scale": tf.constant(0.5), **batch})
    for data, kind, names in (
        (slices, dict, ["z", "b"]),
        (scaled, dict, ["scale", "z", "b"]),
        (DataLoader(rows, batch_size=4), OrderedDict, ["z", "b"]),  # type: ignore[arg-type]
        ([{"scale": 0.5, "z": torch.ones(4, 2), "b": Y[:4]}], dict, ["scale", "z", "b"]),
    ):
        source = as_source(data)
        window = source.read(0).take(1)
        assert type(window.batches) is kind and list(window.batches) == names
        assert window.examples == 4
        assert source.batch_examples in (None, 4)
    assert as_source(scaled).batch_examples == 4


def test_zeros_of_a_loader_have_the_form_of_its_batches_and_draw_nothing() -> None:
    import torch

    first = [a.numpy() for a in next(iter(torch_loader()))]
    generator = torch.Generator().manual_seed(3)
    source = as_source(torch_loader(shuffle=True, generator=generator))
    before = generator.get_state(), torch.get_rng_state()
    x, y = source.zeros(4)
    assert [(a.shape, a.dtype) for a in (x, y)] == [(a.shape, a.dtype) for a in first]
    assert not x.any() and not y.any()
    source.zeros(4)
    assert torch.equal(before[1], torch.get_rng_state())
    assert torch.equal(torch.Generator().manual_seed(3).get_state(), before[0])
    # Workers get a copy of the data set, and a file that it has opened would be shared with them.
    assert as_source(torch_loader(num_workers=1)).zeros is None


def test_a_mistake_in_an_evaluation_on_a_loader_shows_before_the_first_step() -> None:
    unreachable = keras.metrics.MeanSquaredError()

    def counting(task, batch):
        unreachable.update_state(batch[1], batch[0][:, 0])
        return {}

    with treadle.Loop(Line(counting), console=False) as loop:
        with pytest.raises(StateError, match="eval_step uses mean_squared_error/total"):
            loop.fit(from_arrays(X, batch_size=4), torch_loader(), epochs=1)
        assert loop.progress.step == 0
