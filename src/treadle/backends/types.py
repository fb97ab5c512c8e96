"""Names for the values of all frameworks."""

from typing import Any

Variable = Any  # a keras.Variable, or the framework's own variable in a native task
Tensor = Any
Losses = dict[str, Tensor]
