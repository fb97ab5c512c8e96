"""A run whose `run.json` is lost or damaged resumes from the copy in its newest checkpoint."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import keras
import pytest
from executions import some

import treadle
from tests.run import test_resume
from tests.run.test_resume import Noisy, same_run, source
from tests.run_content import content_of, write_record
from treadle.checkpoint.format import digest_line
from treadle.core.directory import read_run
from treadle.errors import CheckpointError, DirectoryError, TreadleWarning
from treadle.hooks import Checkpoint

# Nothing of a compiled step is in the record.
run = partial(test_resume.run, options=treadle.Options(execution="eager"))
DAMAGES = {
    "deleted": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "zeros": lambda file: file.write_bytes(bytes(len(file.read_bytes()))),
    "another type": lambda file: file.write_text('{"configuration": {}, "calls": 3}'),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run, and the directory of the same run that was killed at step 10."""
    root = tmp_path_factory.mktemp("runs")
    straight = run(root / "straight")
    with pytest.raises(OSError, match="killed"):
        run(root / "cut", die_at=10)
    return {"straight": straight, "finished": root / "straight", "cut": root / "cut"}


def lose(runs: Any, kind: str, damage: str, directory: Path) -> Path:
    shutil.copytree(runs[kind], directory)
    DAMAGES[damage](directory / "run.json")
    return directory


def edit_manifests(directory: Path, edit: Any, steps: str = "*") -> None:
    """Change the manifests of checkpoints; their hashes follow."""
    for folder in (directory / "checkpoints").glob(f"step-{steps}"):
        record = json.loads((folder / "manifest.json").read_bytes())
        edit(record)
        data = json.dumps(record).encode()
        (folder / "manifest.json").write_bytes(data)
        (folder / "manifest.sha256").write_bytes(digest_line(data))


