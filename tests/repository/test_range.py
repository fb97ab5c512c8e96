"""`scripts/range` and its check of names: what they report, and jobs on older versions of Keras.

The jobs take 45 processor seconds by default, with the backends in turn: importing Keras and its
backend, once for each of three, takes 15 of them.
"""

import ast
import re
import signal
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
from keras_versions import needs_keras

from tests.range import __main__ as ranges
from tests.range import jobs, names, sources, versions
from treadle.core import keras_internals
from treadle.core.internals import Attributes, Internal

FAKE = {
    "keras/__init__.py": "from keras import ops as ops\nfrom keras.src.backend import Variable",
    "keras/api/layers/__init__.py": "from keras.src.layer import Dense",
    "keras/ops/__init__.py": "from keras.src.ops import add",
    "keras/src/__init__.py": "",
    "keras/src/backend/__init__.py": """
        if backend() == "jax":
            from keras.src.backend.jax import *
        elif backend() == "torch":
            from keras.src.backend.torch import *
        class Variable(BackendVariable):
            pass
    """,
    "keras/src/backend/jax/__init__.py": "from keras.src.backend.jax.core import BackendVariable",
    "keras/src/backend/jax/core.py": """
        class BackendVariable:
            def __init__(self, value, *, layout: int = None):
                self._value = value
    """,
    "keras/src/backend/torch/__init__.py": """
        import torch
        from keras.src.backend.torch import core
        class BackendVariable:
            def __init__(self, value, **kwargs):
                if kwargs:
                    raise ValueError(f"unknown: {kwargs}")
    """,
    "keras/src/backend/torch/core.py": "alias = _own\ndef _own(x, *, y: str = 'z') -> int: ...",
    "keras/src/layer.py": """
        class Layer:
            def __init__(self, name=None, **kwargs):
                self.shape = kwargs.pop("input_shape", None)
                if kwargs:
                    raise ValueError
            def call(self, x): ...
        class Dense(Layer):
            def __init__(self, units, **kwargs):
                super().__init__(**kwargs)
    """,
    "keras/src/ops.py": "def add(x1, x2): ...\ndef kept(**kwargs):\n    found = kwargs",
}


