"""`scripts/same-bits`: what it finds. One run of a recipe takes 20 processor seconds: long."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import same_bits
from tests.range.jobs import ROOT


def directory(folder: Path, values: list[float], **arrays: np.ndarray) -> Path:
    folder.mkdir()
    lines = [
        json.dumps({"step": i, "loss": x, "seconds": len(values)}) for i, x in enumerate(values)
    ]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    save_file(arrays, folder / "state.safetensors")
    return folder


def test_what_differs_is_named(tmp_path: Path) -> None:
    zeros, ones = np.zeros(2, "float32"), np.ones(2, "float32")
    other = directory(tmp_path / "other", [0.5, float("nan")], w=zeros, b=ones)
    again = directory(tmp_path / "again", [0.5, float("nan")], w=zeros, b=ones)
    assert not list(same_bits.differences(other, again))
    this = directory(tmp_path / "this", [0.5, 0.25, 1.0], w=ones, c=ones)
    assert list(same_bits.differences(other, this)) == [
        "line 2 of the log: loss was nan, now 0.25",
        "the log had 2 lines, now 3",
        "b is only in the earlier state",
        "c is only in the present state",
        "w differs",
    ]


@pytest.mark.long
def test_a_checkout_has_the_bits_of_itself() -> None:
    assert not same_bits.compared("digits", "torch", ROOT)
