"""Entries of the registers of private names: parts of other libraries that may change any time.

Each package has one register: `core/keras_internals.py` for Keras, `backends/<name>/patches.py` for
a framework and for Keras' backend of that name. `tests/test_keras_internals.py` and
`tests/conformance/test_patches.py` compare each entry with the installed version.
"""

import importlib
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ..errors import BackendError

TESTED = {"keras": "3.15", "tensorflow": "2.21", "jax": "0.10", "torch": "2.13"}
"""The newest version of each package that the tests run with, as major.minor."""

KERAS = "https://github.com/keras-team/keras/blob/master/keras/src"
_TITLES = {"keras": "Keras", "tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}


@dataclass(frozen=True, slots=True)
class Internal:
    """A private part of a library, or a public one that is patched.

    Attributes:
        place: A module, `module:name` or `module:name.attribute`.
        reason: Why Treadle uses or patches it.
        upstream: A link to its source, or to an issue about it.
        signature: Its parameters, which the use or the patch was written for; empty if it is not
            called, or if its signature cannot be read.
        members: The names that are used of it.
    """

    place: str
    reason: str
    upstream: str
    signature: str = ""
    members: tuple[str, ...] = ()

    def resolve(self) -> Any:
        """Import it.

        Raises:
            BackendError: The installed version of the library does not have it.
        """
        holder, name = _holder(self)
        try:
            return getattr(holder, name) if name else holder
        except AttributeError as error:  # removed since it was looked up
            raise _missing(self) from error

    @contextmanager
    def replaced(self, replacement: Any) -> Generator[Any]:
        """Patch it in this context, which gets the original.

        Raises:
            BackendError: The installed version of the library does not have it.
        """
        holder, name = _holder(self)
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


@cache
def _holder(internal: Internal) -> tuple[Any, str]:
    """Return the module or class that holds an entry, and its name there.

    Kept, since eager steps on PyTorch patch about 15 entries each.

    Raises:
        BackendError: The installed version of the library does not have it.
    """
    module, _, path = internal.place.partition(":")
    *classes, name = path.split(".")
    try:
        holder: Any = importlib.import_module(module)
        for each in classes:
            holder = getattr(holder, each)
        if name:
            getattr(holder, name)
    except (ImportError, AttributeError) as error:
        raise _missing(internal) from error
    return holder, name


def _missing(internal: Internal) -> BackendError:
    package = internal.place.partition(":")[0].partition(".")[0]
    version = importlib.import_module(package).__version__
    return BackendError(
        f"{_TITLES[package]} {version} has no {internal.place.replace(':', '.')}, "
        f"which Treadle needs ({internal.reason}): install a version that it was tested with, "
        f"{package}=={TESTED[package]}.*"
    )


@dataclass(frozen=True, slots=True)
class Attribute:
    """A private attribute of a library's objects, which Treadle reads where it needs it.

    Attributes:
        owner: The objects that have it.
        reason: Why Treadle uses it.
        upstream: A link to the source that sets it.
    """

    owner: str
    reason: str
    upstream: str


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
def wrapped(replacements: Mapping[Internal, Callable[..., Any]]) -> Generator[None]:
    """Replace functions in this context, in this thread.

    Args:
        replacements: Functions that take the original one and its arguments.
    """
    with ExitStack() as stack:
        for internal, replacement in replacements.items():
            original = internal.resolve()
            # A function, since a `partial` in a class would not be a method.
            patched = in_this_thread(partial(replacement, original), original)
            stack.enter_context(internal.replaced(patched))
        yield