@pytest.fixture
def fake(tmp_path):
    """A small package with the shapes that Keras has had."""
    for name, text in FAKE.items():
        path = tmp_path / "keras-9.9.9" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path / "keras-9.9.9"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("TREADLE_TESTS_KERAS", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answered(monkeypatch, errors="", version=None):
    """Let pip fail with a message, or unpack a version."""

    def pip(command, **options):
        if version:
            target = Path(command[command.index("--target") + 1])
            (target / f"keras_nightly-{version}.dist-info").mkdir(parents=True)
        return SimpleNamespace(returncode=int(not version), stderr=errors)

    monkeypatch.setattr(versions.subprocess, "run", pip)


OFFLINE = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'"
NONE = "ERROR: Could not find a version that satisfies the requirement keras (from versions: 3.9.0)"


@pytest.mark.parametrize(
    ("errors", "kind", "message"),
    [
        (OFFLINE, versions.Unreachable, "the package index cannot be reached for Keras 3.12"),
        (NONE, versions.Unknown, "the package index has no Keras 3.12"),
        ("disk full", versions.Unknown, "pip cannot unpack Keras 3.12: disk full"),
    ],
)
def test_why_there_is_no_version(errors, kind, message, cache, monkeypatch):
    answered(monkeypatch, errors)
    found = versions.unpacked(["3.12"])["3.12"]
    assert (type(found), str(found)) == (kind, message)


def test_names_are_found_without_importing(fake):
    jax, torch = sources.Sources(fake, "jax"), sources.Sources(fake, "torch")
    for place in (
        "keras.ops:add",
        "keras.src.backend:Variable",
        "keras.src.layer:Dense.call",
        "keras.src.layer:Layer.shape",
        "keras.layers:Dense",  # in a folder that Keras adds to its path
    ):
        assert jax.find(place) is not None, place
    for place in ("keras.src.gone", "keras.ops:gone", "keras.src.layer:Dense.gone"):
        assert jax.find(place) is None, place
    assert torch.find("keras.src.backend:core.alias") is not None
    assert jax.find("keras.src.backend:core") is not torch.find("keras.src.backend:core")
    assert jax.attribute(jax.find("keras.src.backend:Variable"), "_value") is not None
    assert torch.attribute(torch.find("keras.src.backend:Variable"), "_value") is None


def test_keywords_are_followed_through_base_classes(fake):
    jax, torch = sources.Sources(fake, "jax"), sources.Sources(fake, "torch")
    dense, variable = jax.find("keras.src.layer:Dense"), "keras.src.backend:Variable"
    accepted = {name: jax.accepts(dense, name) for name in ("units", "name", "input_shape", "no")}
    assert accepted == {"units": True, "name": True, "input_shape": True, "no": False}
    assert jax.accepts(jax.find(variable), "layout")
    assert not torch.accepts(torch.find(variable), "layout")
    assert not jax.accepts(jax.find("keras.src.ops:add"), "x3")
    assert jax.accepts(jax.find("keras.src.ops:kept"), "anything")


def test_the_uses_in_a_source_text():
    text = """
        import keras
        from keras import layers, ops as o
        from .keras import no_name_of_keras

        def f(x):
            o.add(x, x2=1)
            layers.Dense(3, name="a", **x).call
            getattr(keras.optimizers, "Muon", None)
            try:
                keras.config.gone()
            except AttributeError:
                pass
            try:
                keras.config.needed(x)
            except ValueError:
                keras.other
            x.keras.none
    """
    found = {
        (name, keyword) for name, keyword, _ in names.uses_of(ast.parse(textwrap.dedent(text)))
    }
    assert found == {
        ("keras.layers", ""),
        ("keras.ops", ""),
        ("keras.ops.add", ""),
        ("keras.ops.add", "x2"),
        ("keras.layers.Dense", ""),
        ("keras.layers.Dense", "name"),
        ("keras.optimizers", ""),
        ("keras.config.needed", ""),
        ("keras.other", ""),
    }


def test_how_an_entry_differs(fake):
    torch = sources.Sources(fake, "torch")
    own, gone = "keras.src.backend.torch.core:_own", "keras.src.gone:f"
    for places, signatures, members, expected in (
        ((own,), ("(x)", "(x, *, y='z')"), (), ""),
        ((own,), ("(x)", "(y)"), (), f"{own} takes (x, *, y='z'), expected (x) or (y)"),
        ((gone, own), (), (), ""),
        ((gone,), (), (), f"{gone} is missing"),
        (("keras.src.ops",), (), ("add", "gone"), "keras.src.ops has no gone"),
        ((gone, "torch:_C"), (), (), ""),  # of a framework, whose version is the installed one
    ):
        assert names.lack(torch, Internal(places, "", signatures, members)) == expected


def test_registers_are_read_without_importing_their_frameworks():
    read = {register: names.entries(register) for register in names.REGISTERS}
    assert list(map(asdict, read["core/keras_internals.py"].values())) == list(
        map(asdict, keras_internals.INTERNALS.values())
    )
    assert all(read.values())


def test_private_names_are_counted_each_once_and_public_ones_not(monkeypatch):
    internals = {
        "module": Internal(
            ("keras.src.a.b", "keras.src.b"), "", members=("c", "d"), lost="it", loses="speed"
        ),
        "again": Internal(("keras.src.a:b.c",), ""),
        "patched": Internal(("keras.losses:Loss.__call__",), ""),
        "method": Internal(("keras:Variable._direct",), ""),
    }
    attributes = {"Variable": Attributes(("_direct", "_value"), "keras.src.a", "")}
    known = {"INTERNALS": internals, "ATTRIBUTES": attributes}
    monkeypatch.setattr(names, "REGISTERS", {"one": (), "two": ()})
    monkeypatch.setattr(names, "contents", lambda register: known)
    assert names.private_names() == {
        "keras.src.a.b.c": "speed",
        "keras.src.a.b.d": "speed",
        "keras: _direct": "core",
        "keras: _value": "attribute",
    }


def test_a_renamed_private_attribute_is_found(tmp_path):
    (tmp_path / "keras" / "src" / "layers").mkdir(parents=True)
    (tmp_path / "keras" / "src" / "layers" / "layer.py").write_text("self._layers = []")
    found = sources.Sources(tmp_path, "torch")
    entry = Attributes(("_layers", "_metrics"), "keras.src.layers.layer", "")
    assert names._unset(found, entry) == "keras.src.layers.layer has no _metrics"
    assert names._unset(found, replace(entry, names=("_layers",), module="keras.src.layers")) == ""


@pytest.fixture
def checked(monkeypatch, capsys):
    """A function that checks names on some versions, and returns the exit code and the output."""

    def check(found, uses=(), entries=None):
        monkeypatch.setattr(versions, "unpacked", lambda chosen: found)
        monkeypatch.setattr(names, "uses", lambda: uses)
        monkeypatch.setattr(names, "entries", lambda register: entries or {})
        monkeypatch.setattr(names, "attributes", lambda answers: [])
        return names.main([]), capsys.readouterr().out.splitlines()

    return check


def test_a_missing_public_name_fails_for_stable_versions_only(checked, fake):
    uses = (
        names.Use("keras.ops.add", "x3", "src/a.py:1"),
        names.Use("keras.gone", "", "src/a.py:2"),
        names.Use("keras.gone", "x", "src/a.py:2"),
    )
    expected = [
        "Keras 9.9.9: no keras.ops.add(…, x3=…), see src/a.py:1",
        "Keras 9.9.9: no keras.gone, see src/a.py:2",
    ]
    assert checked({"9.9": fake}, uses) == (1, expected)
    assert checked({"nightly": fake}, uses) == (0, expected)  # answers come out of the file
    assert checked({"9.9": fake}, uses[:0]) == (0, [])


def test_a_missing_entry_fails_if_the_library_needs_it(checked, fake):
    gone = ("keras.src.ops:gone",)
    found = {"one": Internal(gone, ""), "two": Internal(gone, "", loses="speed", lost="slow")}
    assert checked({"9.9": fake}, entries=found) == (
        1,
        ["Keras 9.9.9: keras.src.ops:gone is missing", "Keras 9.9.9, switched off: two"],
    )
    assert checked({"9.9": fake}, entries={"two": found["two"]}) == (
        0,
        ["Keras 9.9.9, switched off: two"],
    )


def test_names_are_not_checked_without_the_package_index(checked):
    missing = versions.Unreachable("the package index cannot be reached for Keras 3.9.0")
    line = (
        "names of Keras: not checked with 3.9.0, 3.10.0, since the package index cannot be reached"
    )
    assert checked({"3.9.0": missing, "3.10.0": missing}) == (0, [line])
    unknown = versions.Unknown("the package index has no Keras 3.99")
    assert checked({"3.99": unknown}) == (2, [f"names of Keras: {unknown}"])


def test_a_job_that_fails_reports_the_end_of_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "python", lambda: sys.executable)  # it imports nothing
    cell = jobs.Cell(None, "torch", tmp_path)
    with pytest.raises(jobs.Failed) as caught:
        cell.python("-c", "print('last words')\nraise SystemExit(3)")
    assert str(caught.value) == "python -c … ended with 3, expected 0:\nlast words"
    monkeypatch.setattr(jobs, "PATIENCE", 0.1)
    with pytest.raises(jobs.Failed) as caught:
        cell.python("-c", "import time; time.sleep(60)")
    assert str(caught.value) == "python -c import time; time.sleep(60) takes more than 0.1 s"


