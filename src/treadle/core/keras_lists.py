"""The lists in which Keras' layers keep their own parts, under private names.

`scripts/check` finds out whether a version of Keras renames one of them.
"""

from collections.abc import Iterator
from typing import Any

BOOKKEEPING = frozenset(
    """
    _layers _metrics _trainable_variables _non_trainable_variables _seed_generators _functional
    _operations _operations_by_depth _operations_by_name _nodes _nodes_by_depth _tracker
    _inbound_nodes _outbound_nodes _trainable_weights _variables _loss_tracker _compile_metrics
    _compile_loss _losses _modules
    """.split()  # noqa: SIM905 - a list of strings would take a page
)
"""Keras' internal bookkeeping: what it lists is found under the attribute that the user wrote."""


def listed(layer: Any, kinds: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield what Keras lists for a layer itself, without what is in its parts.

    Args:
        layer: A layer.
        kinds: The classes of the parts.

    Yields:
        The name of the list, a position in it, and the part there.
    """
    for name, parts in list(vars(layer).items()):
        if name in BOOKKEEPING and isinstance(parts, list):
            for i, part in enumerate(parts):  # type: ignore[reportUnknownArgumentType]
                if isinstance(part, kinds):
                    yield name, i, part


def own_variables(layer: Any) -> list[Any]:
    """Return the variables of a layer, without those of its inner layers."""
    import keras

    return [variable for _, _, variable in listed(layer, keras.Variable)]


def layers_in(layer: Any) -> list[Any]:
    """Return a layer and all layers inside of it, each once."""
    import keras

    found = {id(layer): layer}
    for outer in (waiting := [layer]):
        for _, _, inner in listed(outer, keras.Layer):
            if id(inner) not in found:
                found[id(inner)] = inner
                waiting.append(inner)
    return list(found.values())
