"""Finding the origin of the first non-finite number of a step."""

from math import prod

from .findings import Variable, layer_of
from .inspection import StepInspection
from .numbers import Numbers, first_bad, short_list
from .visiting import StepInputs


class Origin:
    """Finds the first non-finite number, in the order in which a step computes its values.

    Args:
        inputs: The step inputs.
        inspection: The values that the step computed.
        meant: Paths of variables that hold non-finite numbers on purpose.
        batch: The batch.
        layers: The outputs of layers.
        variables: Values, gradients and updates of variables.
    """

    def __init__(
        self,
        inputs: StepInputs,
        inspection: StepInspection,
        meant: frozenset[str],
        batch: tuple[Numbers, ...],
        layers: tuple[Numbers, ...],
        variables: tuple[Variable, ...],
    ) -> None:
        self._inputs, self._inspection = inputs, inspection
        self._batch, self._layers = batch, layers
        self._variables = [v for v in variables if v.path not in meant]

    def describe(self) -> str:
        """Return the origin, as a sentence."""
        values = [Numbers.of(name, x) for name, x in self._inspection.values.items()]
        gradients = [v.gradient for v in self._variables if v.gradient is not None]
        in_order = (
            (first_bad([v.value for v in self._variables]), self._before),
            (first_bad(self._batch), self._in_batch),
            (first_bad(self._layers), self._in_layer),
            (first_bad(values), self._in_value),
            (first_bad(gradients), self._in_gradient),
            (first_bad([v.update for v in self._variables]), self._in_update),
        )
        for bad, sentence in in_order:
            if bad is not None:
                return f"first non-finite value: {sentence(bad)}"
        return "all values are finite: batch, activations, returned values, gradients, updates"

    def _before(self, bad: Numbers) -> str:
        step, changed = self._inputs.step, self._inputs.changed
        what = f"{_count(bad)} of {bad.path}, before step {step} began"
        if changed is not None and bad.path in changed:
            return (
                f"{what}, but not when step {step - 1} ended: a hook or the script set it between "
                "the two steps"
            )
        return (
            f"{what}: an earlier step set it. --bisect 'not isfinite({bad.path})' finds that step"
        )

    def _in_batch(self, bad: Numbers) -> str:
        return f"{_count(bad)} of {bad.path} of the batch{self._rows(bad)}"

    def _in_layer(self, bad: Numbers) -> str:
        kind = self._inspection.layers.get(layer_of(bad.path), "a layer")
        return (
            f"{_count(bad)} of the output of {bad.path} ({kind}){self._rows(bad)}, while its "
            "variables, the batch and the layers before it are finite"
        )

    def _in_value(self, bad: Numbers) -> str:
        return (
            f"{bad.path}, which train_step returned, while all activations are finite: check how "
            "it is computed from them"
        )

    def _in_gradient(self, bad: Numbers) -> str:
        return (
            f"{_count(bad)} of the gradient of {bad.path}, while the loss is finite: look for a "
            "root, a norm or a power at zero, or a where whose other branch is not finite"
        )

    def _in_update(self, bad: Numbers) -> str:
        return (
            f"{_count(bad)} of the update of {bad.path}, while its gradient is finite: check the "
            "optimizer, and the step's other assignments"
        )

    def _rows(self, bad: Numbers) -> str:
        examples = self._inputs.window.examples
        if not bad.rows or not bad.shape or bad.shape[0] != examples:
            return ""
        of_data = self._inputs.rows
        found = f", row{'s' if len(bad.rows) > 1 else ''} {short_list(bad.rows)}"
        if of_data is None:
            return found
        rows = tuple(of_data[row] for row in bad.rows)
        return f"{found} (of the data set: {short_list(rows)})"


def _count(bad: Numbers) -> str:
    return f"{bad.not_finite} of {prod(bad.shape)} numbers"
