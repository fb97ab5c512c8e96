"""What a checkpoint stores of the loop: values that a file may not have are rejected."""

import re
from pathlib import Path

import numpy as np
import pytest

import treadle
from treadle.checkpoint import Checkpoints, SavedState
from treadle.checkpoint.batch_forms import described
from treadle.core.folder import Folder
from treadle.core.progress import Progress
from treadle.errors import CheckpointError
from treadle.hooks.images import LONGEST, remove
from treadle.run.dispatch import HookDispatcher
from treadle.run.resume import restore_random_states
from treadle.run.state import RunState

STATE = RunState(
    progress=Progress(step=4),
    arrays={},
    call=0,
    begun=Progress(),
    ended_by=None,
    random={},
    trigger_check=Progress(step=4),
    last_recorded_step=0,
    function_calls=0,
    validation=[-1, {}],
    means={"epoch": {"loss": [1.5, 2]}, "since_last_logs": {}},
)
PATH = Path("runs/1/checkpoints/step-000000000004")
DAMAGED = f"{PATH / 'manifest.json'} is damaged, or of another version: "
ADVICE = ". Move the folder of this checkpoint away to use the one before"


def saved(loop=None, hooks=None):
    return SavedState(Progress(step=4), {}, loop=loop or {}, hooks=hooks or {}, path=PATH)


def test_a_checkpoint_that_was_read_knows_its_folder(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(saved())
    found = checkpoints.latest()
    assert found is not None and found.path == tmp_path / "step-000000000004"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"call": "0"}, "loop.call is '0'; expected a whole number from -1 to "),
        ({"begun": {"step": 3}}, "loop.begun.epoch is missing. Move"),
        ({"trigger_check": []}, "loop.trigger_check is a list; expected an object"),
        (
            {"averaging_updates": {"optimizer": -1}},
            "loop.averaging_updates.optimizer is -1; expected a whole number",
        ),
        ({"compilers": {"form": 3}}, "loop.compilers.form is 3; expected a text"),
        ({"means": {"epoch": {}}}, f"loop.means.since_last_logs is missing{ADVICE}"),
        (
            {"means": {"epoch": {"loss": [1.0]}, "since_last_logs": {}}},
            f"loop.means.epoch.loss is a list; expected a sum and a weight{ADVICE}",
        ),
        (
            {"means": {"epoch": {}, "since_last_logs": {"loss": ["1", 2]}}},
            f"loop.means.since_last_logs.loss is a list; expected a sum and a weight{ADVICE}",
        ),
        ({"validation": 3}, f"loop.validation is 3; expected a step and its results{ADVICE}"),
        (
            {"validation": [3, {"val_loss": "x"}]},
            "loop.validation[1].val_loss is 'x'; expected a nu",
        ),
        ({"weight_checksums": {"steps": 3}}, f"loop.weight_checksums.checksums is missing{ADVICE}"),
        ({"recompile": 3}, f"loop.recompile is 3; expected an object{ADVICE}"),
        (
            {"recompile": {"a": ["1"]}},
            f"loop.recompile.a is a list; expected an old and a new value{ADVICE}",
        ),
        ({"forms": {"train_step": 3}}, f"loop.forms.train_step is 3; expected a list{ADVICE}"),
        ({"forms": {"train_step": [["set"]]}}, "loop.forms.train_step[0]: a list is not the form"),
    ],
)
def test_a_damaged_state_names_what_is_wrong(changes, why):
    with pytest.raises(CheckpointError, match=f"^{re.escape(DAMAGED + why)}"):
        RunState.of(saved({**STATE.checkpoint().loop, **changes}))


def test_unknown_values_are_ignored():
    loop = dict(STATE.checkpoint().loop)
    loop["begun"]["added"] = 1
    assert RunState.of(saved(loop)) == STATE


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (["array", "<f4", [2, -1]], "a list is not the form of a batch"),
        (["array", [[]], [2]], "a list is not the form of a batch"),
        (["array", "|O", [2]], "'|O' is not a numeric dtype"),
        (["array", "<f8", [10**15]], "an array of shape [1000000000000000] is too large"),
        (["set", []], "a list is not the form of a batch"),
        (["object", "os", "x", [["a", ["set"]]]], "a list is not the form of a batch"),
        (["object", "os", "x", ["a"]], "not enough values to unpack (expected 2, got 1)"),
        (["dict", [[["a"], ["none"]]]], "unhashable type: 'list'"),
        (3, "3 is not the form of a batch"),
    ],
)
def test_a_damaged_form_of_a_batch_is_named(form, why):
    forms = {"eval_step": [None, ["tuple", [described(np.zeros(2)), form]]]}
    with pytest.raises(CheckpointError) as caught:
        RunState.of(saved({**STATE.checkpoint().loop, "forms": forms}))
    assert str(caught.value) == f"{DAMAGED}loop.forms.eval_step[1]: {why}{ADVICE}"


