"""Search spaces: what they contain, and how they are read from texts and signatures."""

import textwrap
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest

import treadle
from tests.tune_searches import apart  # noqa: F401
from treadle.core.ranges import Choice, Range, fitted
from treadle.errors import ConfigurationError
from treadle.recipes import Parameter, resolve
from treadle.tuning import space


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Range(512, 64), "Range(low=512, high=64, log=False, step=None): the first bound"),
        (lambda: Range(3, 3), "3 is not less than 3"),
        (lambda: Range(0, 1, log=True), "a range with log=True must begin above 0, not at 0"),
        (lambda: Range(1, 9, log=True, step=2), "has either log=True or a step, not both"),
        (lambda: Range(1, 9, step=0), "a range needs a step > 0"),
        (lambda: Range(1, float("inf")), "inf is not a finite number"),
        (lambda: Range("1", 2), "'1' is not a finite number"),
        (
            lambda: Choice("relu"),
            "Choice('relu'): a choice is between two or more different values",
        ),
        (lambda: Choice(1, 1), "two or more different values"),
        (lambda: Choice(1, True), "Choice(1, True): a choice is between two or more different"),
        (lambda: Choice([1], 2), "[1] is neither a number nor a text"),
        (lambda: fitted("units", Range(0.5, 2), (int,), "int"), "its range 0.5..2 needs whole"),
        (lambda: fitted("name", Range(1, 2), (str,), "str"), "name is of type str, which has no"),
        (lambda: fitted("units", Choice(1, "x"), (int,), "int"), "of type int, which 'x' is not"),
    ],
)
def test_spaces_that_cannot_be_meant(make, message):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert message in str(caught.value)


def test_what_a_space_holds():
    assert 8 in Range(8, 64) and 64 in Range(8, 64) and 65 not in Range(8, 64)
    assert Range(8, 64, step=10).last == 58 and Range(0.0, 1.0, step=0.1).last == 1.0
    assert 18 in Range(8, 64, step=10) and 20 not in Range(8, 64, step=10)
    assert True not in Range(0, 2) and "8" not in Range(8, 64)
    assert 1 in Choice(1, 2) and True not in Choice(1, 2)
    assert fitted("rate", Range(1, 8, step=2), (float, None), "float | None").step == 2.0


PARAMETERS = (
    Parameter("units", "int", (int,), 16),
    Parameter("rate", "float", (float,), 0.1),
    Parameter("kind", "str", (str,), "a"),
    Parameter("bias", "bool", (bool,), True),
)


@pytest.mark.parametrize(
    "text", ["units=64..512 log", "units=64..512 step 64", "rate=0.5..1.5", "kind=a,b", "units=1,2"]
)
def test_a_search_is_read_as_it_is_told(text):
    [(name, found)] = space.read([text], PARAMETERS, "Mine").items()
    assert f"{name}={found}" == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("units", "cannot read the search 'units': write it as 'units=64..512 log'"),
        ("units=64..", "cannot read the search 'units=64..'"),
        ("units=1..2 lgo", "cannot read the search"),
        ("units=1..9 step", "cannot read the search"),
        ("unit=1..2", "Mine has no setting 'unit'. Did you mean 'units'?"),
        ("units=a,b", "units=a: expected int, found 'a'"),
        ("units=2..1", "2 is not less than 1"),
    ],
)
def test_a_search_that_cannot_be_read(text, message):
    with pytest.raises(ConfigurationError) as caught:
        space.read([text], PARAMETERS, "Mine")
    assert message in str(caught.value)


def test_what_is_searched_is_what_is_not_fixed():
    found = space.chosen(PARAMETERS, {"rate": Range(1, 2)}, {}, "Mine")
    assert found == {"rate": Range(1.0, 2.0)}  # a bare bool is a switch
    asked = {"bias": Choice(False, True), "rate": Range(1, 2)}
    assert list(space.chosen(PARAMETERS, asked, {"units": 3}, "Mine")) == ["rate", "bias"]
    assert space.read(["bias=no,yes"], PARAMETERS, "Mine") == {"bias": Choice(False, True)}


