"""`treadle.hooks`: its defaults, its public names, and what is true of each hook."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.hook_loop import Loop
from treadle import hooks
from treadle.core.hook import Hook
from treadle.errors import ConfigurationError
from treadle.run.services import services_of


def test_defaults():
    def names(found):
        return [type(hook).__name__ for hook in found]

    everything = ["Console", "Images", "JSONLines", "CSV", "FinalModel", "NonFinite"]
    everything += ["LearningCurve", "Checkpoint"]
    assert names(hooks.defaults(Path("runs"), quiet=False)) == everything
    assert names(hooks.defaults(Path("runs"), quiet=True)) == everything[1:]
    assert names(hooks.defaults(None, quiet=True)) == ["NonFinite"]


def test_a_hook_replaces_the_default_one_that_it_is_derived_from(tmp_path):
    class Own(hooks.Checkpoint):
        """Two that write into one folder would be in one another's way."""

    class Other(hooks.CSV):
        pass

    given = [Own(every="5 steps"), Other(tmp_path / "other.csv")]
    kinds = [type(hook) for hook in services_of(given, tmp_path, console=False).hooks._hooks]
    assert hooks.Checkpoint not in kinds and hooks.CSV not in kinds
    assert {hooks.JSONLines, hooks.FinalModel, Own, Other} <= {*kinds}


def test_a_run_saves_and_guards_by_one_hook_of_a_kind(tmp_path):
    class Own(hooks.Checkpoint):
        pass

    given = [hooks.Checkpoint("5 steps"), Own("1 epoch")]
    message = "a run has one Checkpoint hook, but was given 2 (Checkpoint and Own): pass one with "
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}all that it is to keep$"):
        services_of(given, tmp_path, console=False)
    given = [hooks.NonFinite("skip"), hooks.NonFinite("stop")]
    message = "a run has one NonFinite hook, but was given 2 (NonFinite and NonFinite): pass one "
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}with the action that you"):
        services_of(given, None, console=False)


def test_public_names_are_there():
    for name in hooks.__all__:
        assert name in dir(hooks)
        assert issubclass(getattr(hooks, name), Hook)
    with pytest.raises(AttributeError, match=r"module 'treadle.hooks' has no attribute 'Consol'"):
        _ = hooks.Consol


def test_hooks_that_were_never_started_can_end(tmp_path):
    optional = {name for name in ("MLflow", "Wandb") if find_spec(name.lower()) is None}
    for name in sorted({*hooks.__all__} - optional):
        arguments = [[]] if name == "KerasCallbacks" else []
        getattr(hooks, name)(*arguments).end(Loop(), ValueError())
    loop = Loop(tmp_path)
    loop.window(hooks.JSONLines(), loss=[1.0])
    loop.record(hooks.CSV(), "epoch", loss=1.0)
    assert list(tmp_path.iterdir()) == []
