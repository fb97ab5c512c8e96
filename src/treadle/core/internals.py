"""Entries of the registers of private names: parts of other libraries that may change any time.

Each package has one register: `core/keras_internals.py` for Keras, `backends/<name>/patches.py` for
a framework and for Keras' backend of that name. `tests/core/test_keras_internals.py` and
`tests/conformance/test_patches.py` compare each entry with the installed version.

An entry says what it is needed for. If the installed version does not have it, or has it with other
parameters, only an entry of need `core` is an error wherever it is used. A `feature` that is asked
for by name is an error too. Otherwise training continues, and a warning says once what is lost.
"""

import importlib
import inspect
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..errors import BackendError, TreadleWarning

TESTED = {"keras": "3.15", "tensorflow": "2.21", "jax": "0.10", "torch": "2.13"}
"""The newest version of each package that the tests run with, as major.minor."""

TITLES = {"keras": "Keras", "tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}

switched_off: dict[str, None] = {}
"""The warnings about missing entries so far in this process, in order."""


def warn_once(sentence: str) -> None:
    """Warn that something is switched off, once in a process."""
    if sentence not in switched_off:
        switched_off[sentence] = None
        warnings.warn(sentence, TreadleWarning, stacklevel=4)


@dataclass(frozen=True, slots=True, eq=False)  # found by identity: hashing all texts takes longer
class Internal:
    """A private part of a library, or a public one that is patched.

    Attributes:
        places: Where it is, in the newest version first: each a module, `module:name` or
            `module:name.attribute`.
        reason: Why Treadle uses or patches it, with a link to an issue about it, if there is one.
        signatures: The parameters with which the use or the patch works; empty if it is not called,
            or if its signature cannot be read.
        members: The names that are used of it.
        lost: What is lost without it, as a clause that follows "so"; empty for need `core`.
        loses: What kind of thing that is.
        holder: Returns the object that has it, if only an object of a public class leads there; the
            place then is how it is called.
    """

    places: tuple[str, ...]
    reason: str
    signatures: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    lost: str = ""
    loses: Literal["feature", "speed", "comfort"] = "feature"
    holder: Callable[[], Any] | None = None

    @property
    def need(self) -> Literal["core", "feature", "speed", "comfort"]:
        """What it is needed for."""
        return self.loses if self.lost else "core"

    def get(self) -> Any:
        """Import it; None, and one warning in a process, if the installed version lacks it.

        Raises:
            BackendError: It is missing, and its need is `core`.
        """
        if self.lost and (fault := self.missing()):
            warn_once(fault)
            return None
        return self.resolve()

    def resolve(self) -> Any:
        """Import it.

        Raises:
            BackendError: The installed version of the library does not have it.
        """
        found = _found(self)
        if isinstance(found, str):
            package = _package(self)
            raise BackendError(
                f"{found}: install a version that Treadle was tested with, {package}=="
                f"{TESTED[package]}.*"
            )
        holder, name = found
        return getattr(holder, name) if name else holder

    def missing(self) -> str:
        """Return the sentence about it if the installed version lacks it, else an empty string."""
        found = _found(self)
        return found if isinstance(found, str) else ""

    @contextmanager
    def replaced(self, replacement: Any) -> Generator[Any]:
        """Patch it in this context, which gets the original; do nothing if it is missing.

        Raises:
            BackendError: It is missing, and its need is `core`.
        """
        original = self.get()
        if original is None:
            yield None
            return
        holder, name = _found(self)
        own = [replacement]  # in a list of its own, which `is` finds again
        with _lock:
            original = getattr(holder, name)
            layers = _patches.setdefault((id(holder), name), [[original]])
            layers.append(own)
            setattr(holder, name, replacement)
        try:
            yield original
        finally:
            with _lock:
                # Patches of several threads may end in another order than they began.
                layers[:] = [layer for layer in layers if layer is not own]
                setattr(holder, name, layers[-1][0])
                if len(layers) == 1:
                    del _patches[id(holder), name]


_lock = threading.Lock()
_patches: dict[tuple[int, str], list[list[Any]]] = {}
"""By holder and name: the original and its replacements, in the order in which they began."""


_places: dict[Internal, tuple[Any, str]] = {}


def _found(internal: Internal) -> Any:
    """Return the module or class that holds an entry, and its name there, or why it is missing.

    A place is kept, since eager steps on PyTorch patch about 15 entries each. A fault is not:
    another library may have replaced the part for a while.
    """
    if internal in _places:
        return _places[internal]
    faults: list[str] = []
    for place in internal.places:
        module, _, path = place.partition(":")
        *classes, name = path.split(".")
        try:
            holder: Any = internal.holder and internal.holder()
            if holder is None:
                holder = importlib.import_module(module)
                for each in classes:
                    holder = getattr(holder, each)
            found = getattr(holder, name) if name else holder
        except Exception:  # private modules of a framework may raise anything when imported
            faults.append(f"has no {place.replace(':', '.')}")
            continue
        faults.append(difference(internal, found, place))
        if not faults[-1]:
            return _places.setdefault(internal, (holder, name))
    # The fault of the place that exists says more than that the others do not.
    fault = next((x for x in faults if not x.startswith("has no")), faults[0])
    package = _package(internal)
    version = importlib.import_module(package).__version__
    if internal.lost:
        return f"{TITLES[package]} {version} {fault}, so {internal.lost}"
    return f"{TITLES[package]} {version} {fault}, which Treadle needs ({internal.reason})"


def difference(internal: Internal, found: Any, place: str) -> str:
    """Return how an object differs from an entry, as a clause; empty if it does not."""
    name = place.replace(":", ".")
    if without := [member for member in internal.members if not hasattr(found, member)]:
        return f"has no {', '.join(f'{name}.{member}' for member in without)}"
    if not internal.signatures:
        return ""
    try:
        takes = _parameters(found)
    except (ValueError, TypeError):  # it is written in C
        takes = "()"
    return "" if takes in internal.signatures else f"has {name}{takes} with other parameters"


def _parameters(function: Any) -> str:
    """Return a function's parameters with their defaults, without annotations."""
    empty = inspect.Signature.empty
    found = inspect.signature(function)
    parameters = [x.replace(annotation=empty) for x in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=empty))


def _package(internal: Internal) -> str:
    return internal.places[0].partition(":")[0].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Attributes:
    """Private attributes of a library's objects, which Treadle reads where it needs them.

    Attributes:
        names: The attributes.
        module: The module, or the package, that sets them.
        reason: Why Treadle uses them.
    """

    names: tuple[str, ...]
    module: str
    reason: str


def in_this_thread(function: Any, original: Any) -> Any:
    """Return `function` in this thread, and `original` in others, which may be reading data."""
    if not callable(function):
        return function
    thread = threading.get_ident()

    def choose(*args: Any, **kwargs: Any) -> Any:
        chosen = function if threading.get_ident() == thread else original
        return chosen(*args, **kwargs)

    return choose


@contextmanager
def wrapped(
    replacements: Mapping[Internal, Callable[..., Any]], required: bool = False
) -> Generator[None]:
    """Replace functions in this context, in this thread.

    Args:
        replacements: Functions that take the original one and its arguments.
        required: Raise an error if one is missing, instead of leaving it out.

    Raises:
        BackendError: One is missing that is required, or of need `core`.
    """
    with ExitStack() as stack:
        for internal, replacement in replacements.items():
            original = internal.resolve() if required else internal.get()
            if original is None:
                continue
            # A function, since a `partial` in a class would not be a method.
            patched = in_this_thread(partial(replacement, original), original)
            stack.enter_context(internal.replaced(patched))
        yield