@pytest.mark.parametrize(
    ("wanted", "fixed", "message"),
    [
        ({}, {"bias": True}, "Mine has no search space: annotate a setting, as `units: "),
        ({}, {"bias": True}, "Settings that are not fixed: units, rate, kind"),
        ({"unit": Range(1, 2)}, {}, "Mine has no setting 'unit'. Did you mean 'units'?"),
        ({}, {"rates": 1}, "Mine has no setting 'rates'. Did you mean 'rate'?"),
        ({"units": Range(1, 2)}, {"units": 3}, "units is both searched (1..2) and fixed (3)"),
        ({"units": (1, 2)}, {}, "(1, 2), which is neither a treadle.Range nor a treadle.Choice"),
    ],
)
def test_a_search_that_cannot_be_meant(wanted, fixed, message):
    with pytest.raises(ConfigurationError) as caught:
        space.chosen(PARAMETERS, wanted, fixed, "Mine")
    assert message in str(caught.value)


ANNOTATED = """
    raise SystemExit("this file must not be run")
    from typing import Annotated, Literal
    import treadle
    from treadle import Choice

    class Mine(treadle.Task):
        def __init__(
            self,
            units: Annotated[int, treadle.Range(64, 512, log=True)] = 64,
            rate: "Annotated[float | None, 'documented', treadle.Range(1e-4, 1)]" = None,
            kind: Annotated[str, Choice("a", "b")] = "a",
            depth: Literal[1, 2] = 1,
            bias: bool = True,
            fast: Annotated[bool, Choice(False, True)] = True,
            name: str = "x",
        ): ...
"""


def test_spaces_are_read_without_running_the_file():
    Path("mine.py").write_text(textwrap.dedent(ANNOTATED))
    recipe = resolve("mine.py")
    assert {p.name: p.space and str(p.space) for p in recipe.parameters} == {
        "units": "64..512 log",
        "rate": "0.0001..1.0",
        "kind": "a,b",
        "depth": "1,2",
        "bias": None,
        "fast": "False,True",
        "name": None,
    }
    # A range is what is searched; what is set may lie outside.
    assert recipe.settings(["units=8", "rate=7", "kind=c"])["units"] == 8
    assert [str(p) for p in recipe.parameters[:2]] == ["units=64", "rate=None"]
    assert recipe.parameters[0].kind == "int"


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ("Annotated[int, treadle.Range(512, 64)]", "units: Range(low=512, high=64"),
        ("Annotated[str, treadle.Range(1, 2)]", "units is of type str, which has no range"),
        ("Annotated[int, treadle.Range(LOW, 64)]", "units: cannot read treadle.Range(LOW, 64), si"),
        ("Annotated[int, treadle.Range(1)]", "units: cannot read treadle.Range(1)"),
    ],
)
def test_spaces_in_a_file_that_cannot_be_meant(annotation, message):
    text = f"class Mine(treadle.Task):\n    def __init__(self, units: {annotation} = 64): ..."
    Path("mine.py").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        resolve("mine.py")
    assert message in str(caught.value)


def test_spaces_of_a_function_are_those_of_its_file():
    class Mine:
        def __init__(
            self,
            units: Annotated[int, treadle.Range(64, 512, log=True)],
            rate: Annotated[float | None, treadle.Range(1e-4, 1)] = None,
            depth: Literal[1, 2] = 1,
            bias: bool = True,
            untyped=3,
            **more: int,
        ) -> None: ...

    found = space.parameters_of(Mine)
    assert [(p.name, p.kind, p.required) for p in found] == [
        ("units", "int", True),
        ("rate", "float | None", False),
        ("depth", "Literal[1, 2]", False),
        ("bias", "bool", False),
        ("untyped", "int", False),
    ]
    assert list(map(str, (p.space for p in found))) == [
        "64..512 log",
        "0.0001..1.0",
        "1,2",
        "None",
        "None",
    ]


def test_annotations_that_cannot_be_looked_up():
    def line(rate: "Missing" = 1): ...  # noqa: F821

    with pytest.raises(ConfigurationError) as caught:
        space.parameters_of(line)
    assert "cannot read the annotations of test_annotations_that_cannot_be_looked_up.<loc" in str(
        caught.value
    )
    assert "name 'Missing' is not defined. Import it outside of `if TYPE_CHECKING`" in str(
        caught.value
    )


def test_what_is_called_by_a_partial_says_what_is_tried():
    def line(units: Annotated[int, Range(1, 3)], rate: float): ...

    bound = partial(line, rate=0.5)
    assert [(p.name, p.required, str(p.space)) for p in space.parameters_of(bound)] == [
        ("units", True, "1..3"),
        ("rate", False, "None"),
    ]
    assert space.name_of(bound) == line.__qualname__