def test_a_form_may_have_a_class_that_this_process_lacks():
    forms = {"train_step": [["object", "no.such", "Batch", [["x", ["array", "<f4", [2]]]]]]}
    assert RunState.of(saved({**STATE.checkpoint().loop, "forms": forms})).forms == forms


class Foreign(treadle.Hook):
    def restore(self, state):
        raise TypeError("its own")


def test_a_damaged_state_of_a_hook_is_named():
    found = saved(hooks={"Checkpoint": {"measured": None, "meant": True}, "Foreign": {"a": 1}})
    with pytest.raises(CheckpointError) as caught:
        HookDispatcher([treadle.hooks.Checkpoint()]).restore(found)
    assert str(caught.value) == (
        f"{DAMAGED}the state of the hook Checkpoint cannot be restored (TypeError: 'bool' object "
        f"is not iterable){ADVICE}"
    )
    with pytest.raises(TypeError, match="its own"):
        HookDispatcher([Foreign()]).restore(found)


BEST = {"best": 0.5, "best_step": 3, "last_step": 4, "waited": 1}


@pytest.mark.parametrize(
    ("hook", "state", "why"),
    [
        (treadle.hooks.Checkpoint(), {"measured": ["4", 0.5], "meant": []}, "measured[0] is '4'"),
        (treadle.hooks.Checkpoint(), {"measured": [4, "x"], "meant": []}, "measured[1] is 'x'"),
        (treadle.hooks.Checkpoint(), {"measured": [4], "meant": []}, "not enough values to unpack"),
        (treadle.hooks.NonFinite(), {"warned": [], "meant": [], "skipped": "3"}, "skipped is '3'"),
        (treadle.hooks.EarlyStopping("loss"), {**BEST, "best": "x"}, "best is 'x'; expected a num"),
        (
            treadle.hooks.EarlyStopping("loss"),
            {**BEST, "waited": -1},
            "waited is -1; expected a wh",
        ),
        (
            treadle.hooks.ReduceOnPlateau("loss"),
            {**BEST, "cooling": None},
            "cooling is None; expec",
        ),
    ],
)
def test_a_wrong_value_in_the_state_of_a_hook_is_named(hook, state, why):
    """Not only when the hook uses it, in the middle of training."""
    name = f"{type(hook).__name__}({hook.identity})" if hook.identity else type(hook).__name__
    with pytest.raises(CheckpointError) as caught:
        HookDispatcher([hook]).restore(saved(hooks={name: state}))
    text = f"{DAMAGED}the state of the hook {name} cannot be restored (ValueError: {why}"
    assert str(caught.value).startswith(text), caught.value


@pytest.mark.parametrize("states", [{}, {"python": {"version": 3, "words": "x", "gauss": None}}])
def test_damaged_random_states_are_named(states):
    found = saved({**STATE.checkpoint().loop, "random": states})
    with pytest.raises(CheckpointError) as caught:
        restore_random_states(RunState.of(found))
    why = (
        "AttributeError: 'str' object has no attribute 'tolist'" if states else "KeyError: 'python'"
    )
    assert str(caught.value) == f"{DAMAGED}loop.random cannot be restored ({why}){ADVICE}"


def test_a_long_reason_is_cut():
    with pytest.raises(CheckpointError) as caught, saved().reading("it"):
        raise ValueError("x" * 10_000)
    assert len(str(caught.value)) < 500


def test_the_images_of_a_huge_log_are_removed_up_to_its_damage(tmp_path):
    images, log = tmp_path / "images", tmp_path / "log.jsonl"
    images.mkdir()
    for name in ("a-1.png", "b-2.png"):
        (images / name).touch()
    damage = b"\0" * 3 * LONGEST
    log.write_bytes(b'{"a": "images/a-1.png"}\n' + damage + b'\n{"b": "images/b-2.png"}\n')
    with Folder.open(tmp_path) as folder:
        remove(folder)
    assert [path.name for path in images.iterdir()] == ["b-2.png"]
