"""The private parts of Keras that Treadle uses are there, and are what they were."""

import inspect
import re
from pathlib import Path

import keras
import pytest

from treadle.core import keras_internals
from treadle.errors import BackendError, TreadleWarning

SOURCES = Path(keras_internals.__file__).parents[1]

# What Treadle calls, with the parameters that it was written for.
SIGNATURES = {
    "get_stateless_scope": "()",
    "in_stateless_scope": "()",
    "KerasVariable": "(initializer, shape=None, dtype=None, trainable=True, autocast=True, "
    "aggregation='none', synchronization='auto', name=None, layout=None, **kwargs)",
    "LossFunctionWrapper": "(fn, reduction='sum_over_batch_size', name=None, dtype=None, **kwargs)",
    "SerializableDict": "(**config)",
}
MEMBERS = {
    "global_state": ["get_global_attribute", "set_global_attribute"],
    "seed_generator": ["GLOBAL_SEED_GENERATOR", "draw_seed", "global_seed_generator"],
    "rng_utils": ["GLOBAL_RANDOM_SEED", "get_random_seed"],
    "module_utils": ["tensorflow"],
}


def test_each_is_checked_here() -> None:
    assert {*SIGNATURES, *MEMBERS} == {*keras_internals.INTERNALS}


@pytest.mark.parametrize("name", SIGNATURES)
def test_takes_what_it_took(name: str) -> None:
    found = str(inspect.signature(getattr(keras_internals, name)))
    assert found == SIGNATURES[name], f"keras.src changed: see the uses of keras_internals.{name}"


@pytest.mark.parametrize("name", MEMBERS)
def test_has_what_it_had(name: str) -> None:
    found = getattr(keras_internals, name)
    missing = [member for member in MEMBERS[name] if not hasattr(found, member)]
    assert not missing, f"keras.src changed: see the uses of keras_internals.{name}"


def test_nothing_else_reads_private_parts_of_keras() -> None:
    """Apart from the parts of one backend, in its own package."""
    found = [
        f"{path.relative_to(SOURCES)}:{number}"
        for path in SOURCES.rglob("*.py")
        if path.name != "keras_internals.py"
        and path.parent.parent.name != "backends"
        and "capture" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"(from|import) keras\.src|keras\.src\.\w+", line)
    ]
    assert found == []


def test_what_is_missing_is_an_error_that_names_it() -> None:
    message = (
        f"Keras {keras.__version__} has no keras.src.backend.common.gone, which Treadle needs "
        "(for a reason): install a version that it was tested with, keras==3.15.*"
    )
    with pytest.raises(BackendError, match=re.escape(message)):
        keras_internals.resolve("keras.src.backend.common:gone", "for a reason")
    with pytest.raises(BackendError, match=r"has no keras\.src\.gone, which"):
        keras_internals.resolve("keras.src.gone", "for a reason")
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        keras_internals.unknown  # noqa: B018


def test_a_newer_version_gives_one_warning(recwarn: pytest.WarningsRecorder) -> None:
    message = "Keras 3.99.0 is newer than the versions that Treadle was tested with (up to 3.15)"
    with pytest.warns(TreadleWarning, match=re.escape(message)):
        keras_internals.warn_if_untested("3.99.0")
    with pytest.warns(TreadleWarning, match=r"Keras 3\.16rc1 is newer"):
        keras_internals.warn_if_untested("3.16rc1")
    keras_internals.warn_if_untested(keras.__version__)
    keras_internals.warn_if_untested("3.14.2")
    assert len(recwarn) == 0