def newest(directory: Path) -> str:
    return max(path.name for path in (directory / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("kind", ["cut", pytest.param("finished", marks=pytest.mark.long)])
@pytest.mark.parametrize("damage", some(DAMAGES))
def test_the_run_resumes_and_writes_the_record_again(
    runs: Any, tmp_path: Path, kind: str, damage: str
) -> None:
    directory = lose(runs, kind, damage, tmp_path / "run")
    expected = f"the record of the run is that of checkpoint {newest(directory)}"
    with pytest.warns(TreadleWarning, match=expected) as caught:
        again = run(directory)
    [text] = [str(w.message) for w in caught if "the record of the run" in str(w.message)]
    fault = "is missing" if damage == "deleted" else r"is damaged ("
    assert text.startswith(f"{directory / 'run.json'} {fault}") and "\n" not in text
    same_run(again, runs["straight"])
    found, whole = (content_of(path)["run.json"] for path in (directory, runs["finished"]))
    assert found == whole
    assert read_run(directory)["finished"]
    assert run(directory).reason == "it was finished before"


def test_the_copy_is_used_only_if_the_file_is_lost(runs: Any, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(runs["cut"], directory)
    edit_manifests(directory, lambda record: record["about"]["run"].update(configuration={}))
    same_run(run(directory), runs["straight"])


def test_the_record_is_on_disk_before_anything_else_changes(runs: Any, tmp_path: Path) -> None:
    """An error before the first step removes nothing of the recovered run."""
    directory = lose(runs, "cut", "deleted", tmp_path / "run")

    class Failing(treadle.Hook):
        def start(self, loop: Any) -> None:
            raise RuntimeError("no GPU")

    before = content_of(directory / "checkpoints")
    with pytest.raises(RuntimeError, match="no GPU"):
        run(directory, hooks=[Failing()])
    assert content_of(directory / "checkpoints") == before
    assert read_run(directory)["error"] == "RuntimeError: no GPU"
    same_run(run(directory), runs["straight"])


def test_an_error_before_the_record_is_restored_removes_nothing(runs: Any, tmp_path: Path) -> None:
    directory = lose(runs, "cut", "deleted", tmp_path / "run")
    before = content_of(directory)

    def other(loop: treadle.Loop) -> None:
        raise RuntimeError("no data")

    for how, error in (({"body": other}, "no data"), ({"units": 7}, r"units was 6, now 7")):
        with pytest.raises((RuntimeError, DirectoryError), match=error):
            run(directory, **how)
        assert content_of(directory) == before


def test_a_damaged_checkpoint_gives_way_to_the_one_before(runs: Any, tmp_path: Path) -> None:
    directory = lose(runs, "cut", "deleted", tmp_path / "run")
    last = newest(directory)
    manifest = directory / "checkpoints" / last / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    before = max(
        path.name for path in (directory / "checkpoints").glob("step-*") if path.name != last
    )
    with pytest.warns(TreadleWarning, match=f"that of checkpoint {before}"):
        same_run(run(directory), runs["straight"])


@pytest.mark.parametrize(
    "edit",
    [
        lambda record: record["about"].pop("run"),
        lambda record: record["about"].update(run=3),
        lambda record: record["about"]["run"].update(calls=[3]),
        lambda record: record["about"]["run"].update(calls={"!array": 0}),
        lambda record: record["about"]["run"]["configuration"].update(recipe="a\0.py:T"),
    ],
)
def test_without_a_valid_copy_the_error_says_what_to_do(
    runs: Any, tmp_path: Path, edit: Any
) -> None:
    directory = lose(runs, "cut", "deleted", tmp_path / "run")
    edit_manifests(directory, edit)
    before = content_of(directory)
    with pytest.raises(DirectoryError) as caught:
        run(directory)
    assert str(caught.value) == (
        f"{directory} holds checkpoints up to step 9, but no run.json, and none of them holds a "
        "valid copy of it. Restore a copy of run.json, or choose another directory"
    )
    (directory / "run.json").touch()
    with pytest.raises(DirectoryError, match=r"run\.json is damaged.*\. Restore a copy of it$"):
        run(directory)
    (directory / "run.json").unlink()
    assert content_of(directory) == before


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(runs: Any, tmp_path: Path) -> None:
    directory = lose(runs, "cut", "deleted", tmp_path / "run")
    edit_manifests(directory, lambda record: record.update(format=99), "*9")
    with pytest.raises(CheckpointError, match=r"is of format 99, and this version of Treadle"):
        run(directory)


def test_a_record_of_a_newer_version_is_not_replaced(runs: Any, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(runs["cut"], directory)
    record = {**json.loads((directory / "run.json").read_text()), "format": 2}
    (directory / "run.json").write_text(json.dumps(record))
    with pytest.raises(DirectoryError, match="its format is 2, and this version of Treadle reads"):
        run(directory)


def test_a_run_killed_before_its_first_step_may_be_started_with_other_settings(
    tmp_path: Path,
) -> None:
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "cut", hooks=[Stopping(tmp_path / "kept", tmp_path / "cut")])
    assert [p.name for p in (tmp_path / "kept/checkpoints").glob("step-*")] == [f"step-{0:012d}"]
    assert (tmp_path / "kept" / "log.jsonl").read_bytes() == b""
    straight = run(tmp_path / "straight", units=7)
    same_run(run(tmp_path / "kept", units=7), straight)


class Stopping(treadle.Hook):
    """Copies the directory before the first step, which is what a kill there leaves."""

    def __init__(self, to: Path, directory: Path) -> None:
        self.to, self.directory = to, directory

    def before(self, loop: Any) -> None:
        [saver] = [hook for hook in loop.services.hooks._hooks if isinstance(hook, Checkpoint)]
        saver.saved.settle()
        shutil.copytree(self.directory, self.to)
        raise OSError("killed")


@pytest.mark.long
def test_fresh_removes_a_run_without_a_record(runs: Any, tmp_path: Path) -> None:
    for damage in ("deleted", "empty"):
        directory = lose(runs, "cut", damage, tmp_path / damage)
        (directory / "notes.txt").write_text("mine")
        same_run(run(directory, fresh=True), runs["straight"])
        assert (directory / "notes.txt").read_text() == "mine"


def test_a_warm_start_and_a_replay_use_the_copy(runs: Any, tmp_path: Path) -> None:
    directory = lose(runs, "cut", "truncated", tmp_path / "run")
    before = content_of_text(directory)
    task = Noisy()
    with pytest.warns(TreadleWarning, match=r"that of checkpoint step-0+9, whose weights are used"):
        assert "model/layers/0/kernel" in treadle.warm_start(task, directory)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    found = treadle.doctor.replay(Noisy(), source(), directory, 5, validation=source(5))
    assert found.agreement.compared and not found.agreement.difference
    assert any("the record of the run is that of checkpoint" in note for note in found.notes)
    assert content_of_text(directory) == before  # both only read


def content_of_text(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.long
def test_a_configuration_of_many_values_keeps_checkpoints_small(tmp_path: Path) -> None:
    """The copy is left out if it is so long that it would make checkpoints fail."""
    large = {"table": [["x" * 100] * 60] * 400}
    with pytest.raises(OSError, match="killed"):
        run(tmp_path, die_at=10, configuration=large)
    manifests = [json.loads(p.read_text()) for p in tmp_path.rglob("manifest.json")]
    assert manifests and not any("run" in record["about"] for record in manifests)
    assert run(tmp_path, configuration=large).progress.step > 10


@pytest.mark.long
def test_batches_excluded_by_a_rollback_stay_excluded(tmp_path: Path) -> None:
    excluded = [{"epoch": 0, "batch": 1, "step": 1, "why": "it was not finite"}]

    def lost(directory: Path) -> Any:
        record = json.loads((directory / "run.json").read_text())
        write_record(directory, {**record, "passed_over": excluded})
        with pytest.raises(OSError, match="killed"):
            run(directory, die_at=10)
        return read_run(directory)

    with pytest.raises(OSError, match="killed"):
        run(tmp_path, die_at=5)
    assert lost(tmp_path)["passed_over"] == excluded
    (tmp_path / "run.json").unlink()
    run(tmp_path)
    assert read_run(tmp_path)["passed_over"] == excluded


def test_a_loop_whose_first_step_failed_trains_when_its_task_is_mended(tmp_path: Path) -> None:
    """The folder that the loop created and removed again is created again."""

    class Fails(Noisy):
        broken = True

        def train_step(self, batch: Any) -> Any:
            if self.broken:
                raise ZeroDivisionError
            return super().train_step(batch)

    task, directory = Fails(), tmp_path / "runs" / "x"
    with treadle.Loop(task, directory, console=False) as loop:
        with pytest.raises(ZeroDivisionError):
            loop.fit(source(), epochs=1)
        assert not directory.exists()
        task.broken = False
        loop.fit(source(), epochs=1)
    assert read_run(directory)["finished"]