def test_jobs_that_need_the_run_of_digits_are_not_tried_without_it(tmp_path, monkeypatch):
    def fails(cell):
        raise jobs.Failed("boom")

    done = []
    monkeypatch.setattr(jobs, "JOBS", dict.fromkeys(jobs.JOBS, done.append) | {"digits": fails})
    cell = jobs.Cell(None, "torch", tmp_path)
    jobs.run(cell, list(jobs.JOBS))
    assert cell.failures == {"digits": "boom"} | dict.fromkeys(
        jobs.OF_DIGITS, "needs the run of digits"
    )
    assert len(done) == len(jobs.JOBS) - len(cell.failures)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, float("nan")], "loss has the values [1.0, nan], expected 2 finite ones"),
        ([1.0], "loss has the values [1.0], expected 2 finite ones"),
    ],
)
def test_values_of_a_run_are_finite(values, message, tmp_path):
    (tmp_path / "run").mkdir()
    lines = [f'{{"step": 1, "loss": {str(x).replace("nan", "NaN")}}}\n' for x in values]
    (tmp_path / "run" / "log.jsonl").write_text("".join(lines))
    with pytest.raises(jobs.Failed) as caught:
        jobs._expect_finite(jobs.Cell(None, "torch", tmp_path), "run", "loss", 2)
    assert str(caught.value) == message


@pytest.fixture
def ranged(monkeypatch, capsys, fake):
    """A function that runs the tool with jobs that fail as given, and returns code and output."""

    def run(words, failing=(), found=fake):
        def tests(command, **options):
            text = "FAILED tests/a.py::test_b\n1 failed, 3 passed in 2 s\n"
            bad = "tests" in failing
            return SimpleNamespace(
                returncode=int(bad), stdout=text[0 if bad else 26 :], stderr="last words"
            )

        def fail(cell):
            cell.failures |= dict.fromkeys([x for x in failing if x in jobs.JOBS], "boom")
            cell.switched_off["the LSTM runs cell by cell"] = None

        monkeypatch.setattr(ranges, "run", fail)
        monkeypatch.setattr(ranges.subprocess, "run", tests)
        lacks = ["no keras.gone, see src/a.py:2"] if "names" in failing else []
        monkeypatch.setattr(ranges, "checked", lambda folder: (lacks, []))
        monkeypatch.setattr(versions, "unpacked", lambda wanted: dict.fromkeys(wanted, found))
        code = ranges.main(words)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_the_table_has_a_row_for_each_version(ranged):
    code, text = ranged(["9.9", "--backend", "torch", "--backend", "jax"], ["export", "doctor"])
    assert code == 1
    assert "Keras 9.9.9 on torch: fails: export, doctor (0 s)\n-- export: boom" in text
    assert "| 9.9.9 | fails: export, doctor | fails: export, doctor |" in text
    assert "- 9.9.9 on PyTorch, 9.9.9 on JAX: the LSTM runs cell by cell\n" in text
    assert "| 9.9.9 | fails |" in ranged(["9.9", "--backend", "jax"], jobs.JOBS)[1]
    code, text = ranged(["installed", "--backend", "torch"])
    assert code == 0 and f"| {keras.__version__} | works |" in text


