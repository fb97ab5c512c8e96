"""Every case on this backend: compiled as eager, and the same bits in windows of any size."""

from typing import Any

import pytest
import runs
from cases import CASES, batches_of

from treadle.testing.trace import Tolerance, compare


# What XLA compiled is also compared with the other backends (test_across_backends.py). PyTorch, one
# of them, runs all of these, and each compiler half of them.
@pytest.mark.parametrize("name", runs.shared(every=2))
def test_compiled_is_close_to_eager(name: str) -> None:
    tolerance = Tolerance(rtol=CASES[name].rtol, atol=1e-6)
    compiled, eager = runs.compiled(name), runs.eager(name)
    compare(compiled, eager, "compiled", "run eagerly", tolerance)
    assert compiled.changed == eager.changed


def windows() -> list[Any]:
    """Each case in mixed windows, and each tenth in 2s and in 7s; the others with `--all`.

    A case compiles a program for each size of window.
    """
    return [
        pytest.param(
            name,
            sizes,
            id=f"{name}-{sizes}",
            marks=runs.marks(name, every=1 if sizes == runs.MIXED else 5),
        )
        for name in CASES
        for sizes in runs.PARTITIONS
    ]


@pytest.mark.parametrize(("name", "sizes"), windows())
def test_windows_agree_bit_for_bit(name: str, sizes: tuple[int, ...]) -> None:
    compare(
        runs.compiled(name, sizes),
        runs.compiled(name),
        f"in windows of {sizes}",
        "in single steps",
        tolerance=None,
    )


@pytest.mark.parametrize("name", runs.cases(n for n in CASES if CASES[n].phases))
def test_checking_phases_changes_nothing(name: str) -> None:
    compare(
        runs.runner(name, checked=True).run(batches_of(name, runs.STEPS)),
        runs.compiled(name),
        "checked",
        "unchecked",
        Tolerance(rtol=1e-5, atol=1e-7),
    )


@pytest.mark.parametrize("name", runs.cases())
def test_losses_fall_or_at_least_stay_finite(name: str) -> None:
    for values in runs.compiled(name).values.values():
        assert values.shape == (runs.STEPS,)
        assert (abs(values.astype(float)) < 1e3).all()
