"""What a checkpoint stores of the loop: values that a file may not have are rejected."""

import re

import numpy as np
import pytest

import treadle
from treadle.core.folder import Folder
from treadle.core.progress import Progress
from treadle.errors import CheckpointError
from treadle.hooks.images import LONGEST, remove
from treadle.run.dispatch import HookDispatcher
from treadle.run.saved_state import LoopState
from treadle.steps.batch_forms import described, zeros

STATE = LoopState(
    call=0,
    begun=Progress(),
    reason=None,
    random={},
    trigger_check=Progress(step=4),
    last_recorded_step=0,
    function_calls=0,
    validation=None,
    means={},
)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"call": "0"}, "loop.call is '0'; expected a whole number from -1 to "),
        ({"begun": {"step": 3}}, "loop.begun.epoch is missing. Move"),
        ({"looked": []}, "loop.looked is a list; expected an object"),
        ({"averages": {"optimizer": -1}}, "loop.averages.optimizer is -1; expected a whole number"),
        ({"compilers": {"form": 3}}, "loop.compilers.form is 3; expected a text"),
    ],
)
def test_a_damaged_state_names_what_is_wrong(changes, why):
    text = f"manifest.json of a checkpoint is damaged, or of another version: {why}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(text)}"):
        LoopState.decode({**STATE.encode(), **changes})


def test_unknown_values_are_ignored():
    saved = STATE.encode()
    saved["begun"]["added"] = 1
    assert LoopState.decode(saved) == STATE


@pytest.mark.parametrize("form", [["array", "<f4", [2, -1]], ["array", [[]], [2]], ["set", []], 3])
def test_a_damaged_form_of_a_batch_is_named(form):
    with pytest.raises(CheckpointError) as caught:
        zeros(["tuple", [described(np.zeros(2)), form]])
    assert str(caught.value) == (
        "manifest.json of a checkpoint is damaged, or of another version: forms is "
        f"{'3' if form == 3 else 'a list'}; expected the form of a batch. Move the folder of this "
        "checkpoint away to use the one before"
    )


class Foreign(treadle.Hook):
    def restore(self, state):
        raise TypeError("its own")


def test_a_damaged_state_of_a_hook_is_named():
    saved = {"Checkpoint": {"meant": True}, "Foreign": {"a": 1}}
    with pytest.raises(CheckpointError) as caught:
        HookDispatcher([treadle.hooks.Checkpoint()]).restore(saved)
    assert str(caught.value) == (
        "manifest.json of a checkpoint is damaged, or of another version: the state of the hook "
        "Checkpoint cannot be restored (TypeError: 'bool' object is not iterable). Move the folder "
        "of this checkpoint away to use the one before"
    )
    with pytest.raises(TypeError, match="its own"):
        HookDispatcher([Foreign()]).restore(saved)


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
