"""Conditions as texts: what they mean, and that nothing else is one."""

from typing import Any

import numpy as np
import pytest

from treadle.doctor.conditions import parse
from treadle.errors import ConfigurationError

VALUES: dict[str, Any] = {
    "loss": 6.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "a/kernel": np.array([[3.0, -4.0]], "float32"),
    "a/bad": np.array([0.0, np.nan]),
    "rate": np.array([0.1]),
    "val-loss.b": 1.0,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("loss > 5", True),
        ("loss>5", True),
        ("5 < loss", True),
        ("loss <= 6", True),
        ("loss < 6", False),
        ("loss >= 6.0e0", True),
        ("loss == 6", True),
        ("loss != 6", False),
        ("loss > -1e-3", True),
        ("loss < inf", True),
        ("nan > 0", False),
        ("nan != nan", True),
        ("loss != loss", False),
        ("isnan(nan)", True),
        (" isnan( loss ) ", False),
        ("isinf(inf)", True),
        ("isfinite(inf)", False),
        ("not isfinite(a/bad)", True),
        ("not isnan(a/bad)", False),
        ("isnan(a/bad)", True),
        ("norm(a/kernel) > 4.99", True),
        ("norm(a/kernel) > 5.01", False),
        ("norm(a/kernel) > rate", True),
        ("rate > 0.05", True),
        ("val-loss.b > 0", True),
    ],
)
def test_conditions_have_the_documented_meaning(text: str, holds: bool) -> None:
    assert parse(text).holds(VALUES) is holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss",
        "loss >",
        "> 5",
        "loss = 5",
        "loss > 5 > 4",
        "3 > 2",
        "inf == inf",
        "isnan(loss) == 1",
        "isodd(loss)",
        "isnan()",
        "max(loss) > 3",
        "loss > 5 and loss < 6",
        "__import__('os').system('true') > 1",
        "loss + 1 > 5",
    ],
)
def test_invalid_conditions_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the condition .* as in 'loss > 5'"):
        parse(text)


def test_an_array_is_no_number() -> None:
    message = r"a/kernel is an array of shape \(1, 2\), so .*: write norm\(a/kernel\)"
    with pytest.raises(ConfigurationError, match=message):
        parse("a/kernel > 1").holds(VALUES)
