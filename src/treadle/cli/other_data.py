"""The data of `treadle evaluate --data FILE.py:FUNCTION`, instead of those of the task."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigurationError, did_you_mean
from ..recipes._reading import read_file


@dataclass(frozen=True)
class OtherData:
    """A function that returns data, which `parse` has found in a file without executing it.

    Attributes:
        path: The file.
        function: The name of the function.
    """

    path: Path
    function: str

    @classmethod
    def parse(cls, text: str) -> "OtherData":
        """Return the function that `FILE.py:FUNCTION` names.

        Raises:
            ConfigurationError: If the text has another form, or there is no such file or function.
        """
        file, _, name = text.rpartition(":")
        if not file.endswith(".py") or not name:
            raise ConfigurationError(
                f"--data takes FILE.py:FUNCTION, not {text!r}: name a function without arguments "
                "that returns batches, such as treadle.data.from_arrays(x, y, batch_size=32)"
            )
        path = Path(file).expanduser().absolute()
        found = read_file(path)
        if name not in found:
            raise ConfigurationError(
                f"--data: {path} has no function {name!r}.{did_you_mean(name, found)}"
            )
        return cls(path, name)

    def sets(self) -> dict[str, Any]:
        """Execute the file, call the function, and return the data sets by name; imports Keras.

        The file of the task is not executed again: it may call `treadle.setup` or register classes.
        A dict of data sets has the names `FUNCTION/KEY`, a single one the name `FUNCTION`.

        Raises:
            ConfigurationError: If it is no function, or it returned no data.
        """
        from ..recipes._loading import imported, imported_before  # late: it imports Keras

        module = imported_before(self.path) or imported(self.path)
        made: Any = getattr(module, self.function)
        if not inspect.isroutine(made):
            raise ConfigurationError(
                f"--data: {self.function} in {self.path} is of type {type(made).__name__}, and "
                "not a function: name a function without arguments that returns batches"
            )
        found = made()
        if found is None or (isinstance(found, Mapping) and not found):
            raise ConfigurationError(
                f"--data: {self.function}() in {self.path} returned no data, but {found!r}: return "
                "batches, or a dict of data sets by name"
            )
        if isinstance(found, Mapping):
            parts = cast(Mapping[Any, Any], found)
            return {f"{self.function}/{name}": part for name, part in parts.items()}
        return {self.function: found}