def test_the_conformance_tests_of_a_cell(ranged):
    code, text = ranged(["9.9", "--backend", "torch", "--tests"], ["tests"])
    assert code == 1
    assert "-- tests/conformance: 1 failed, 3 passed in 2 s\n-- tests: FAILED tests/a.py" in text
    assert "last words" in text and "| 9.9.9 | fails: tests |" in text
    text = ranged(["9.9", "--backend", "jax"], ["names"])[1]
    assert "fails: names (0 s)\n-- names: no keras.gone, see src/a.py:2\n" in text
    code, text = ranged(["9.9", "--backend", "tensorflow", "--tests"])
    assert code == 0 and text.count("-- tests/conformance: 1 failed, 3 passed") == 2


def test_a_failure_of_the_nightly_build_counts_if_strict(ranged):
    assert ranged(["nightly", "--backend", "torch"], ["export"])[0] == 0
    assert ranged(["nightly", "--backend", "torch", "--strict"], ["export"])[0] == 1


def test_a_version_that_is_not_there_ends_the_tool(ranged):
    code, text = ranged(["3.99"], found=versions.Unknown("the package index has no Keras 3.99"))
    assert (code, text) == (2, "the package index has no Keras 3.99\n")


def test_the_page_is_written_with_all_versions_only(ranged, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        ranged(["--write", "3.12"])
    assert "--write needs all versions and backends: name none" in capsys.readouterr().err
    monkeypatch.setattr(ranges, "PAGE", tmp_path / "page.md")
    ranges.PAGE.write_text("before\n<!-- scripts/range --write -->\nold\n<!-- end -->\nafter\n")
    ranged(["--write"])
    text = ranges.PAGE.read_text()
    assert text.startswith("before\n<!-- scripts/range --write -->\n\n| Keras | PyTorch ")
    assert "| 9.9.9 | works | works | works |" in text
    assert text.endswith("the LSTM runs cell by cell\n\n<!-- end -->\nafter\n")


def test_a_test_of_a_newer_keras_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.9.2")
    needs_keras("3.9", "keras.ops.add")
    message = "keras.ops.gone needs Keras 3.10, this is 3.9.2"
    with pytest.raises(pytest.skip.Exception, match=re.escape(message)):
        needs_keras("3.10", "keras.ops.gone")


JOBS = [
    ("torch", versions.STABLE[0], [*jobs.JOBS]),
    ("jax", versions.STABLE[3], ["digits", "resume", "evaluate", "export", "treadle.fit"]),
    ("tensorflow", versions.STABLE[0], ["digits", "resume", "doctor", "treadle.fit"]),
]


# `scripts/range` runs all jobs on all versions, in 13 processor minutes: too long for these tests.
@pytest.mark.parametrize(("backend", "version", "chosen"), JOBS)
def test_jobs_on_other_versions(backend, version, chosen, tmp_path):
    folder = versions.unpacked([version])[version]
    if isinstance(folder, versions.Unreachable):
        pytest.skip(str(folder))
    cell = jobs.Cell(folder, backend, tmp_path)
    jobs.run(cell, chosen)
    assert cell.failures == {}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (versions.STABLE[3], jobs.INSTALLED),
        pytest.param(jobs.INSTALLED, versions.STABLE[0], marks=pytest.mark.long),
    ],
)
def test_a_run_resumes_with_another_version_of_keras(first, then, tmp_path):
    folders = versions.unpacked({first, then} - {jobs.INSTALLED})
    for found in folders.values():
        if isinstance(found, versions.Unreachable):
            pytest.skip(str(found))
    killed, resumed = (
        jobs.Cell(folders.get(version), "torch", tmp_path) for version in (first, then)
    )
    words = ("run", "digits", "--epochs", jobs.EPOCHS, "--directory", "killed", "--quiet")
    killed.python("-c", jobs.KILLED, *words, code=-signal.SIGKILL)
    printed = resumed.treadle("resume", "killed")
    assert re.search(r"resuming after step (23|46)", printed)
    assert re.search(r"versions\.keras was '.*', now '.*'.*later steps may round dif", printed)


def test_the_lowest_version_is_that_of_the_bounds():
    project = (jobs.ROOT / "pyproject.toml").read_text()
    bound = project.partition('"keras>=')[2].partition('"')[0]
    assert versions.STABLE[0].startswith(bound)
