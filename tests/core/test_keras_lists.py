"""What Keras lists for a layer is found without the names of the lists."""

from typing import Any

import keras

from treadle.core.keras_lists import layers_in, listed, own_variables


class Outer(keras.layers.Layer):
    """A layer with variables, a metric, a seed generator and inner layers, without attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"inner": [keras.layers.Dense(1), keras.layers.BatchNormalization()]}
        self.held = (keras.metrics.Mean(), keras.random.SeedGenerator(1))

    def build(self, shape: Any) -> None:
        self.frozen = self.add_weight(shape=(1,), trainable=False)
        self.kernel = self.add_weight(shape=(1,))
        for part in self.parts["inner"]:
            part.build(shape)


def test_parts_of_a_layer_are_those_that_keras_lists() -> None:
    layer = Outer()
    layer.build((None, 2))
    assert [id(v) for v in own_variables(layer)] == [id(layer.kernel), id(layer.frozen)]
    kinds = (keras.Layer, keras.metrics.Metric, keras.random.SeedGenerator)
    found = [id(part) for _, _, part in listed(layer, kinds)]
    assert set(found) == {id(part) for part in (*layer.parts["inner"], *layer.held)}
    assert len(found) == 4
    inside = {id(v) for part in layers_in(layer) for v in own_variables(part)}
    seeds = {id(layer.held[1].state)}
    assert inside == {id(v) for v in layer.variables} - seeds


def test_layers_inside_of_a_model_are_found_each_once() -> None:
    shared = keras.layers.Dense(2)
    inner = keras.Sequential([keras.Input((2,)), shared, keras.layers.Dropout(0.5)])
    model = keras.Sequential([keras.Input((2,)), inner, shared])
    found = layers_in(model)
    assert found[0] is model
    assert len({id(layer) for layer in found}) == len(found)
    assert {id(layer) for layer in (inner, shared, inner.layers[1])} <= {id(x) for x in found}
