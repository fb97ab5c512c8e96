"""The library does not grow unnoticed: each count of its source text has a limit."""

import ast

import pytest

import treadle
from tests import size


def test_no_count_of_the_source_is_above_its_limit():
    counts = size.of_source()
    assert {*counts} == {*size.LIMITS, *size.LEAST}
    above = {
        name: (counts[name], most) for name, most in size.LIMITS.items() if counts[name] > most
    }
    below = {
        name: (counts[name], least) for name, least in size.LEAST.items() if counts[name] < least
    }
    assert not above, f"above the limits in {size.__file__}: {above} (found, limit)"
    assert not below, f"below the least in {size.__file__}: {below} (found, least)"


def test_lines_of_code_are_counted_without_docstrings_comments_and_blank_lines():
    text = '"""Text.\n\nMore.\n"""\n\nx = 1  # why\n# a comment\n\n'
    text += 'def f():\n    """Text."""\n    return (\n        x\n    )\n'
    docstrings = size._docstring_lines(ast.parse(text))
    assert docstrings == {1, 2, 3, 4, 10}
    assert size._code_lines(text, docstrings) == {6, 9, 11, 12, 13}


def test_members_are_public_methods_and_attributes():
    tree = ast.parse("class A:\n def f(self): self.x = self._y = 1\n def _g(self): self.z.w = 2")
    assert size._members(tree, "A") == {"f", "x"}


@pytest.mark.parametrize("limits", size.LIMITS_OF_RUNS.values(), ids=size.LIMITS_OF_RUNS)
def test_each_count_of_a_run_has_a_limit_for_each_backend(limits):
    assert {*limits} == {*size.BACKENDS} and all(limits.values())


def test_only_functions_of_the_library_are_counted_each_with_its_calls():
    found = size.called(lambda: [dir(treadle) for _ in range(3)])
    counts = {name: count for (_, name, _), count in found.items() if "<" not in name}
    assert counts == {"__dir__": 3}
